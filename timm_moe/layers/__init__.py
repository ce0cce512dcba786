"""Expert layers in plain PyTorch: they know nothing of training loops, timm or files."""

from .batch_ensemble import BatchEnsembleLinear
from .dispatch import Routing
from .ensemble import MemberLoss, Tile, ensemble_log_probabilities
from .experts import Experts
from .fused import FusedMlp, Fusion
from .moe_mlp import EwaMlp, MoeMlp, SharedExpertMlp
from .records import RecordingRouter, RouterRecord, begin_forward
from .registry import WeakRegistry
from .router import Router, routing_to
from .routing import (
    EnsembleRouter,
    ImageRouter,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    TilingRouter,
    TopKRouter,
)

__all__ = [
    "BatchEnsembleLinear",
    "EnsembleRouter",
    "EwaMlp",
    "Experts",
    "FusedMlp",
    "Fusion",
    "ImageRouter",
    "MemberLoss",
    "MoeMlp",
    "MultiHeadRouter",
    "PartitionedRouter",
    "RandomPartition",
    "RecordingRouter",
    "Router",
    "RouterRecord",
    "Routing",
    "SharedExpertMlp",
    "Tile",
    "TilingRouter",
    "TopKRouter",
    "WeakRegistry",
    "begin_forward",
    "ensemble_log_probabilities",
    "routing_to",
]
