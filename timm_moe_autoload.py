"""Import of timm_moe as soon as timm's models are there, so that timm's own scripts find it.

torch calls :func:`autoload` at the end of ``import torch`` (entry point group ``torch.backends``).
That function must be quick, never raise, and import nothing of the package: it only waits for
``timm.models``.
``TIMM_MOE_AUTOLOAD=0``, ``false``, ``off`` or ``no`` switches it off.
"""

import importlib.abc
import os
import sys
import warnings
from importlib.machinery import PathFinder

_TARGET = "timm.models"


class _ImportAfter(importlib.abc.MetaPathFinder):
    """A finder that imports timm_moe once ``timm.models``, found by the others, has run."""

    def find_spec(self, fullname, path=None, target=None):
        """Return what the other finders return for ``timm.models``."""
        if fullname != _TARGET:
            return None
        spec = None
        for finder in list(sys.meta_path):
            if spec is None and finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_load(module):
                execute(module)
                if module.__name__ != _TARGET:  # a zip has one loader for all of its modules
                    return
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                _load()

            spec.loader.exec_module = execute_and_load
        return spec


class _FindPackage(importlib.abc.MetaPathFinder):
    """A finder of the package that passes over other files of its name.

    Such a file may be in the working directory, where Python looks first.
    """

    def find_spec(self, fullname, path=None, target=None):
        """Return the package: the one that has the module ``registration``."""
        if fullname != "timm_moe":
            return None
        beside = os.path.dirname(os.path.abspath(__file__))
        for folder in (*sys.path, beside):
            spec = PathFinder.find_spec(fullname, [folder])
            if spec is None or spec.origin is None or spec.submodule_search_locations is None:
                continue
            inside = spec.submodule_search_locations
            if PathFinder.find_spec(f"{fullname}.registration", inside) is not None:
                return spec
        raise ModuleNotFoundError(f"There is no package timm_moe in {beside}", name=fullname)


def _load():
    """Import the package, or warn.

    Whoever has begun to import it may be waiting for timm, which this thread holds: Python then
    returns the package as it is. So a module of its own registers the models.
    """
    begun = "timm_moe" in sys.modules
    finder = _FindPackage()
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0
    sys.meta_path.insert(place, finder)
    try:
        import timm_moe
        import timm_moe.registration
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if getattr(error, "name", None) == "timm_moe.registration":
            cause = f"ImportError: {timm_moe.__file__} has the name of the package: rename it"
        elif begun:  # Whoever imports the package gets the error.
            return
        warnings.warn(
            f"timm_moe could not be loaded, its models are missing: {cause}", stacklevel=2
        )
    finally:
        sys.meta_path.remove(finder)


def autoload():
    """Import the package if timm is there, or as soon as it is."""
    if os.environ.get("TIMM_MOE_AUTOLOAD", "").strip().lower() in ("0", "false", "off", "no"):
        return
    if _TARGET in sys.modules:
        _load()
    else:
        sys.meta_path.insert(0, _ImportAfter())
