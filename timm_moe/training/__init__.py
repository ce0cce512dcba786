"""Training of experts: averaging, router losses, placement over processes."""

from .averaging import ExpertWeightAveraging, average_experts_
from .expert_parallel import parallelize_experts
from .loop import add_router_losses, expert_statistics, start_averaging
from .placement import expert_placement
from .router_losses import RoutingSummary, auxiliary_loss, routing_summary

__all__ = [
    "ExpertWeightAveraging",
    "RoutingSummary",
    "add_router_losses",
    "auxiliary_loss",
    "average_experts_",
    "expert_placement",
    "expert_statistics",
    "parallelize_experts",
    "routing_summary",
    "start_averaging",
]
