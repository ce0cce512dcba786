"""Expert layers in plain PyTorch: they know nothing of training loops, timm or files."""

from .dispatch import Routing
from .experts import Experts
from .moe_mlp import EwaMlp, MoeMlp
from .routing import RandomPartition, RouterRecord, TopKRouter, begin_forward

__all__ = ["EwaMlp", "Experts", "MoeMlp", "RandomPartition", "RouterRecord", "Routing", "TopKRouter", "begin_forward"]
