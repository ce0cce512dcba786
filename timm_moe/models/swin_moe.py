"""Swin-MoE (Tutel, arXiv 2206.03382): timm's SwinTransformer with routed experts in its last two stages."""

from functools import partial
from typing import Any

from timm.models import generate_default_cfgs, model_entrypoint
from torch import nn

from ..integrations.timm import build_instead
from .ewa import expert_class
from .mixin import note_dense_form
from .registration import register, stock_cfgs

__all__: list[str] = []  # timm adds the entrypoints

#: Arguments that make timm's Swin the size of Swin-MoE; its exported form needs them too.
SIZE: dict[str, Any] = dict(img_size=192, window_size=12)
#: Swin-MoE in pre-training (the reference's configurations): in stage 3 every other block, in stage 4 the last.
SWIN_MOE: dict[str, Any] = {
    **dict(moe_layers="last-10", expert_dropout=0.1),
    **dict(router="top_k", top_k=1, noise_std=1.0, capacity_factor=1.25, batch_priority=True),
    **dict(aux_loss="importance+load", aux_loss_weight=0.01),
}
#: By registered name: the stock model of the same widths and depths, and options.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    f"swin_moe_{size}_patch4_window12_192_{suffix}": (f"swin_{size}_patch4_window7_224", options)
    for size, suffix, options in (
        ("small", "8e", dict(num_experts=8)),
        ("small", "16e", dict(num_experts=16)),
        ("small", "32e", dict(num_experts=32)),
        ("small", "32e_cosine", dict(num_experts=32, score="cosine")),
        ("base", "16e", dict(num_experts=16)),
    )
}
#: Preprocessing as in the reference.
_CFG: dict[str, Any] = dict(input_size=(3, 192, 192), pool_size=(6, 6), crop_pct=0.875)

default_cfgs = generate_default_cfgs(
    {tagged: cfg for name, (stock, _) in VARIANTS.items() for tagged, cfg in stock_cfgs(name, stock, **_CFG).items()}
)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    stock, options = VARIANTS[name]
    args = {**SWIN_MOE, **options, **SIZE, **kwargs}
    model, _ = build_instead(model_entrypoint(stock), expert_class, name, pretrained=pretrained, **args)
    # The published networks have no bias in their last layers: here it is zero, and is not trained.
    for path, parameter in model.named_parameters():
        if path.endswith("mlp.fc2.bias"):
            parameter.requires_grad_(False)
    note_dense_form(model, stock, {**SIZE, **kwargs})
    return model


for _name, (_stock, _options) in VARIANTS.items():
    _description = f"Swin-MoE-{'S' if 'small' in _stock else 'B'} with {_options['num_experts']} experts"
    _router = " and the cosine router" if "score" in _options else ""
    register(__name__, _name, f"{_description}{_router}.", partial(_create, _name))
