"""Expert layers in plain PyTorch, without timm, training loops or files."""

from .balancing_bias import BalancingBias
from .cosine_router import CosineRouter
from .ensemble import MemberLoss, ensemble_log_probabilities, tile
from .ensemble_routers import EnsembleRouter, MultiHeadRouter, PartitionedRouter, TilingRouter
from .expert_choice import ExpertChoiceRouter
from .experts import Experts
from .functional import no_autocast
from .image_router import ImageRouter
from .moe_mlp import EwaMlp, MoeMlp, SharedExpertMlp
from .queues import routing_to
from .random_partition import RandomPartition
from .recording_router import RecordingRouter, begin_forward
from .router import Router, linear_logits
from .router_totals import RouterRecord
from .routing import AnyRouting, ChosenRows, Routing
from .soft_moe import SoftMoeMlp, SoftRouter
from .top_k_router import TopKRouter

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
