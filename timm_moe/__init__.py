"""Vision mixture-of-experts for timm: importing this package registers its models and training hooks."""

from . import checkpoints, models
from .callbacks import timm_hooks
from .callbacks.aux_loss import RoutingSummary, auxiliary_loss, routing_summary
from .callbacks.ewa import ExpertWeightAveraging, average_experts_
from .callbacks.export import export_dense
from .callbacks.hub import push_dense, push_moe
from .convert import convert_to_moe, moe_layers, to_dense
from .layers import MemberLoss
from .version import __version__

__all__ = [
    "ExpertWeightAveraging",
    "MemberLoss",
    "RoutingSummary",
    "__version__",
    "auxiliary_loss",
    "average_experts_",
    "checkpoints",
    "convert_to_moe",
    "export_dense",
    "models",
    "moe_layers",
    "push_dense",
    "push_moe",
    "routing_summary",
    "to_dense",
]

timm_hooks.install()
