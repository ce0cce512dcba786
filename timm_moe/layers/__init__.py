"""Expert layers in plain PyTorch, without timm, training loops or files."""

from .dispatch import Routing, routing_to
from .ensemble import MemberLoss, ensemble_log_probabilities, tile
from .experts import Experts
from .moe_mlp import EwaMlp, MoeMlp, SharedExpertMlp
from .recording_router import RecordingRouter, RouterRecord, begin_forward
from .router import Router
from .routers import (
    EnsembleRouter,
    ImageRouter,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    TilingRouter,
    TopKRouter,
)

__all__ = [
    "EnsembleRouter",
    "EwaMlp",
    "Experts",
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
    "TilingRouter",
    "TopKRouter",
    "begin_forward",
    "ensemble_log_probabilities",
    "routing_to",
    "tile",
]
