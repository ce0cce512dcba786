"""Vision mixture-of-experts for timm; its import registers models and training hooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import timm as timm  # With timm_moe_autoload this import already registers the models.

from .registration import models

# isort: split
# The import above checks the version of timm, so it comes first.
from . import callbacks
from .callbacks import (
    ExpertWeightAveraging,
    RoutingSummary,
    add_router_losses,
    auxiliary_loss,
    average_experts_,
    expert_statistics,
    routing_summary,
    start_averaging,
)
from .convert import (
    RouterSpec,
    convert_to_moe,
    expert_parameters,
    moe_layers,
    register_router,
    to_dense,
)
from .layers import MemberLoss
from .training import expert_placement, parallelize_experts
from .version import __version__

if TYPE_CHECKING:
    from . import checkpoints
    from .callbacks import export_dense, export_moe, push_dense, push_moe

__all__ = [
    "ExpertWeightAveraging",
    "MemberLoss",
    "RouterSpec",
    "RoutingSummary",
    "__version__",
    "add_router_losses",
    "auxiliary_loss",
    "average_experts_",
    "checkpoints",
    "convert_to_moe",
    "expert_parameters",
    "expert_placement",
    "expert_statistics",
    "export_dense",
    "export_moe",
    "models",
    "moe_layers",
    "parallelize_experts",
    "push_dense",
    "push_moe",
    "register_router",
    "routing_summary",
    "start_averaging",
    "to_dense",
]


# Every process that imports timm imports this package. So what a training run does not need is
# imported at first use.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "checkpoints":
        return import_module(".checkpoints", __name__)
    return getattr(callbacks, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
