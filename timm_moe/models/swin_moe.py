"""Swin-MoE (Tutel, arXiv 2206.03382): timm's SwinTransformer with routed experts in its last two stages."""

from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs, model_entrypoint
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from ..integrations.timm import build_instead
from .ewa import expert_class
from .mixin import note_dense_form
from .registration import Variant, register_variants

__all__ = ["MoeSwinTransformer"]  # timm adds the entrypoints

MoeSwinTransformer = expert_class(SwinTransformer)

#: Arguments that make timm's Swin the size of Swin-MoE; its exported form needs them too.
_SIZE: dict[str, Any] = dict(img_size=192, window_size=12)
#: Swin-MoE in pre-training (the reference's configurations): every other block of stage 3, the last of stage 4.
_SWIN_MOE: dict[str, Any] = {
    **dict(moe_layers="last-10", expert_dropout=0.1),
    **dict(router="top_k", top_k=1, noise_std=1.0, capacity_factor=1.25, batch_priority=True),
    **dict(aux_loss="importance+load", aux_loss_weight=0.01, score="softmax"),
}


def _variant(description: str, size: str, num_experts: int, **options: Any) -> Variant:
    args = {**_SIZE, **_SWIN_MOE, "num_experts": num_experts, **options}
    return Variant(description, f"swin_{size}_patch4_window7_224", args)


VARIANTS = {
    "swin_moe_small_patch4_window12_192_8e": _variant("Swin-MoE-S, 8 experts.", "small", 8),
    "swin_moe_small_patch4_window12_192_16e": _variant("Swin-MoE-S, 16 experts.", "small", 16),
    "swin_moe_small_patch4_window12_192_32e": _variant("Swin-MoE-S, 32 experts.", "small", 32),
    "swin_moe_small_patch4_window12_192_32e_cosine": _variant(
        "Swin-MoE-S, 32 experts, cosine router.", "small", 32, score="cosine"
    ),
    "swin_moe_base_patch4_window12_192_16e": _variant("Swin-MoE-B, 16 experts.", "base", 16),
}
default_cfgs = generate_default_cfgs(
    {
        tagged: replace(cfg, pool_size=(6, 6), crop_pct=0.875)  # as the reference evaluates
        for name, variant in VARIANTS.items()
        for tagged, cfg in variant.cfgs(name).items()
    }
)


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    args = {**variant.args, **kwargs}
    entrypoint = model_entrypoint(variant.stock)
    model, _ = build_instead(entrypoint, lambda stock_class: MoeSwinTransformer, name, pretrained=pretrained, **args)
    # The published networks have no bias in their last layers: here it is zero, and is not trained.
    for path, parameter in model.named_parameters():
        if path.endswith("mlp.fc2.bias"):
            parameter.requires_grad_(False)
    note_dense_form(model, variant.stock, {**_SIZE, **kwargs})
    return model


register_variants(__name__, VARIANTS, _create)
