"""The EWA paper's models for small data sets (section 5.1), dense and with expert layers.

Sizes follow "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from timm.models import build_model_with_cfg, pit, swin_transformer
from timm.models import vision_transformer as vit
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from .ewa import expert_class
from .locality import (
    LocalityAttention,
    LocalityWindowAttention,
    ShiftedPatchEmbed,
    ShiftedPatchMerging,
    ShiftedPooling,
    check_flags,
)
from .mixin import moe_class, note_dense_form
from .registration import SIZES, register
from .tokens_to_token import LocalT2TVisionTransformer
from .vision_transformer import NAIVE, MoeVisionTransformer, PreLogitsVisionTransformer

__all__ = [
    "LocalPoolingVisionTransformer",
    "LocalSwinTransformer",
    "LocalT2TVisionTransformer",
    "LocalVisionTransformer",
]  # timm adds the entrypoints


class LocalVisionTransformer(PreLogitsVisionTransformer):
    """A ViT for small data sets: a :class:`PreLogitsVisionTransformer` with two more options.

    ``shifted_patches`` is :class:`ShiftedPatchEmbed` (SPT), ``locality_attention``
    :class:`LocalityAttention` (LSA).
    """

    def __init__(
        self,
        *args: Any,
        shifted_patches: bool = False,
        locality_attention: bool = False,
        **kwargs: Any,
    ):
        check_flags(shifted_patches, locality_attention)
        if shifted_patches:
            kwargs["embed_layer"] = ShiftedPatchEmbed
        if locality_attention:
            kwargs["attn_layer"] = LocalityAttention
        super().__init__(*args, **kwargs)


class LocalPoolingVisionTransformer(PoolingVisionTransformer):
    """A PiT for small data sets, as :class:`LocalVisionTransformer`; with SPT it pools by :class:`ShiftedPooling`.

    Raises:
        ValueError: if shifted patches would overlap.
    """

    def __init__(
        self,
        *args: Any,
        shifted_patches: bool = False,
        locality_attention: bool = False,
        **kwargs: Any,
    ):
        check_flags(shifted_patches, locality_attention)
        super().__init__(*args, **kwargs)
        stages: Any = self.transformers
        if shifted_patches:
            conv, size = self.patch_embed.conv, self.patch_embed.img_size
            if conv.stride != conv.kernel_size:
                raise ValueError(
                    "Shifted patches do not overlap: create the model with a stride of its "
                    f"patch_size, {conv.kernel_size[0]}, got {conv.stride[0]}."
                )
            like = _like(conv.weight)
            self.patch_embed: Any = ShiftedPatchEmbed(
                size, conv.stride[0], conv.in_channels, conv.out_channels, output_fmt="NCHW", **like
            )
            for stage in stages[1:]:
                stage.pool = ShiftedPooling(
                    stage.pool.fc.in_features, stage.pool.fc.out_features, **like
                )
        if locality_attention:
            for block in (block for stage in stages for block in stage.blocks):
                block.attn = LocalityAttention(
                    block.attn.qkv.in_features, **_attention_args(block.attn)
                )


class LocalSwinTransformer(SwinTransformer):
    """A Swin Transformer for small data sets, as :class:`LocalVisionTransformer`.

    With SPT it merges by :class:`ShiftedPatchMerging`; LSA is :class:`LocalityWindowAttention`.
    """

    def __init__(
        self,
        *args: Any,
        shifted_patches: bool = False,
        locality_attention: bool = False,
        **kwargs: Any,
    ):
        check_flags(shifted_patches, locality_attention)
        if shifted_patches:
            kwargs["embed_layer"] = ShiftedPatchEmbed
        super().__init__(*args, **kwargs)
        stages: Any = self.layers
        if shifted_patches:
            for stage in stages[1:]:
                merging = stage.downsample
                stage.downsample = ShiftedPatchMerging(
                    merging.dim, merging.out_dim, **_like(merging.reduction.weight)
                )
        if locality_attention:
            for block in (block for stage in stages for block in stage.blocks):
                old = block.attn
                size = dict(
                    head_dim=old.proj.in_features // old.num_heads, window_size=old.window_size
                )
                block.attn = LocalityWindowAttention(old.dim, **size, **_attention_args(old))
        if shifted_patches or locality_attention:
            self.init_weights(needs_reset=False)  # for the new layers too


def _like(weight: nn.Parameter) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}


def _attention_args(attention: Any) -> dict[str, Any]:
    return dict(
        num_heads=attention.num_heads,
        qkv_bias=attention.qkv.bias is not None,
        attn_drop=attention.attn_drop.p,
        proj_drop=attention.proj_drop.p,
        **_like(attention.qkv.weight),
    )


# They are assigned to their names so that pickle finds them.
MoeLocalVisionTransformer = moe_class(LocalVisionTransformer, __name__)
MoeLocalPoolingVisionTransformer = moe_class(LocalPoolingVisionTransformer, __name__)
MoeLocalSwinTransformer = moe_class(LocalSwinTransformer, __name__)
MoeLocalT2TVisionTransformer = moe_class(LocalT2TVisionTransformer, __name__)

#: Preprocessing of CIFAR-100, the EWA paper's first data set.
_CIFAR100: dict[str, Any] = {
    **dict(num_classes=100, first_conv="patch_embed.proj", classifier="head"),
    **dict(input_size=(3, 32, 32), fixed_input_size=True, crop_pct=1.0, interpolation="bicubic"),
    **dict(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
}


class Family(NamedTuple):
    """A small-data model, dense and with experts."""

    description: str
    dense: str  # registered name
    # The experts are exported as this model of timm if there is neither SPT nor LSA.
    stock: str | None
    args: dict[str, Any]  # they make the stock, or the dense, model this one
    model_classes: tuple[type[nn.Module], ...]  # dense, with experts, with experts and SPT or LSA
    cfg: dict[str, Any]
    filter_fn: Callable[..., Any]  # for checkpoints
    feature_cfg: dict[str, Any]


_VIT = Family(
    "ViT-XT/4 at 32 px.",
    "vit_xtiny",
    "vit_tiny_patch16_224",
    dict(img_size=32, patch_size=4, **SIZES["xtiny"]),
    (LocalVisionTransformer, MoeVisionTransformer, MoeLocalVisionTransformer),
    _CIFAR100,
    vit.checkpoint_filter_fn,
    dict(feature_cls="getter", out_indices=3),
)
_PIT = Family(
    "PiT-XS/2 at 32 px.",
    "pit_xs_32",
    "pit_xs_224",
    dict(img_size=32, patch_size=2, stride=2, mlp_ratio=2)
    | dict(base_dims=(48, 48, 48), depth=(2, 6, 4), heads=(2, 4, 8)),
    (
        LocalPoolingVisionTransformer,
        expert_class(PoolingVisionTransformer),
        MoeLocalPoolingVisionTransformer,
    ),
    {**_CIFAR100, "first_conv": "patch_embed.conv"},
    pit.checkpoint_filter_fn,
    dict(feature_cls="hook", out_indices=(0, 1, 2)),
)
_SWIN = Family(
    "Swin-T/2 of three stages at 32 px.",
    "swin_tiny_patch2_window4_32",
    "swin_tiny_patch4_window7_224",
    dict(img_size=32, patch_size=2, window_size=4, mlp_ratio=2)
    | dict(embed_dim=96, depths=(2, 6, 4), num_heads=(3, 6, 12)),
    (LocalSwinTransformer, expert_class(SwinTransformer), MoeLocalSwinTransformer),
    {**_CIFAR100, "classifier": "head.fc", "pool_size": (4, 4)},
    swin_transformer.checkpoint_filter_fn,
    dict(flatten_sequential=True, out_indices=(0, 1, 2)),
)
_T2T = Family(
    "T2T-ViT of 12 blocks at 32 px.",
    "t2t_i2_32",
    None,
    dict(
        img_size=32, patch_size=4, embed_dim=256, depth=12, num_heads=4, mlp_ratio=2, qkv_bias=False
    ),
    (LocalT2TVisionTransformer, MoeLocalT2TVisionTransformer, MoeLocalT2TVisionTransformer),
    {**_CIFAR100, "first_conv": None},
    vit.checkpoint_filter_fn,
    dict(feature_cls="getter", out_indices=3),
)


def _create(
    family: Family, name: str, moe_args: dict[str, Any], pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    model_class, dense_architecture, dense_args = family.model_classes[0], family.dense, kwargs
    if name != family.dense:
        flags = {
            flag: kwargs.pop(flag, False) for flag in ("shifted_patches", "locality_attention")
        }
        if family.stock is None or any(flag is not False for flag in flags.values()):
            model_class, dense_args = family.model_classes[2], {**kwargs, **flags}
        else:
            model_class, dense_architecture = family.model_classes[1], family.stock
            dense_args = {**family.args, **kwargs}
    args = {**family.args, **moe_args, **dense_args}
    feature_cfg = {
        **family.feature_cfg,
        "out_indices": args.pop("out_indices", family.feature_cfg["out_indices"]),
    }
    if args.get("shifted_patches"):  # its first layer is no convolution
        args["pretrained_cfg_overlay"] = {
            **(args.get("pretrained_cfg_overlay") or {}),
            "first_conv": None,
        }
    model = build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=family.filter_fn,
        feature_cfg=feature_cfg,
        **args,
    )
    note_dense_form(model, dense_architecture, dense_args)
    return model


def _register(family: Family, name: str, description: str, **moe_args: Any) -> None:
    register(
        __name__, name, description, partial(_create, family, name, moe_args), {name: family.cfg}
    )


for _family in (_VIT, _PIT, _SWIN, _T2T):
    _register(_family, _family.dense, _family.description)
    _register(_family, f"{_family.dense}_ewa_moe", f"EWA {_family.description}")
_register(_VIT, "vit_xtiny_moe", "Naive MoE ViT-XT/4 at 32 px.", **NAIVE)
