"""Registration of the models and the training hooks: importing this module does all, or nothing.

It is a module apart from the package's own. So a thread that imports timm can import it while
another thread, which waits for timm, has begun to import the package.
"""

import timm
import torch

try:
    # This is the newest part of timm that is needed.
    from timm.task import TokenDistillationTask  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"timm_moe needs timm 1.0.28 or newer, this is timm {timm.__version__}: pip install -U "
        "timm."
    ) from error

try:
    from .integrations import timm as timm_hooks
except ImportError as error:
    if (error.name or "").partition(".")[0] not in ("timm", "torch"):
        raise
    raise ImportError(
        f"timm_moe does not fit timm {timm.__version__} and torch {torch.__version__}: take "
        f"versions that docs/compatibility.md names ({error})."
    ) from error

# Training the models needs the hooks, so the hooks come first. They go if anything fails.
try:
    timm_hooks.install()
    from . import models as models
except BaseException:
    timm_hooks.uninstall()
    raise
