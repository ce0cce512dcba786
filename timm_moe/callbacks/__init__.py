"""Around a training run: upcycling before, averaging and router losses during, export and push after.

``from timm_moe.callbacks import convert_to_moe, ExpertWeightAveraging, auxiliary_loss, export_dense, push_dense``
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..convert import convert_to_moe
from .averaging import ExpertWeightAveraging, average_experts_
from .loop import add_router_losses, expert_statistics, start_averaging
from .router_losses import RoutingSummary, auxiliary_loss, routing_summary

if TYPE_CHECKING:
    from ..hub import push_dense, push_moe
    from .export import export_dense, export_moe

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

#: What comes after a run is imported at first use: every process that imports timm imports this package.
_AT_FIRST_USE = {
    "export_dense": ".export",
    "export_moe": ".export",
    "push_dense": "..hub.push",
    "push_moe": "..hub.push",
}


def __getattr__(name: str) -> Any:
    if name not in _AT_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_AT_FIRST_USE[name], __name__), name)
