"""Expert layers in plain PyTorch: they know nothing of training loops, timm or files."""

from .dispatch import Routing
from .experts import Experts
from .moe_mlp import EwaMlp, MoeMlp, SharedExpertMlp
from .records import RecordingRouter, RouterRecord, begin_forward
from .routing import ImageRouter, RandomPartition, TopKRouter

__all__ = [
    "EwaMlp",
    "Experts",
    "ImageRouter",
    "MoeMlp",
    "RandomPartition",
    "RecordingRouter",
    "RouterRecord",
    "Routing",
    "SharedExpertMlp",
    "TopKRouter",
    "begin_forward",
]
