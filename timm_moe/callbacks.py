"""The parts of a training run, by their moments.

Before it a model is upcycled (``convert_to_moe``). During it experts are averaged
(``ExpertWeightAveraging``, ``start_averaging``) and router losses added (``auxiliary_loss``,
``add_router_losses``). After it the model is exported and pushed (``export_dense``,
``push_dense``).
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


# Every process that imports timm imports this package. So what comes after a run is imported at
# first use.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".export", __package__), name)
