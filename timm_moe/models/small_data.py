"""The EWA paper's models for small data sets (section 5.1), dense and with expert layers.

Sizes are those of "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from timm.models import build_model_with_cfg, generate_default_cfgs, pit, register_model, swin_transformer
from timm.models import vision_transformer as vit
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer
from torch import nn

from ..layers.checks import check_flag
from .ewa import expert_class
from .locality import LocalityAttention, LocalityWindowAttention, ShiftedPatchEmbed, ShiftedPatchMerging, ShiftedPooling
from .mixin import MoeMixin, architecture_args
from .tokens_to_token import LocalT2TVisionTransformer
from .vision_transformer import NAIVE, MoeVisionTransformer, PreLogitsVisionTransformer

__all__ = [
    "LocalPoolingVisionTransformer",
    "LocalSwinTransformer",
    "LocalT2TVisionTransformer",
    "LocalVisionTransformer",
]  # timm adds the entrypoints


class LocalVisionTransformer(PreLogitsVisionTransformer):
    """A ViT for small data sets.

    Args:
        args: as :class:`PreLogitsVisionTransformer`.
        shifted_patches: tokens are made by :class:`ShiftedPatchEmbed` (SPT).
        locality_attention: attention is :class:`LocalityAttention` (LSA).
        kwargs: as :class:`PreLogitsVisionTransformer`.
    """

    def __init__(
        self, *args: Any, shifted_patches: bool = False, locality_attention: bool = False, **kwargs: Any
    ) -> None:
        _check_flags(shifted_patches, locality_attention)
        if shifted_patches:
            kwargs["embed_layer"] = ShiftedPatchEmbed
        if locality_attention:
            kwargs["attn_layer"] = LocalityAttention
        super().__init__(*args, **kwargs)


class LocalPoolingVisionTransformer(PoolingVisionTransformer):
    """A PiT for small data sets.

    Args:
        args: as timm's PoolingVisionTransformer.
        shifted_patches: tokens are made by :class:`ShiftedPatchEmbed` and pooled by :class:`ShiftedPooling` (SPT).
        locality_attention: attention is :class:`LocalityAttention` (LSA).
        kwargs: as timm's PoolingVisionTransformer.

    Raises:
        ValueError: if shifted patches were to overlap.
    """

    def __init__(
        self, *args: Any, shifted_patches: bool = False, locality_attention: bool = False, **kwargs: Any
    ) -> None:
        _check_flags(shifted_patches, locality_attention)
        super().__init__(*args, **kwargs)
        if shifted_patches:
            self._shift_patches()
        if locality_attention:
            for block in _blocks(self.transformers):
                block.attn = LocalityAttention(block.attn.qkv.in_features, **_attention_args(block.attn))

    def _shift_patches(self: Any) -> None:
        conv = self.patch_embed.conv
        if conv.stride != conv.kernel_size:
            raise ValueError(
                f"Shifted patches do not overlap: create the model with a stride of its patch_size, "
                f"{conv.kernel_size[0]}, got {conv.stride[0]}."
            )
        like = _like(conv.weight)
        self.patch_embed = ShiftedPatchEmbed(
            self.patch_embed.img_size, conv.stride[0], conv.in_channels, conv.out_channels, output_fmt="NCHW", **like
        )
        for stage in self.transformers[1:]:
            stage.pool = ShiftedPooling(stage.pool.fc.in_features, stage.pool.fc.out_features, **like)


class LocalSwinTransformer(SwinTransformer):
    """A Swin Transformer for small data sets.

    Args:
        args: as timm's SwinTransformer.
        shifted_patches: tokens are made by :class:`ShiftedPatchEmbed` and merged by :class:`ShiftedPatchMerging` (SPT).
        locality_attention: attention is :class:`LocalityWindowAttention` (LSA).
        kwargs: as timm's SwinTransformer.
    """

    def __init__(
        self, *args: Any, shifted_patches: bool = False, locality_attention: bool = False, **kwargs: Any
    ) -> None:
        _check_flags(shifted_patches, locality_attention)
        if shifted_patches:
            kwargs["embed_layer"] = ShiftedPatchEmbed
        super().__init__(*args, **kwargs)
        if shifted_patches:
            stages: Any = self.layers[1:]
            for stage in stages:
                merging = stage.downsample
                stage.downsample = ShiftedPatchMerging(merging.dim, merging.out_dim, **_like(merging.reduction.weight))
        if locality_attention:
            for block in _blocks(self.layers):
                old = block.attn
                window: dict[str, Any] = dict(
                    head_dim=old.proj.in_features // old.num_heads, window_size=old.window_size
                )
                block.attn = LocalityWindowAttention(old.dim, **window, **_attention_args(old))
        if shifted_patches or locality_attention:
            self.init_weights(needs_reset=False)  # the new layers as the others


def _check_flags(shifted_patches: bool, locality_attention: bool) -> None:
    check_flag("shifted_patches", shifted_patches)
    check_flag("locality_attention", locality_attention)


def _blocks(stages: Any) -> list[Any]:
    return [block for stage in stages for block in stage.blocks]


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


class MoeLocalT2TVisionTransformer(MoeMixin, LocalT2TVisionTransformer):
    """A T2T-ViT for small data sets with expert layers."""

    stock_class = LocalT2TVisionTransformer


class MoeLocalVisionTransformer(MoeMixin, LocalVisionTransformer):
    """A ViT for small data sets with expert layers."""

    stock_class = LocalVisionTransformer


class MoeLocalPoolingVisionTransformer(MoeMixin, LocalPoolingVisionTransformer):
    """A PiT for small data sets with expert layers."""

    stock_class = LocalPoolingVisionTransformer


class MoeLocalSwinTransformer(MoeMixin, LocalSwinTransformer):
    """A Swin Transformer for small data sets with expert layers."""

    stock_class = LocalSwinTransformer


class Family(NamedTuple):
    """A small-data model, dense and with experts.

    Attributes:
        dense: registered name of the dense model.
        stock: the stock model as which the experts are exported where there is neither SPT nor LSA; None if timm has
            none.
        args: arguments that make the stock, or the dense, model this one.
        model_classes: the class of the dense model, of that with experts, and of that with experts and SPT or LSA.
        filter_fn: timm's filter for checkpoints.
        feature_cfg: how timm extracts features.
    """

    dense: str
    stock: str | None
    args: dict[str, Any]
    model_classes: tuple[type[nn.Module], type[nn.Module], type[nn.Module]]
    filter_fn: Callable[..., Any]
    feature_cfg: dict[str, Any]


_VIT = Family(
    "vit_xtiny",
    "vit_tiny_patch16_224",
    dict(img_size=32, patch_size=4, embed_dim=192, depth=9, num_heads=12, mlp_ratio=2),
    (LocalVisionTransformer, MoeVisionTransformer, MoeLocalVisionTransformer),
    vit.checkpoint_filter_fn,
    dict(feature_cls="getter", out_indices=3),
)
_PIT = Family(
    "pit_xs_32",
    "pit_xs_224",
    dict(img_size=32, patch_size=2, stride=2, mlp_ratio=2)
    | dict(base_dims=(48, 48, 48), depth=(2, 6, 4), heads=(2, 4, 8)),
    (LocalPoolingVisionTransformer, expert_class(PoolingVisionTransformer), MoeLocalPoolingVisionTransformer),
    pit.checkpoint_filter_fn,
    dict(feature_cls="hook", out_indices=(0, 1, 2)),
)
_SWIN = Family(
    "swin_tiny_patch2_window4_32",
    "swin_tiny_patch4_window7_224",
    dict(img_size=32, patch_size=2, window_size=4, mlp_ratio=2)
    | dict(embed_dim=96, depths=(2, 6, 4), num_heads=(3, 6, 12)),
    (LocalSwinTransformer, expert_class(SwinTransformer), MoeLocalSwinTransformer),
    swin_transformer.checkpoint_filter_fn,
    dict(flatten_sequential=True, out_indices=(0, 1, 2)),
)

_T2T = Family(
    "t2t_i2_32",
    None,
    dict(img_size=32, patch_size=4, embed_dim=256, depth=12, num_heads=4, mlp_ratio=2, qkv_bias=False),
    (LocalT2TVisionTransformer, MoeLocalT2TVisionTransformer, MoeLocalT2TVisionTransformer),
    vit.checkpoint_filter_fn,
    dict(feature_cls="getter", out_indices=3),
)

#: Preprocessing of CIFAR-100, the EWA paper's first data set.
_CFG: dict[str, Any] = dict(
    num_classes=100,
    input_size=(3, 32, 32),
    fixed_input_size=True,
    crop_pct=1.0,
    interpolation="bicubic",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    first_conv="patch_embed.proj",
    classifier="head",
)
_PIT_CFG = {**_CFG, "first_conv": "patch_embed.conv"}
_SWIN_CFG = {**_CFG, "classifier": "head.fc", "pool_size": (4, 4)}

_T2T_CFG = {**_CFG, "first_conv": None}

_CFGS: dict[str, Any] = (
    dict.fromkeys(("vit_xtiny", "vit_xtiny_ewa_moe", "vit_xtiny_moe"), _CFG)
    | dict.fromkeys(("pit_xs_32", "pit_xs_32_ewa_moe"), _PIT_CFG)
    | dict.fromkeys(("swin_tiny_patch2_window4_32", "swin_tiny_patch2_window4_32_ewa_moe"), _SWIN_CFG)
    | dict.fromkeys(("t2t_i2_32", "t2t_i2_32_ewa_moe"), _T2T_CFG)
)
default_cfgs = generate_default_cfgs(_CFGS)


def _create_dense(family: Family, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    return _build(family, family.dense, family.model_classes[0], pretrained, {**family.args, **kwargs})


def _create_moe(family: Family, variant: str, pretrained: bool, kwargs: dict[str, Any], **moe_args: Any) -> nn.Module:
    flags = {name: kwargs.pop(name, False) for name in ("shifted_patches", "locality_attention")}
    _check_flags(**flags)
    if any(flags.values()) or family.stock is None:
        model_class, dense_architecture, dense_args = family.model_classes[2], family.dense, {**kwargs, **flags}
    else:
        model_class, dense_architecture, dense_args = family.model_classes[1], family.stock, {**family.args, **kwargs}
    model = _build(family, variant, model_class, pretrained, {**family.args, **moe_args, **dense_args})
    if isinstance(model, MoeMixin):  # a feature extractor around it is never exported
        model.dense_architecture = dense_architecture
        model.dense_args = architecture_args(dense_args)
    return model


def _build(
    family: Family, variant: str, model_class: type[nn.Module], pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    feature_cfg = dict(family.feature_cfg)
    feature_cfg["out_indices"] = kwargs.pop("out_indices", feature_cfg["out_indices"])
    if kwargs.get("shifted_patches"):  # where the first layer is no convolution
        kwargs["pretrained_cfg_overlay"] = {**(kwargs.get("pretrained_cfg_overlay") or {}), "first_conv": None}
    return build_model_with_cfg(
        model_class, variant, pretrained, pretrained_filter_fn=family.filter_fn, feature_cfg=feature_cfg, **kwargs
    )


@register_model
def vit_xtiny(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViT-XT/4 at 32 px."""
    return _create_dense(_VIT, pretrained, kwargs)


