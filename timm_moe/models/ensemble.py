"""Ensembles inside one V-MoE: pBE (arXiv 2110.03360), published as E³, and its ablations."""

from functools import partial
from typing import Any

from timm.models import generate_default_cfgs
from torch import nn

from ..convert.blocks import moe_layers
from .members import MembersMixin
from .registration import SIZES, register, vit_args
from .vision_transformer import VMOE, MoeVisionTransformer, Variant, create_moe_vit

__all__ = ["EnsembleVisionTransformer"]  # timm adds the entrypoints


class EnsembleVisionTransformer(MembersMixin, MoeVisionTransformer):
    """A V-MoE with M members, which part at the first expert block (pBE, section 4).

    Outputs: see :class:`MembersMixin`.

    Args:
        args: arguments of :class:`MoeVisionTransformer`.
        ensemble_size: M.
        ensemble: kind of ensemble, see :func:`timm_moe.convert_to_moe`; with ``"multi_head"`` the members part at the
            last expert block.
        kwargs: arguments of :class:`MoeVisionTransformer`.

    Raises:
        ValueError: for ``ensemble="partitioning"``, which repeats no images, and as :class:`MoeVisionTransformer`.
    """

    def __init__(self, *args: Any, ensemble_size: int = 2, ensemble: str = "pbe", **kwargs: Any):
        if ensemble == "partitioning":
            raise ValueError("ensemble='partitioning' has one output: it is an option of MoeVisionTransformer.")
        super().__init__(*args, ensemble_size=ensemble_size, ensemble=ensemble, **kwargs)
        blocks = [int(path.split(".")[1]) for path in moe_layers(self)]
        self.part_at(blocks[-1 if ensemble == "multi_head" else 0], ensemble_size)

    def restore_stock_class(self) -> None:
        self.part_no_more()
        super().restore_stock_class()


#: pBE in fine-tuning (section 4.2, table 5): 2 members with 16 experts each, a token of each goes to 1.
_PBE: dict[str, Any] = {
    **VMOE,
    **dict(ensemble_size=2, top_k=1, capacity_factor=1.5, eval_capacity_factor=8.0, expert_dropout=0.1),
}

_VARIANTS = {
    "vmoe_pbe_s32": Variant(
        "pBE in V-MoE-S/32: 512 wide and 8 blocks, not timm's ViT-S.",
        *("vit_small_patch32_224", {"patch_size": 32, **_PBE}, SIZES["vmoe_small"]),
    ),
    "vmoe_pbe_b32": Variant("pBE in V-MoE-B/32.", "vit_base_patch32_224", vit_args("base", 32, **_PBE)),
    "vmoe_pbe_b16": Variant("pBE in V-MoE-B/16.", "vit_base_patch16_224", vit_args("base", 16, **_PBE)),
    "vmoe_pbe_l32": Variant("pBE in V-MoE-L/32.", "vit_large_patch32_224", vit_args("large", 32, **_PBE)),
    "vmoe_pbe_l16": Variant("pBE in V-MoE-L/16.", "vit_large_patch16_224", vit_args("large", 16, **_PBE)),
    "vmoe_pbe_h14": Variant(
        "pBE in V-MoE-H/14.", "vit_huge_patch14_224", vit_args("huge", 14, **{**_PBE, "moe_layers": "last-5"})
    ),
}

default_cfgs = generate_default_cfgs(
    {tagged: cfg for name, variant in _VARIANTS.items() for tagged, cfg in variant.cfgs(name).items()}
)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    variant = _VARIANTS[name]
    # Partitioning divides the tokens of one ordinary model.
    model_class = MoeVisionTransformer if kwargs.get("ensemble") == "partitioning" else EnsembleVisionTransformer
    return create_moe_vit(name, variant.stock, pretrained, variant.args, {**variant.own_size, **kwargs}, model_class)


for _name, _variant in _VARIANTS.items():
    register(__name__, _name, _variant.description, partial(_create, _name))
