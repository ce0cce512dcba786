"""Vision Transformers with expert layers: EWA (arXiv 2308.06093), V-MoE (2106.05974), ViMoE (2410.15732), Switch,
Soft MoE (2308.00951)."""

from collections import OrderedDict
from typing import Any

from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..layers.checks import check_flag
from .mixin import MoeMixin, note_dense_form
from .registration import Variant, create_vit, of_size, register_variants, vmoe_variants

__all__ = ["MoeVisionTransformer"]  # timm adds the entrypoints


class PreLogitsVisionTransformer(VisionTransformer):
    """timm's VisionTransformer with a layer before the classifier.

    Args:
        pre_logits: put ``tanh(Linear(D, D))`` there, as the ViT and V-MoE papers do in
            pre-training.
    """

    def __init__(self, *args: Any, pre_logits: bool = False, **kwargs: Any):
        check_flag("pre_logits", pre_logits)
        super().__init__(*args, **kwargs)
        head = self.head
        del self.head  # timm's agc takes the last two parameters for the classifier's
        # Timm drops keys with pre_logits from checkpoints.
        self.representation: nn.Module = nn.Identity()
        self.head = head
        if pre_logits:
            like = next(self.parameters())
            linear = nn.Linear(self.embed_dim, self.embed_dim, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.representation = nn.Sequential(OrderedDict(fc=linear, act=nn.Tanh()))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        # timm's own, written out: exported models may be scripted, and TorchScript cannot compile
        # super().
        x = self.representation(self.head_drop(self.fc_norm(self.pool(x))))
        return x if pre_logits else self.head(x)


class MoeVisionTransformer(MoeMixin, PreLogitsVisionTransformer):
    """timm's VisionTransformer with expert layers."""

    stock_class = VisionTransformer

    def restore_stock_class(self) -> None:
        if not isinstance(self.representation, nn.Identity):
            raise ValueError(
                "timm's ViT has no such layer: a model with pre_logits=True cannot become one."
            )
        del self.representation
        super().restore_stock_class()


#: Naive MoE of the EWA paper (section 6): Switch routing of 4 experts in every other block,
#: evaluated without dropping.
NAIVE: dict[str, Any] = dict(
    router="top_k", top_k=1, capacity_factor=1.05, aux_loss="balance", aux_loss_weight=0.01
)
#: V-MoE in pre-training (appendix B): 2 of 32 experts in the last two odd blocks.
VMOE: dict[str, Any] = {
    **dict(num_experts=32, moe_layers="last-2", expert_init="same"),
    **dict(router="top_k", top_k=2, noise_std=1.0, capacity_factor=1.05),
    **dict(aux_loss="importance+load", aux_loss_weight=0.01),
}
#: ViMoE (section 4): each image goes to 1 of 8 experts, in the last two blocks; no noise, nothing
#: dropped. It starts from DINOv2, at 224 pixels instead of DINOv2's 518.
_VIMOE: dict[str, Any] = {
    **dict(
        weights="dinov2",
        num_experts=8,
        moe_layers="tail-2",
        expert_init="same",
        init_values=1e-5,
        img_size=224,
    ),
    **dict(router="top_k", top_k=1, routing_unit="image", aux_loss="balance", aux_loss_weight=0.01),
}
#: Soft MoE (section 3): one slot for each expert, in the second half of the blocks; H has experts
#: in the last 16.
_SOFT: dict[str, Any] = dict(
    num_experts=128, moe_layers="tail-6", expert_init="same", router="soft"
)
#: Its ViT: no class token, the mean of the normalised tokens, queries and keys normalised.
_SOFT_VIT: dict[str, Any] = dict(class_token=False, global_pool="avg", fc_norm=False, qk_norm=True)


def _soft_moe(description: str, size: str, patch: int, **options: Any) -> Variant:
    variant = of_size(description, size, patch, **{**_SOFT_VIT, **_SOFT, **options})
    return variant._replace(own_size=_SOFT_VIT)  # timm has no weights for it


_VARIANTS = {
    "vit_tiny_ewa_moe": of_size("EWA ViT-Ti/16.", "tiny", 16),
    "vit_small_ewa_moe": of_size("EWA ViT-S/16.", "small", 16),
    "vit_base_ewa_moe": of_size("EWA ViT-B/16.", "base", 16),
    "vit_large_ewa_moe": of_size("EWA ViT-L/16.", "large", 16),
    "vit_tiny_moe": of_size("Naive MoE ViT-Ti/16.", "tiny", 16, **NAIVE),
    "vit_small_moe": of_size("Naive MoE ViT-S/16.", "small", 16, **NAIVE),
    "vit_base_moe": of_size("Naive MoE ViT-B/16.", "base", 16, **NAIVE),
    **vmoe_variants("vmoe", "V-MoE", VMOE),
    "vimoe_s14": of_size("ViMoE-S/14.", "small", 14, **_VIMOE),
    "vimoe_s14_shared": of_size(
        "ViMoE-S/14 with a shared expert.", "small", 14, shared_expert=True, **_VIMOE
    ),
    "vimoe_b14": of_size("ViMoE-B/14.", "base", 14, **_VIMOE),
    "vimoe_b14_shared": of_size(
        "ViMoE-B/14 with a shared expert.", "base", 14, shared_expert=True, **_VIMOE
    ),
    "soft_moe_s16": _soft_moe("Soft MoE-S/16.", "small", 16),
    "soft_moe_s14": _soft_moe("Soft MoE-S/14.", "small", 14, num_experts=256),
    "soft_moe_b16": _soft_moe("Soft MoE-B/16.", "base", 16),
    "soft_moe_l16": _soft_moe("Soft MoE-L/16.", "large", 16, moe_layers="tail-12"),
    "soft_moe_h14": _soft_moe("Soft MoE-H/14.", "huge", 14, num_experts=256, moe_layers="tail-16"),
}


def create_moe_vit(
    model_class: type[nn.Module],
    name: str,
    variant: Variant,
    pretrained: bool,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build a variant as timm builds its own, to be exported as its stock; ``kwargs`` are the caller's."""
    kwargs = {**variant.own_size, **kwargs}
    if kwargs.get("features_only"):
        # Timm would load DINOv2's weights, which have no classifier, strictly.
        kwargs["num_classes"] = 0
    model = create_vit(model_class, name, variant, pretrained, kwargs)
    note_dense_form(model, variant.stock, kwargs)
    return model


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    if name.startswith("vimoe"):
        cfg = kwargs.get("pretrained_cfg")
        stated = (
            cfg if isinstance(cfg, dict) else vars(cfg) if isinstance(cfg, PretrainedCfg) else {}
        )
        stated = {**stated, **(kwargs.get("pretrained_cfg_overlay") or {})}
        # DINOv2's weights, and so their config, have no classifier. A saved model may state 0
        # classes.
        if not stated.get("source") and not stated.get("num_classes"):
            variant = variant._replace(args={"num_classes": 1000, **variant.args})
    return create_moe_vit(MoeVisionTransformer, name, variant, pretrained, kwargs)


register_variants(__name__, _VARIANTS, _create)
