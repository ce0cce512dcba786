"""Registers the models and the training hooks; importing this module does all of it, or nothing.

It is apart from the package itself, so that a thread that imports timm can have it where another
one, which waits for timm, has begun to import the package.
"""

import timm

try:
    from timm.task import TokenDistillationTask  # noqa: F401  (the newest part of timm that is needed)
except ImportError as error:
    raise ImportError(
        f"timm_moe needs timm 1.0.28 or newer, this is timm {timm.__version__}: pip install -U "
        "timm."
    ) from error

from .integrations import timm as timm_hooks

# The hooks come before the models, whose training needs them, and go if anything fails.
try:
    timm_hooks.install()
    from . import models as models
except BaseException:
    timm_hooks.uninstall()
    raise
