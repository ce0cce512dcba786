"""Expert layers in plain PyTorch: they know nothing of training loops, timm or files."""

from .dispatch import Routing
from .experts import Experts
from .moe_mlp import EwaMlp, MoeMlp
from .records import RecordingRouter, RouterRecord, begin_forward
from .routing import RandomPartition, TopKRouter

__all__ = [
    "EwaMlp",
    "Experts",
    "MoeMlp",
    "RandomPartition",
    "RecordingRouter",
    "RouterRecord",
    "Routing",
    "TopKRouter",
    "begin_forward",
]
