"""Vision mixture-of-experts for timm: importing this package registers its models and training hooks."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import timm as timm  # its import registers the models, where timm_moe_autoload is at work

from .registration import models

# isort: split
# What is above checks the version of timm.
from . import callbacks
from .callbacks import (
    ExpertWeightAveraging,
    RoutingSummary,
    auxiliary_loss,
    average_experts_,
    routing_summary,
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
    "expert_parameters",
    "expert_placement",
    "export_dense",
    "models",
    "moe_layers",
    "parallelize_experts",
    "push_dense",
    "push_moe",
    "register_router",
    "routing_summary",
    "to_dense",
]


# What a training run does not need is imported at first use: every process that imports timm
# imports this package.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return (
        import_module(".checkpoints", __name__)
        if name == "checkpoints"
        else getattr(callbacks, name)
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
