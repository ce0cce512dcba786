"""Expert layers in plain PyTorch, without timm, training loops or files."""

from .balancing_bias import BalancingBias
from .cosine_router import CosineRouter
from .dispatch import AnyRouting, ChosenRows, Routing, routing_to
from .ensemble import MemberLoss, ensemble_log_probabilities, tile
from .expert_choice import ExpertChoiceRouter
from .experts import Experts
from .functional import no_autocast
from .moe_mlp import EwaMlp, MoeMlp, SharedExpertMlp
from .recording_router import RecordingRouter, begin_forward
from .router import Router, linear_logits
from .router_totals import RouterRecord
from .routers import (
    EnsembleRouter,
    ImageRouter,
    MultiHeadRouter,
    PartitionedRouter,
    RandomPartition,
    TilingRouter,
    TopKRouter,
)
from .soft_moe import SoftMoeMlp, SoftRouter

__all__ = [
    "AnyRouting",
    "BalancingBias",
    "ChosenRows",
    "CosineRouter",
    "EnsembleRouter",
    "EwaMlp",
    "ExpertChoiceRouter",
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
    "SoftMoeMlp",
    "SoftRouter",
    "TilingRouter",
    "TopKRouter",
    "begin_forward",
    "ensemble_log_probabilities",
    "linear_logits",
    "no_autocast",
    "routing_to",
    "tile",
]
