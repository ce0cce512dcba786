"""Vision Transformers with expert layers: EWA (arXiv 2308.06093)."""

from dataclasses import replace
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from .mixin import MoeMixin, architecture_args

__all__ = ["MoeVisionTransformer"]  # timm adds the entrypoints


class MoeVisionTransformer(MoeMixin, VisionTransformer):
    """timm's VisionTransformer with expert layers."""

    stock_class = VisionTransformer


#: The stock models whose pretrained tags the EWA models take over.
_STOCK = {
    "vit_tiny_ewa_moe": "vit_tiny_patch16_224",
    "vit_small_ewa_moe": "vit_small_patch16_224",
    "vit_base_ewa_moe": "vit_base_patch16_224",
    "vit_large_ewa_moe": "vit_large_patch16_224",
}

default_cfgs = generate_default_cfgs(
    {
        # The Hub's weights are in timm's own format; the .npz originals behind `url` are not needed.
        f"{name}.{cfg.tag}": replace(cfg, url="", custom_load=False)
        for name, stock in _STOCK.items()
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {
        "vit_xtiny_ewa_moe": dict(
            num_classes=100,
            input_size=(3, 32, 32),
            fixed_input_size=True,
            crop_pct=1.0,
            interpolation="bicubic",
            mean=(0.5071, 0.4865, 0.4409),  # of CIFAR-100, the paper's first data set
            std=(0.2673, 0.2564, 0.2762),
            first_conv="patch_embed.proj",
            classifier="head",
        )
    }
)


def _create_moe_vit(
    variant: str, dense_architecture: str, pretrained: bool, model_args: dict[str, Any], kwargs: dict[str, Any]
) -> nn.Module:
    """Build a variant as timm builds its own.

    Args:
        variant: registered name.
        dense_architecture: the stock model that is exported.
        pretrained: load pretrained weights.
        model_args: arguments of the stock class that define the variant.
        kwargs: the caller's arguments, which override ``model_args``.
    """
    out_indices = kwargs.pop("out_indices", 3)
    model = build_model_with_cfg(
        MoeVisionTransformer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **{**model_args, **kwargs},
    )
    if isinstance(model, MoeVisionTransformer):  # a feature extractor around it is never exported
        model.dense_architecture = dense_architecture
        model.dense_args = architecture_args(kwargs)
    return model


@register_model
def vit_tiny_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-Ti/16."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create_moe_vit("vit_tiny_ewa_moe", _STOCK["vit_tiny_ewa_moe"], pretrained, model_args, kwargs)


@register_model
def vit_small_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-S/16."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create_moe_vit("vit_small_ewa_moe", _STOCK["vit_small_ewa_moe"], pretrained, model_args, kwargs)


@register_model
def vit_base_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create_moe_vit("vit_base_ewa_moe", _STOCK["vit_base_ewa_moe"], pretrained, model_args, kwargs)


@register_model
def vit_large_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _create_moe_vit("vit_large_ewa_moe", _STOCK["vit_large_ewa_moe"], pretrained, model_args, kwargs)


@register_model
def vit_xtiny_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-XT/4 at 32 px, the paper's model for small data (section 5.1; sizes of arXiv 2112.13492)."""
    model_args = dict(img_size=32, patch_size=4, embed_dim=192, depth=9, num_heads=12, mlp_ratio=2, num_classes=100)
    # timm has no stock model of this shape: the export is a vit_tiny_patch16_224 with these arguments.
    return _create_moe_vit("vit_xtiny_ewa_moe", "vit_tiny_patch16_224", pretrained, {}, {**model_args, **kwargs})
