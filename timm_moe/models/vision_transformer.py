"""Vision Transformers with expert layers: EWA (arXiv 2308.06093), V-MoE (2106.05974), ViMoE (2410.15732), Switch."""

from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

from timm.models import PretrainedCfg, build_model_with_cfg, generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..layers.checks import check_flag
from .mixin import MoeMixin, architecture_args, note_dense_form
from .registration import SIZES, register, stock_cfgs, vit_args

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
        # timm's own, written out: exported models may be scripted, and TorchScript cannot compile super().
        x = self.head_drop(self.fc_norm(self.pool(x)))
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


#: Naive MoE of the EWA paper (section 6): Switch routing of 4 experts in every other block, evaluated without dropping.
NAIVE = dict(router="top_k", top_k=1, capacity_factor=1.05, aux_loss="balance", aux_loss_weight=0.01)
#: V-MoE in pre-training (appendix B): 2 of 32 experts in the last two odd blocks.
VMOE: dict[str, Any] = dict(
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
#: It starts from DINOv2, at 224 pixels instead of DINOv2's 518.
_VIMOE: dict[str, Any] = dict(
    router="top_k",
    num_experts=8,
    moe_layers="tail-2",
    expert_init="same",
    routing_unit="image",
    top_k=1,
    aux_loss="balance",
    aux_loss_weight=0.01,
    init_values=1e-5,
    img_size=224,
)
#: timm has no ViT of V-MoE-S's shape; preprocessing as in V-MoE's configurations.
VMOE_S_CFG: dict[str, Any] = dict(
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


class Variant(NamedTuple):
    """A registered model.

    Attributes:
        description: one line about it.
        stock: the model of timm whose pretrained tags it takes over, and as which its weights are exported.
        args: arguments that make timm's VisionTransformer this model.
        own_size: further arguments, which the exported model needs too: timm has no model of this size, so there are
            no pretrained tags.
    """

    description: str
    stock: str
    args: dict[str, Any]
    own_size: dict[str, Any] = {}  # noqa: RUF012  # read only

    def cfgs(self, name: str, **changes: Any) -> dict[str, Any]:
        """Entries of ``default_cfgs`` for the model of this name."""
        return {name: VMOE_S_CFG} if self.own_size else stock_cfgs(name, self.stock, **changes)


_VARIANTS = {
    "vit_tiny_ewa_moe": Variant("EWA ViT-Ti/16.", "vit_tiny_patch16_224", vit_args("tiny", 16)),
    "vit_small_ewa_moe": Variant("EWA ViT-S/16.", "vit_small_patch16_224", vit_args("small", 16)),
    "vit_base_ewa_moe": Variant("EWA ViT-B/16.", "vit_base_patch16_224", vit_args("base", 16)),
    "vit_large_ewa_moe": Variant("EWA ViT-L/16.", "vit_large_patch16_224", vit_args("large", 16)),
    "vit_tiny_moe": Variant("Naive MoE ViT-Ti/16.", "vit_tiny_patch16_224", vit_args("tiny", 16, **NAIVE)),
    "vit_small_moe": Variant("Naive MoE ViT-S/16.", "vit_small_patch16_224", vit_args("small", 16, **NAIVE)),
    "vit_base_moe": Variant("Naive MoE ViT-B/16.", "vit_base_patch16_224", vit_args("base", 16, **NAIVE)),
    "vmoe_s32": Variant(
        "V-MoE-S/32: 512 wide and 8 blocks, not timm's ViT-S.",
        *("vit_small_patch32_224", {"patch_size": 32, **VMOE}, SIZES["vmoe_small"]),
    ),
    "vmoe_b32": Variant("V-MoE-B/32.", "vit_base_patch32_224", vit_args("base", 32, **VMOE)),
    "vmoe_b16": Variant("V-MoE-B/16.", "vit_base_patch16_224", vit_args("base", 16, **VMOE)),
    "vmoe_l32": Variant("V-MoE-L/32.", "vit_large_patch32_224", vit_args("large", 32, **VMOE)),
    "vmoe_l16": Variant("V-MoE-L/16.", "vit_large_patch16_224", vit_args("large", 16, **VMOE)),
    "vmoe_h14": Variant(
        "V-MoE-H/14.", "vit_huge_patch14_224", vit_args("huge", 14, **{**VMOE, "moe_layers": "last-5"})
    ),
    "vimoe_s14": Variant("ViMoE-S/14.", "vit_small_patch14_dinov2", vit_args("small", 14, **_VIMOE)),
    "vimoe_s14_shared": Variant(
        "ViMoE-S/14 with a shared expert.",
        *("vit_small_patch14_dinov2", vit_args("small", 14, shared_expert=True, **_VIMOE)),
    ),
    "vimoe_b14": Variant("ViMoE-B/14.", "vit_base_patch14_dinov2", vit_args("base", 14, **_VIMOE)),
    "vimoe_b14_shared": Variant(
        "ViMoE-B/14 with a shared expert.",
        *("vit_base_patch14_dinov2", vit_args("base", 14, shared_expert=True, **_VIMOE)),
    ),
}


def _cfgs(name: str, variant: Variant) -> dict[str, Any]:
    return variant.cfgs(name, input_size=(3, 224, 224)) if name.startswith("vimoe") else variant.cfgs(name)


default_cfgs = generate_default_cfgs(
    {tagged: cfg for name, variant in _VARIANTS.items() for tagged, cfg in _cfgs(name, variant).items()}
)


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
    note_dense_form(model, dense_architecture, architecture_args(kwargs))
    return model


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    variant = _VARIANTS[name]
    model_args = variant.args
    if name.startswith("vimoe") and not _states_classes(kwargs):
        model_args = {"num_classes": 1000, **model_args}  # DINOv2's weights, and so their config, have no classifier
    return create_moe_vit(name, variant.stock, pretrained, model_args, {**variant.own_size, **kwargs})


def _states_classes(kwargs: dict[str, Any]) -> bool:
    """Tell whether a pretrained config states the number of classes: any number, 0 too, if it is a saved model's."""
    cfg = kwargs.get("pretrained_cfg")
    stated = cfg if isinstance(cfg, dict) else vars(cfg) if isinstance(cfg, PretrainedCfg) else {}
    stated = {**stated, **(kwargs.get("pretrained_cfg_overlay") or {})}
    return bool(stated.get("source") or stated.get("num_classes"))


for _name, _variant in _VARIANTS.items():
    register(__name__, _name, _variant.description, partial(_create, _name))
