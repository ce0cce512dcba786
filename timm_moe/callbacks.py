"""Around a training run: upcycling before, averaging and router losses during, export and push after.

``from timm_moe.callbacks import convert_to_moe, ExpertWeightAveraging, auxiliary_loss, export_dense, push_dense``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .convert import convert_to_moe
from .training import (
    ExpertWeightAveraging,
    RoutingSummary,
    add_router_losses,
    auxiliary_loss,
    average_experts_,
    expert_statistics,
    routing_summary,
    start_averaging,
)

if TYPE_CHECKING:
    from .export import export_dense, export_moe, push_dense, push_moe

__all__ = [
    "ExpertWeightAveraging",
    "RoutingSummary",
    "add_router_losses",
    "auxiliary_loss",
    "average_experts_",
    "convert_to_moe",
    "expert_statistics",
    "export_dense",
    "export_moe",
    "push_dense",
    "push_moe",
    "routing_summary",
    "start_averaging",
]


# What comes after a run is imported at first use: every process that imports timm imports this
# package.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".export", __package__), name)
