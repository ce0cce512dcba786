"""Batch ensembles inside one dense Vision Transformer (BatchEnsemble, arXiv 2002.06715; pBE, 2110.03360, appendix)."""

from dataclasses import replace
from typing import Any

from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    register_model,
    register_notrace_module,
)
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import nn

from ..convert.blocks import select_blocks
from ..layers import BatchEnsembleLinear
from ..layers.checks import check_number
from .members import MembersMixin
from .vision_transformer import VMOE_S_CFG, PreLogitsVisionTransformer

__all__ = ["BatchEnsembleVisionTransformer"]  # timm adds the entrypoints

register_notrace_module(BatchEnsembleLinear)  # looks at the batch


class BatchEnsembleVisionTransformer(MembersMixin, PreLogitsVisionTransformer):
    """A ViT that holds M members, which differ in factors inside the MLPs of some blocks, :class:`BatchEnsembleLinear`.

    Outputs are those of :class:`MembersMixin`; the members part at the first of these blocks.

    Args:
        args: as :class:`PreLogitsVisionTransformer`.
        ensemble_size: M.
        ensemble_layers: which blocks, as ``moe_layers`` of :func:`timm_moe.convert_to_moe`.
        factor_init: see :class:`BatchEnsembleLinear`.
        factor_lr: times the learning rate is that of the factors, under timm's optimizers and schedulers.
        kwargs: as :class:`PreLogitsVisionTransformer`.

    Raises:
        ValueError: on an option outside its range.
    """

    def __init__(
        self,
        *args: Any,
        ensemble_size: int = 2,
        ensemble_layers: str = "last-2",
        factor_init: str = "sign",
        factor_lr: float = 1.0,
        **kwargs: Any,
    ):
        check_number("factor_lr", factor_lr, 0, above=True)
        super().__init__(*args, **kwargs)
        blocks: Any = self.blocks
        chosen = select_blocks(ensemble_layers, len(blocks))
        for number in chosen:
            mlp = blocks[number].mlp
            mlp.fc1, mlp.fc2 = (BatchEnsembleLinear(layer, ensemble_size, factor_init) for layer in (mlp.fc1, mlp.fc2))
        self.factor_lr = factor_lr
        self.part_at(chosen[0], ensemble_size)

    def no_weight_decay(self) -> set[str]:
        """What timm's optimizers do not decay: that of the stock model, and the members' biases and factors."""
        own = {f"{name}.{part}" for name in self._shared_layers() for part in ("bias", "input_factor", "output_factor")}
        return {*super().no_weight_decay(), *own}

    def lr_scales(self) -> dict[str, float]:
        """Times the learning rate is that of these parameters, where it is not 1."""
        if self.factor_lr == 1:
            return {}
        parts = ("input_factor", "output_factor")
        return {f"{name}.{part}": self.factor_lr for name in self._shared_layers() for part in parts}

    def _shared_layers(self) -> list[str]:
        return [name for name, module in self.named_modules() if isinstance(module, BatchEnsembleLinear)]


#: The stock models whose pretrained tags the ensembles take over.
_STOCK = {
    "vit_be_b32": "vit_base_patch32_224",
    "vit_be_b16": "vit_base_patch16_224",
    "vit_be_l32": "vit_large_patch32_224",
    "vit_be_l16": "vit_large_patch16_224",
}

default_cfgs = generate_default_cfgs(
    {
        f"{name}.{cfg.tag}" if cfg.tag else name: replace(cfg, url="", custom_load=False)
        for name, stock in _STOCK.items()
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {"vit_be_s32": VMOE_S_CFG}
)


def _create(variant: str, pretrained: bool, model_args: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    return build_model_with_cfg(
        BatchEnsembleVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**model_args, **kwargs},
    )


@register_model
def vit_be_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-S/32: 512 wide and 8 blocks as V-MoE-S, not timm's ViT-S."""
    model_args = dict(patch_size=32, embed_dim=512, depth=8, num_heads=8)
    return _create("vit_be_s32", pretrained, model_args, kwargs)


@register_model
def vit_be_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-B/32."""
    model_args = dict(patch_size=32, embed_dim=768, depth=12, num_heads=12)
    return _create("vit_be_b32", pretrained, model_args, kwargs)


@register_model
def vit_be_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create("vit_be_b16", pretrained, model_args, kwargs)


@register_model
def vit_be_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-L/32."""
    model_args = dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16)
    return _create("vit_be_l32", pretrained, model_args, kwargs)


@register_model
def vit_be_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """Batch ensemble in ViT-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _create("vit_be_l16", pretrained, model_args, kwargs)
