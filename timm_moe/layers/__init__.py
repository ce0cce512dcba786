"""Expert layers in plain PyTorch: they know nothing of training loops, timm or files."""

from .experts import Experts
from .moe_mlp import MoeMlp
from .routing import RandomPartition, Routing

__all__ = ["Experts", "MoeMlp", "RandomPartition", "Routing"]
