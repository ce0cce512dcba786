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
from timm.models.vision_transformer import VisionTransformer
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
from .mixin import StockForm, moe_class, note_dense_form
from .tokens_to_token import LocalT2TVisionTransformer
from .variants import SIZES, register
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
        shifted_patches: make tokens by :class:`ShiftedPatchEmbed` (SPT).
        locality_attention: attend by :class:`LocalityAttention` (LSA).
        kwargs: as :class:`PreLogitsVisionTransformer`.
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
    """A PiT for small data sets.

    Args:
        args: as timm's class.
        shifted_patches: make tokens by :class:`ShiftedPatchEmbed` and pool by
            :class:`ShiftedPooling` (SPT).
        locality_attention: attend by :class:`LocalityAttention` (LSA).
        kwargs: as timm's class.

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
        if shifted_patches:
            self._shift_patches()
        if locality_attention:
            for block in _blocks_of(self.transformers):
                block.attn = LocalityAttention(
                    block.attn.qkv.in_features, **_attention_args(block.attn)
                )

    def _shift_patches(self) -> None:
        """Replace the patch embedding and the poolings by shifted ones."""
        conv = self.patch_embed.conv
        if conv.stride != conv.kernel_size:
            raise ValueError(
                "Shifted patches do not overlap: create the model with a stride of its "
                f"patch_size, {conv.kernel_size[0]}, got {conv.stride[0]}."
            )
        like = _like(conv.weight)
        self.patch_embed: Any = ShiftedPatchEmbed(
            self.patch_embed.img_size,
            conv.stride[0],
            conv.in_channels,
            conv.out_channels,
            output_fmt="NCHW",
            **like,
        )
        stages: Any = self.transformers
        for stage in stages[1:]:
            stage.pool = ShiftedPooling(
                stage.pool.fc.in_features, stage.pool.fc.out_features, **like
            )


class LocalSwinTransformer(SwinTransformer):
    """A Swin Transformer for small data sets.

    Args:
        args: as timm's class.
        shifted_patches: make tokens by :class:`ShiftedPatchEmbed` and merge them by
            :class:`ShiftedPatchMerging` (SPT).
        locality_attention: attend by :class:`LocalityWindowAttention` (LSA).
        kwargs: as timm's class.
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
            for block in _blocks_of(stages):
                old = block.attn
                block.attn = LocalityWindowAttention(
                    old.dim,
                    head_dim=old.proj.in_features // old.num_heads,
                    window_size=old.window_size,
                    **_attention_args(old),
                )
        if shifted_patches or locality_attention:
            self.init_weights(needs_reset=False)  # The new layers are not initialised yet.


def _blocks_of(stages: Any) -> list[Any]:
    return [block for stage in stages for block in stage.blocks]


def _like(weight: nn.Parameter) -> dict[str, Any]:
    return {"device": weight.device, "dtype": weight.dtype}


def _attention_args(attention: Any) -> dict[str, Any]:
    """Return arguments that make another attention like this one."""
    return dict(
        num_heads=attention.num_heads,
        qkv_bias=attention.qkv.bias is not None,
        attn_drop=attention.attn_drop.p,
        proj_drop=attention.proj_drop.p,
        **_like(attention.qkv.weight),
    )


# The classes are assigned to their names so that pickle finds them.
MoeLocalVisionTransformer = moe_class(LocalVisionTransformer, __name__)
MoeLocalPoolingVisionTransformer = moe_class(LocalPoolingVisionTransformer, __name__)
MoeLocalSwinTransformer = moe_class(LocalSwinTransformer, __name__)
MoeLocalT2TVisionTransformer = moe_class(LocalT2TVisionTransformer, __name__)

