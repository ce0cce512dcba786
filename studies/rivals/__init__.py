"""Methods that the papers compare with. Their models are registered; no other part of the package imports them."""

from .batch_ensemble import BatchEnsembleLinear, BatchEnsembleVisionTransformer, scale_learning_rates
from .fused import FusedMlp, Fusion
from .mc_dropout import sampled_members
from .mimo import MimoMoeVisionTransformer, MimoVisionTransformer
from .switch_ema import SwitchEma

__all__ = [
    "BatchEnsembleLinear",
    "BatchEnsembleVisionTransformer",
    "FusedMlp",
    "Fusion",
    "MimoMoeVisionTransformer",
    "MimoVisionTransformer",
    "SwitchEma",
    "sampled_members",
    "scale_learning_rates",
]
