"""Vision mixture-of-experts for timm: importing this package registers its models and training hooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import timm

try:
    import timm.task
except ModuleNotFoundError as error:
    raise ImportError(
        f"timm_moe needs timm 1.0.23 or newer, this is timm {timm.__version__}: pip install -U timm."
    ) from error

from . import callbacks
from .callbacks import ExpertWeightAveraging, RoutingSummary, auxiliary_loss, average_experts_, routing_summary
from .convert import RouterSpec, convert_to_moe, moe_layers, register_router, to_dense
from .integrations import timm as timm_hooks
from .layers import MemberLoss
from .training import expert_placement
from .version import __version__

# All or nothing: the hooks come before the models, whose training needs them, and go if those cannot be registered.
timm_hooks.install()
try:
    from . import models, rivals
except BaseException:
    timm_hooks.uninstall()
    raise

if TYPE_CHECKING:
    from . import checkpoints
    from .callbacks import export_dense, push_dense, push_moe

__all__ = [
    "ExpertWeightAveraging",
    "MemberLoss",
    "RouterSpec",
    "RoutingSummary",
    "__version__",
    "auxiliary_loss",
    "average_experts_",
    "checkpoints",
    "convert_to_moe",
    "expert_placement",
    "export_dense",
    "models",
    "moe_layers",
    "push_dense",
    "push_moe",
    "register_router",
    "rivals",
    "routing_summary",
    "to_dense",
]


# What a training run does not need is imported at first use: every process that imports timm imports this package.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".checkpoints", __name__) if name == "checkpoints" else getattr(callbacks, name)
