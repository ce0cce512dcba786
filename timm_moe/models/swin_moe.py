"""Swin-MoE (Tutel, arXiv 2206.03382): a Swin Transformer with experts in its last two stages."""

from typing import Any

from timm.models.swin_transformer import SwinTransformer
from torch import nn

from ..convert.dense import swapped_for_dense
from ..layers import CosineRouter, TopKRouter
from .mixin import MoeMixin
from .variants import Variant, create_like_stock, register_variants

__all__ = ["MoeSwinTransformer"]  # timm adds the entrypoints

#: Standard deviation of the initial weights of all linear layers and routers. The reference calls
#: it ``INIT_STD``.
INIT_STD = 0.005


class MoeSwinTransformer(MoeMixin, SwinTransformer):
    """SwinTransformer with expert layers.

    Initial weights and weight decay are those of Swin-MoE's reference.
    """

    stock_class = SwinTransformer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._init_routers()

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialise as in a new model."""
        with swapped_for_dense(self):  # Experts are then made from the layers that are drawn here.
            super().init_weights(*args, **kwargs)
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=INIT_STD)
        self._init_routers()

    def _init_routers(self) -> None:
        for module in self.modules():
            if isinstance(module, CosineRouter):
                nn.init.trunc_normal_(module.projection, std=INIT_STD)
                nn.init.zeros_(module.projection_bias)
            elif isinstance(module, TopKRouter):
                nn.init.trunc_normal_(module.weight, std=INIT_STD)

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay.

        These are the stock model's, the experts' biases, and the matrices of cosine routers.
        """
        names = set(super().no_weight_decay())
        for name, module in self.named_modules():
            if isinstance(module, CosineRouter):
                names |= {f"{name}.weight", f"{name}.projection"}
        return names


#: Arguments that make timm's Swin the size of Swin-MoE; its exported form needs them too.
_SIZE: dict[str, Any] = dict(img_size=192, window_size=12)
#: Swin-MoE in pre-training (the reference's configurations). Experts are in every other block of
#: stage 3 and in the last of stage 4.
_SWIN_MOE: dict[str, Any] = dict(
    moe_layers="last-10",
    expert_dropout=0.1,
    router="top_k",
    top_k=1,
    noise_std=1.0,
    batch_priority=True,
    capacity_factor=1.25,
    capacity_rounding="floor",
    aux_loss="importance+load",
    aux_loss_weight=0.01,
    score="softmax",
)


def _variant(description: str, size: str, num_experts: int, **options: Any) -> Variant:
    """Return a variant in a size of timm's Swin Transformers."""
    # Tutel's capacity is a multiple of the number of processes that share an expert. The reference
    # trained with 32 processes.
    args = {
        **_SIZE,
        **_SWIN_MOE,
        "num_experts": num_experts,
        "capacity_multiple": 32 // num_experts,
        **options,
    }
    cfg = dict(pool_size=(6, 6), crop_pct=0.875)  # as the reference evaluates
    return Variant(description, f"swin_{size}_patch4_window7_224", args, cfg=cfg)


VARIANTS = {
    "swin_moe_small_patch4_window12_192_8e": _variant("Swin-MoE-S, 8 experts.", "small", 8),
    "swin_moe_small_patch4_window12_192_16e": _variant("Swin-MoE-S, 16 experts.", "small", 16),
    "swin_moe_small_patch4_window12_192_32e": _variant("Swin-MoE-S, 32 experts.", "small", 32),
    "swin_moe_small_patch4_window12_192_32e_cosine": _variant(
        "Swin-MoE-S, 32 experts, cosine router.", "small", 32, score="cosine"
    ),
    "swin_moe_base_patch4_window12_192_16e": _variant("Swin-MoE-B, 16 experts.", "base", 16),
}


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a variant; ``kwargs`` are the caller's."""
    return create_like_stock(MoeSwinTransformer, name, variant, pretrained, {**_SIZE, **kwargs})


register_variants(__name__, VARIANTS, _create)