@register_model
def vit_xtiny_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-XT/4 at 32 px."""
    return _create_moe(_VIT, "vit_xtiny_ewa_moe", pretrained, kwargs)


@register_model
def vit_xtiny_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """Naive MoE ViT-XT/4 at 32 px."""
    return _create_moe(_VIT, "vit_xtiny_moe", pretrained, kwargs, **NAIVE)


@register_model
def pit_xs_32(pretrained: bool = False, **kwargs) -> nn.Module:
    """PiT-XS/2 at 32 px."""
    return _create_dense(_PIT, pretrained, kwargs)


@register_model
def pit_xs_32_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA PiT-XS/2 at 32 px."""
    return _create_moe(_PIT, "pit_xs_32_ewa_moe", pretrained, kwargs)


@register_model
def swin_tiny_patch2_window4_32(pretrained: bool = False, **kwargs) -> nn.Module:
    """Swin-T/2 of three stages at 32 px."""
    return _create_dense(_SWIN, pretrained, kwargs)


@register_model
def swin_tiny_patch2_window4_32_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA Swin-T/2 of three stages at 32 px."""
    return _create_moe(_SWIN, "swin_tiny_patch2_window4_32_ewa_moe", pretrained, kwargs)


@register_model
def t2t_i2_32(pretrained: bool = False, **kwargs) -> nn.Module:
    """T2T-ViT of 12 blocks at 32 px."""
    return _create_dense(_T2T, pretrained, kwargs)


@register_model
def t2t_i2_32_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA T2T-ViT of 12 blocks at 32 px."""
    return _create_moe(_T2T, "t2t_i2_32_ewa_moe", pretrained, kwargs)
