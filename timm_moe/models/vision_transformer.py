"""Vision Transformers with expert layers: EWA (arXiv 2308.06093), V-MoE (2106.05974), ViMoE (2410.15732), Switch."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from timm.models import (
    PretrainedCfg,
    build_model_with_cfg,
    generate_default_cfgs,
    get_arch_pretrained_cfgs,
    register_model,
)
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..layers.checks import check_flag
from .mixin import MoeMixin, architecture_args

__all__ = ["MoeVisionTransformer"]  # timm adds the entrypoints


class PreLogitsVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with a layer before the classifier.

    Args:
        pre_logits: put ``tanh(Linear(D, D))`` there, as the ViT and V-MoE papers do in pre-training.
    """

    def __init__(self, *args: Any, pre_logits: bool = False, **kwargs: Any):
        check_flag("pre_logits", pre_logits)
        super().__init__(*args, **kwargs)
        head = self.head
        del self.head  # timm's agc takes the last two parameters for the classifier's
        self.representation: nn.Module = nn.Identity()  # timm drops keys with pre_logits from checkpoints
        self.head = head
        if pre_logits:
            like = self.patch_embed.proj.weight
            linear = nn.Linear(self.embed_dim, self.embed_dim, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.representation = nn.Sequential(OrderedDict(fc=linear, act=nn.Tanh()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        wanted = isinstance(self.representation, nn.Sequential)
        found = f"{prefix}representation.fc.weight" in state_dict
        if wanted != found:
            raise ValueError(
                f"The checkpoint has {'a' if found else 'no'} linear layer before its classifier: create the model "
                f"with pre_logits={found}."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = self.head_drop(self.fc_norm(self.pool(x)))  # as timm's; TorchScript knows no super()
        x = self.representation(x)
        return x if pre_logits else self.head(x)


class MoeVisionTransformer(MoeMixin, PreLogitsVisionTransformer):
    """timm's VisionTransformer with expert layers."""

    stock_class = VisionTransformer

    def restore_stock_class(self) -> None:
        if not isinstance(self.representation, nn.Identity):
            raise ValueError(
                "timm's VisionTransformer has no layer before its classifier, so a model with pre_logits=True cannot "
                "become one."
            )
        del self.representation
        super().restore_stock_class()


#: The stock models whose pretrained tags the expert models take over, and which they are exported as.
_STOCK = {
    "vit_tiny_ewa_moe": "vit_tiny_patch16_224",
    "vit_small_ewa_moe": "vit_small_patch16_224",
    "vit_base_ewa_moe": "vit_base_patch16_224",
    "vit_large_ewa_moe": "vit_large_patch16_224",
    "vit_tiny_moe": "vit_tiny_patch16_224",
    "vit_small_moe": "vit_small_patch16_224",
    "vit_base_moe": "vit_base_patch16_224",
    "vmoe_b32": "vit_base_patch32_224",
    "vmoe_b16": "vit_base_patch16_224",
    "vmoe_l32": "vit_large_patch32_224",
    "vmoe_l16": "vit_large_patch16_224",
    "vmoe_h14": "vit_huge_patch14_224",
    "vimoe_s14": "vit_small_patch14_dinov2",
    "vimoe_s14_shared": "vit_small_patch14_dinov2",
    "vimoe_b14": "vit_base_patch14_dinov2",
    "vimoe_b14_shared": "vit_base_patch14_dinov2",
}
#: ViMoE is trained at 224 pixels; DINOv2's weights come with 518.
_INPUT_SIZES = {name: (3, 224, 224) for name in _STOCK if name.startswith("vimoe")}

#: timm has no ViT of V-MoE-S's shape; preprocessing as in V-MoE's configurations.
VMOE_S_CFG = dict(
    num_classes=1000,
    input_size=(3, 224, 224),
    fixed_input_size=True,
    crop_pct=0.875,
    interpolation="bilinear",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    first_conv="patch_embed.proj",
    classifier="head",
)

default_cfgs = generate_default_cfgs(
    {
        # The Hub's weights are in timm's own format; the .npz originals behind `url` are not needed.
        f"{name}.{cfg.tag}" if cfg.tag else name: replace(
            cfg, url="", custom_load=False, input_size=_INPUT_SIZES.get(name, cfg.input_size)
        )
        for name, stock in _STOCK.items()
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {"vmoe_s32": VMOE_S_CFG}
)

#: Naive MoE of the EWA paper (section 6): Switch routing of 4 experts in every other block, evaluated without dropping.
NAIVE = dict(router="top_k", top_k=1, capacity_factor=1.05, aux_loss="balance", aux_loss_weight=0.01)
#: V-MoE in pre-training (appendix B): 2 of 32 experts in the last two odd blocks.
VMOE = dict(
    router="top_k",
    num_experts=32,
    moe_layers="last-2",
    expert_init="same",
    top_k=2,
    noise_std=1.0,
    capacity_factor=1.05,
    aux_loss="importance+load",
    aux_loss_weight=0.01,
)
#: ViMoE (section 4): each image goes to 1 of 8 experts, in the last two blocks; no noise, nothing dropped.
_VIMOE = dict(
    router="top_k",
    num_experts=8,
    moe_layers="tail-2",
    expert_init="same",
    routing_unit="image",
    top_k=1,
    aux_loss="balance",
    aux_loss_weight=0.01,
)
_DINOV2 = dict(patch_size=14, depth=12, init_values=1e-5, img_size=224)


def create_moe_vit(
    variant: str,
    dense_architecture: str,
    pretrained: bool,
    model_args: dict[str, Any],
    kwargs: dict[str, Any],
    model_class: type[nn.Module] = MoeVisionTransformer,
) -> nn.Module:
    """Build a variant as timm builds its own.

    Args:
        variant: registered name.
        dense_architecture: the stock model that is exported.
        pretrained: load pretrained weights.
        model_args: arguments of the stock class that define the variant.
        kwargs: the caller's arguments, which override ``model_args``.
        model_class: class of the model.
    """
    out_indices = kwargs.pop("out_indices", 3)
    if kwargs.get("features_only"):
        kwargs["num_classes"] = 0  # timm would load DINOv2's weights, which have no classifier, strictly
    model = build_model_with_cfg(
        model_class,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=out_indices, feature_cls="getter"),
        **{**model_args, **kwargs},
    )
    if isinstance(model, MoeMixin):  # a feature extractor around it is never exported
        model.dense_architecture = dense_architecture
        model.dense_args = architecture_args(kwargs)
    return model


def _create_stock_sized(name: str, pretrained: bool, model_args: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    return create_moe_vit(name, _STOCK[name], pretrained, model_args, kwargs)


def _create_vimoe(name: str, pretrained: bool, size: dict[str, Any], kwargs: dict[str, Any]) -> nn.Module:
    """With 1000 classes where nobody states a number but the config of DINOv2's weights, which have no classifier."""
    cfg = kwargs.get("pretrained_cfg")  # of a folder or repository it has a source, and its number counts, 0 too
    stated = cfg if isinstance(cfg, dict) else vars(cfg) if isinstance(cfg, PretrainedCfg) else {}
    stated = {**stated, **(kwargs.get("pretrained_cfg_overlay") or {})}
    told = stated.get("source") or stated.get("num_classes")
    model_args = {**_DINOV2, **_VIMOE, **size, **({} if told else {"num_classes": 1000})}
    return _create_stock_sized(name, pretrained, model_args, kwargs)


@register_model
def vit_tiny_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-Ti/16."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create_stock_sized("vit_tiny_ewa_moe", pretrained, model_args, kwargs)


@register_model
def vit_small_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-S/16."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create_stock_sized("vit_small_ewa_moe", pretrained, model_args, kwargs)


@register_model
def vit_base_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create_stock_sized("vit_base_ewa_moe", pretrained, model_args, kwargs)


@register_model
def vit_large_ewa_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """EWA ViT-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _create_stock_sized("vit_large_ewa_moe", pretrained, model_args, kwargs)


@register_model
def vit_tiny_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """Naive MoE ViT-Ti/16."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3, **NAIVE)
    return _create_stock_sized("vit_tiny_moe", pretrained, model_args, kwargs)


@register_model
def vit_small_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """Naive MoE ViT-S/16."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6, **NAIVE)
    return _create_stock_sized("vit_small_moe", pretrained, model_args, kwargs)


@register_model
def vit_base_moe(pretrained: bool = False, **kwargs) -> nn.Module:
    """Naive MoE ViT-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, **NAIVE)
    return _create_stock_sized("vit_base_moe", pretrained, model_args, kwargs)


@register_model
def vmoe_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-S/32: 512 wide and 8 blocks, not timm's ViT-S."""
    size = dict(embed_dim=512, depth=8, num_heads=8)  # what the export needs beside the name of the stock model
    return create_moe_vit(
        "vmoe_s32", "vit_small_patch32_224", pretrained, {"patch_size": 32, **VMOE}, {**size, **kwargs}
    )


@register_model
def vmoe_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-B/32."""
    model_args = dict(patch_size=32, embed_dim=768, depth=12, num_heads=12, **VMOE)
    return _create_stock_sized("vmoe_b32", pretrained, model_args, kwargs)


@register_model
def vmoe_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12, **VMOE)
    return _create_stock_sized("vmoe_b16", pretrained, model_args, kwargs)


@register_model
def vmoe_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-L/32."""
    model_args = dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16, **VMOE)
    return _create_stock_sized("vmoe_l32", pretrained, model_args, kwargs)


@register_model
def vmoe_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16, **VMOE)
    return _create_stock_sized("vmoe_l16", pretrained, model_args, kwargs)


@register_model
def vmoe_h14(pretrained: bool = False, **kwargs) -> nn.Module:
    """V-MoE-H/14."""
    model_args = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16, **{**VMOE, "moe_layers": "last-5"})
    return _create_stock_sized("vmoe_h14", pretrained, model_args, kwargs)


@register_model
def vimoe_s14(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViMoE-S/14."""
    return _create_vimoe("vimoe_s14", pretrained, dict(embed_dim=384, num_heads=6), kwargs)


@register_model
def vimoe_s14_shared(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViMoE-S/14 with a shared expert."""
    return _create_vimoe("vimoe_s14_shared", pretrained, dict(embed_dim=384, num_heads=6, shared_expert=True), kwargs)


@register_model
def vimoe_b14(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViMoE-B/14."""
    return _create_vimoe("vimoe_b14", pretrained, dict(embed_dim=768, num_heads=12), kwargs)


@register_model
def vimoe_b14_shared(pretrained: bool = False, **kwargs) -> nn.Module:
    """ViMoE-B/14 with a shared expert."""
    return _create_vimoe("vimoe_b14_shared", pretrained, dict(embed_dim=768, num_heads=12, shared_expert=True), kwargs)
