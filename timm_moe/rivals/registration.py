"""The five sizes of Vision Transformers in which a rival is registered."""

from collections.abc import Callable
from functools import partial
from typing import Any

from timm.models import build_model_with_cfg
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from ..models.registration import register, stock_cfgs, vit_args
from ..models.vision_transformer import VMOE_S_CFG

#: Arguments of timm's VisionTransformer by size. ``"s32"`` is V-MoE's own S, 512 wide and 8 blocks.
ARGS = {
    "s32": vit_args("vmoe_small", 32),
    "b32": vit_args("base", 32),
    "b16": vit_args("base", 16),
    "l32": vit_args("large", 32),
    "l16": vit_args("large", 16),
}
_STOCK = {
    "b32": "vit_base_patch32_224",
    "b16": "vit_base_patch16_224",
    "l32": "vit_large_patch32_224",
    "l16": "vit_large_patch16_224",
}


def cfgs(family: str) -> dict[str, Any]:
    """Entries of ``default_cfgs`` for ``<family>_<size>``, with the pretrained tags of timm's models of these sizes."""
    tagged = {
        name: cfg for size, stock in _STOCK.items() for name, cfg in stock_cfgs(f"{family}_{size}", stock).items()
    }
    return {f"{family}_s32": VMOE_S_CFG, **tagged}


def register_sizes(
    module: str, family: str, description: str, create: Callable[[str, bool, dict[str, Any]], nn.Module]
) -> None:
    """Register ``<family>_<size>`` in all sizes for the module whose ``default_cfgs`` has them.

    The description begins the docstring of the entrypoints; ``create`` takes the size, ``pretrained`` and ``kwargs``.
    """
    for size in ARGS:
        note = ": 512 wide and 8 blocks, not timm's ViT-S" if size == "s32" else ""
        text = f"{description}-{size[0].upper()}/{size[1:]}{note}."
        register(module, f"{family}_{size}", text, partial(create, size))


def create_vit(model_class: type[nn.Module], name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a dense model as timm builds its Vision Transformers; the name ends with the size."""
    return build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**ARGS[name.rpartition("_")[2]], **kwargs},
    )
