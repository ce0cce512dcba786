"""Methods that the papers compare with.

The import registers their models and routers with timm and timm_moe.
"""

from .batch_ensemble import (
    BatchEnsembleLinear,
    BatchEnsembleVisionTransformer,
    factors,
    scale_learning_rates,
)
from .fused import FusedMlp, Fusion
from .mc_dropout import with_samples
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
    "factors",
    "scale_learning_rates",
    "with_samples",
]
