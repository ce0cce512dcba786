"""Lets timm's own scripts find timm_moe: imports it as soon as timm's models are there.

torch calls :func:`autoload` at the end of ``import torch`` (entry point group ``torch.backends``). It must be quick,
never raise, and import nothing of the package: it only waits for ``timm.models``. ``TIMM_MOE_AUTOLOAD=0`` switches it
off.
"""

import importlib
import importlib.abc
import os
import sys
import warnings

_TARGET = "timm.models"


class _ImportAfter(importlib.abc.MetaPathFinder):
    """Finds ``timm.models`` as everyone else does, and imports timm_moe once that module has run."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TARGET:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_load(module):
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _load()

            spec.loader.exec_module = execute_and_load
        return spec


def _load():
    try:
        if importlib.import_module("timm_moe").__file__ is None:
            raise ImportError("its folder is empty")
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        warnings.warn(f"timm_moe could not be loaded, its models are missing: {cause}", stacklevel=2)


def autoload():
    if os.environ.get("TIMM_MOE_AUTOLOAD", "1") == "0" or "timm_moe" in sys.modules:
        return
    if _TARGET in sys.modules:
        _load()
    else:
        sys.meta_path.insert(0, _ImportAfter())
