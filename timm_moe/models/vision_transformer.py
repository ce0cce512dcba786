"""Vision Transformers with expert layers.

They are those of EWA (arXiv 2308.06093), V-MoE (2106.05974), ViMoE (2410.15732) and Soft MoE
(2308.00951), and the naive MoE with the routing of Switch Transformers (2101.03961).
"""

from collections import OrderedDict
from typing import Any

from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..layers.checks import check_flag
from .mixin import MoeMixin, note_dense_form
from .variants import Variant, create_vit, of_size, register_variants, vmoe_variants

__all__ = ["MoeVisionTransformer"]  # timm adds the entrypoints


class PreLogitsVisionTransformer(VisionTransformer):
    """timm's VisionTransformer that may have a layer before the classifier.

    Args:
        args: as timm's class.
        pre_logits: put ``tanh(Linear(D, D))`` there, as the ViT and V-MoE papers do in
            pre-training.
        kwargs: as timm's class.
    """

    def __init__(self, *args: Any, pre_logits: bool = False, **kwargs: Any):
        check_flag("pre_logits", pre_logits)
        super().__init__(*args, **kwargs)
        # timm drops keys with pre_logits from checkpoints, so the layer has another name. Its agc
        # takes the last two parameters for the classifier's, so the head is moved to the end.
        head = self.head
        del self.head
        self.representation: nn.Module = nn.Identity()
        self.head = head
        if pre_logits:
            like = next(self.parameters())
            linear = nn.Linear(self.embed_dim, self.embed_dim, device=like.device, dtype=like.dtype)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            self.representation = nn.Sequential(OrderedDict(fc=linear, act=nn.Tanh()))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map tokens (B, N, D) to logits (B, C), or to the classifier's input (B, D)."""
        # timm's method is written out here, since exported models may be scripted and TorchScript
        # cannot compile super().
        x = self.representation(self.head_drop(self.fc_norm(self.pool(x))))
        return x if pre_logits else self.head(x)


class MoeVisionTransformer(MoeMixin, PreLogitsVisionTransformer):
    """timm's VisionTransformer with expert layers."""

    stock_class = VisionTransformer

    def restore_stock_class(self) -> None:
        """Turn into timm's VisionTransformer.

        Raises:
            ValueError: if the model has a layer before its classifier.
        """
        if not isinstance(self.representation, nn.Identity):
            raise ValueError(
                "timm's ViT has no such layer: a model with pre_logits=True cannot become one."
            )
        del self.representation
        if self.stock_form is not None:
            self.stock_form.args.pop("pre_logits", None)  # which timm's class does not know
        super().restore_stock_class()


#: Naive MoE of the EWA paper (section 6): Switch routing among 4 experts in every other block. No
#: token is dropped in evaluation.
NAIVE: dict[str, Any] = dict(
    router="top_k", top_k=1, capacity_factor=1.05, aux_loss="balance", aux_loss_weight=0.01
)
#: V-MoE in pre-training (appendix B): 2 of 32 experts in the last two odd blocks.
VMOE: dict[str, Any] = dict(
    num_experts=32,
    moe_layers="last-2",
    expert_init="same",
    router="top_k",
    top_k=2,
    noise_std=1.0,
    capacity_factor=1.05,
    aux_loss="importance+load",
    aux_loss_weight=0.01,
)
#: ViMoE (section 4): in the last two blocks each image goes to 1 of 8 experts. There is no noise,
#: and nothing is dropped. Training starts from DINOv2, at 224 pixels instead of DINOv2's 518.
_VIMOE: dict[str, Any] = dict(
    weights="dinov2",
    num_experts=8,
    moe_layers="tail-2",
    expert_init="same",
    init_values=1e-5,
    img_size=224,
    router="top_k",
    top_k=1,
    routing_unit="image",
    aux_loss="balance",
    aux_loss_weight=0.01,
)
#: Soft MoE (section 3): one slot for each expert, in the second half of the blocks. H has experts
#: in the last 16 blocks.
_SOFT: dict[str, Any] = dict(
    num_experts=128, moe_layers="tail-6", expert_init="same", router="soft"
)
#: The ViT of Soft MoE: no class token, the mean of the normalised tokens, and normalised queries
#: and keys.
_SOFT_VIT: dict[str, Any] = dict(class_token=False, global_pool="avg", fc_norm=False, qk_norm=True)


def _soft_moe(description: str, size: str, patch: int, **options: Any) -> Variant:
    """Return a variant of Soft MoE, for whose ViT timm has no weights."""
    variant = of_size(description, size, patch, **{**_SOFT_VIT, **_SOFT, **options})
    return variant._replace(own_size=_SOFT_VIT)


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
    # timm has no ViT-S/14 of 224 pixels.
    "soft_moe_s14": _soft_moe("Soft MoE-S/14.", "small", 14, num_experts=256)._replace(
        stock="vit_small_patch16_224", own_size={**_SOFT_VIT, "patch_size": 14}
    ),
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
    """Build a variant as timm builds its own models, to be exported as the variant's stock.

    Args:
        model_class: class of the model.
        name: registered name of the model.
        variant: the variant.
        pretrained: load timm's weights.
        kwargs: the caller's arguments.
    """
    kwargs = {**variant.own_size, **kwargs}
    if kwargs.get("features_only"):
        # timm would load DINOv2's weights strictly, but they have no classifier.
        kwargs["num_classes"] = 0
    model = create_vit(model_class, name, variant, pretrained, kwargs)
    if issubclass(model_class, MoeMixin):
        note_dense_form(model, variant.stock, kwargs)
    return model


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a variant; ``kwargs`` are the caller's."""
    if name.startswith("vimoe"):
        cfg = kwargs.get("pretrained_cfg")
        if isinstance(cfg, PretrainedCfg):
            cfg = vars(cfg)
        stated = dict(cfg) if isinstance(cfg, dict) else {}
        stated |= kwargs.get("pretrained_cfg_overlay") or {}
        # DINOv2's weights have no classifier, so their config states 0 classes. A saved model has a
        # source, and may have 0 classes on purpose.
        if not stated.get("source") and not stated.get("num_classes"):
            variant = variant._replace(args={"num_classes": 1000, **variant.args})
    return create_moe_vit(MoeVisionTransformer, name, variant, pretrained, kwargs)


register_variants(__name__, _VARIANTS, _create)