#: Preprocessing of CIFAR-100, the EWA paper's first data set.
_CIFAR100: dict[str, Any] = dict(
    num_classes=100,
    first_conv="patch_embed.proj",
    classifier="head",
    input_size=(3, 32, 32),
    fixed_input_size=True,
    crop_pct=1.0,
    interpolation="bicubic",
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


class Family(NamedTuple):
    """A small-data model, dense and with experts.

    Attributes:
        description: one line about the model.
        dense: registered name of the dense model.
        stock: the model of timm as which it is exported if there is neither SPT nor LSA; None if
            timm has none.
        stock_class: class of that model.
        args: arguments that make the stock class, or the dense class, this model.
        dense_class: class of the dense model with SPT or LSA.
        moe_class: class with experts, of the stock model.
        local_moe_class: class with experts, of the dense model with SPT or LSA.
        cfg: its pretrained config.
        filter_fn: timm's function that fits a checkpoint to the model.
        feature_cfg: what timm needs to extract features.
    """

    description: str
    dense: str
    stock: str | None
    stock_class: type[nn.Module] | None
    args: dict[str, Any]
    dense_class: type[nn.Module]
    moe_class: type[nn.Module]
    local_moe_class: type[nn.Module]
    cfg: dict[str, Any]
    filter_fn: Callable[..., Any]
    feature_cfg: dict[str, Any]


_VIT = Family(
    description="ViT-XT/4 at 32 px.",
    dense="vit_xtiny",
    stock="vit_tiny_patch16_224",
    stock_class=VisionTransformer,
    args=dict(img_size=32, patch_size=4, **SIZES["xtiny"]),
    dense_class=LocalVisionTransformer,
    moe_class=MoeVisionTransformer,
    local_moe_class=MoeLocalVisionTransformer,
    cfg=_CIFAR100,
    filter_fn=vit.checkpoint_filter_fn,
    feature_cfg=dict(feature_cls="getter", out_indices=3),
)
_PIT = Family(
    description="PiT-XS/2 at 32 px.",
    dense="pit_xs_32",
    stock="pit_xs_224",
    stock_class=PoolingVisionTransformer,
    args=dict(
        img_size=32,
        patch_size=2,
        stride=2,
        mlp_ratio=2,
        base_dims=(48, 48, 48),
        depth=(2, 6, 4),
        heads=(2, 4, 8),
    ),
    dense_class=LocalPoolingVisionTransformer,
    moe_class=expert_class(PoolingVisionTransformer),
    local_moe_class=MoeLocalPoolingVisionTransformer,
    cfg={**_CIFAR100, "first_conv": "patch_embed.conv"},
    filter_fn=pit.checkpoint_filter_fn,
    feature_cfg=dict(feature_cls="hook", out_indices=(0, 1, 2)),
)
_SWIN = Family(
    description="Swin-T/2 of three stages at 32 px.",
    dense="swin_tiny_patch2_window4_32",
    stock="swin_tiny_patch4_window7_224",
    stock_class=SwinTransformer,
    args=dict(
        img_size=32,
        patch_size=2,
        window_size=4,
        mlp_ratio=2,
        embed_dim=96,
        depths=(2, 6, 4),
        num_heads=(3, 6, 12),
    ),
    dense_class=LocalSwinTransformer,
    moe_class=expert_class(SwinTransformer),
    local_moe_class=MoeLocalSwinTransformer,
    cfg={**_CIFAR100, "classifier": "head.fc", "pool_size": (4, 4)},
    filter_fn=swin_transformer.checkpoint_filter_fn,
    feature_cfg=dict(flatten_sequential=True, out_indices=(0, 1, 2)),
)
_T2T = Family(
    description="T2T-ViT of 12 blocks at 32 px.",
    dense="t2t_i2_32",
    stock=None,
    stock_class=None,
    args=dict(
        img_size=32,
        patch_size=4,
        embed_dim=256,
        depth=12,
        num_heads=4,
        mlp_ratio=2,
        qkv_bias=False,
    ),
    dense_class=LocalT2TVisionTransformer,
    moe_class=MoeLocalT2TVisionTransformer,
    local_moe_class=MoeLocalT2TVisionTransformer,
    cfg={**_CIFAR100, "first_conv": None},
    filter_fn=vit.checkpoint_filter_fn,
    feature_cfg=dict(feature_cls="getter", out_indices=3),
)


def _moe_form(
    family: Family, kwargs: dict[str, Any]
) -> tuple[type[nn.Module], str, dict[str, Any]]:
    """Return the class with experts, and the name and the arguments of its dense form."""
    flags = {flag: kwargs.pop(flag, False) for flag in ("shifted_patches", "locality_attention")}
    if family.stock is None or any(flag is not False for flag in flags.values()):
        return family.local_moe_class, family.dense, {**kwargs, **flags}
    return family.moe_class, family.stock, {**family.args, **kwargs}


def _dense_form(family: Family, kwargs: dict[str, Any]) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class and the arguments of a dense model: timm's class where it is enough."""
    own = ("shifted_patches", "locality_attention", "pre_logits")
    if family.stock_class is None or any(kwargs.get(flag, False) is not False for flag in own):
        return family.dense_class, kwargs
    return family.stock_class, {name: kwargs[name] for name in kwargs if name not in own}


def _create(
    family: Family, name: str, moe_args: dict[str, Any], pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    """Build a model of a family; ``kwargs`` are the caller's."""
    if name == family.dense:
        model_class, dense_args = _dense_form(family, kwargs)
        dense_form = family.dense
    else:
        model_class, dense_form, dense_args = _moe_form(family, kwargs)

    args = {**family.args, **moe_args, **dense_args}
    feature_cfg = dict(family.feature_cfg)
    if "out_indices" in args:
        feature_cfg["out_indices"] = args.pop("out_indices")
    if args.get("shifted_patches"):  # The first layer is no convolution.
        overlay = args.get("pretrained_cfg_overlay") or {}
        args["pretrained_cfg_overlay"] = {**overlay, "first_conv": None}
    model = build_model_with_cfg(
        model_class,
        name,
        pretrained,
        pretrained_filter_fn=family.filter_fn,
        feature_cfg=feature_cfg,
        **args,
    )
    if name != family.dense:
        note_dense_form(model, dense_form, dense_args)
    if family.stock is not None and model_class is family.stock_class:
        model.stock_form = StockForm(family.stock, dict(family.args))  # type: ignore[assignment]
    return model


def _register(family: Family, name: str, description: str, **moe_args: Any) -> None:
    """Register a model of a family; ``moe_args`` are arguments of its experts."""
    register(
        __name__, name, description, partial(_create, family, name, moe_args), {name: family.cfg}
    )


for _family in (_VIT, _PIT, _SWIN, _T2T):
    _register(_family, _family.dense, _family.description)
    _register(_family, f"{_family.dense}_ewa_moe", f"EWA {_family.description}")
_register(_VIT, "vit_xtiny_moe", "Naive MoE ViT-XT/4 at 32 px.", **NAIVE)
