"""Ensembles inside one V-MoE: pBE (arXiv 2110.03360), published as E³, and its ablations."""

from dataclasses import replace
from typing import Any

from timm.models import generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from torch import nn

from ..convert.blocks import moe_layers
from .members import MembersMixin
from .vision_transformer import VMOE, VMOE_S_CFG, MoeVisionTransformer, create_moe_vit

__all__ = ["EnsembleVisionTransformer"]  # timm adds the entrypoints


class EnsembleVisionTransformer(MembersMixin, MoeVisionTransformer):
    """A V-MoE that holds M members, which part at the first expert block (pBE, section 4).

    Outputs are those of :class:`MembersMixin`.

    Args:
        args: as :class:`MoeVisionTransformer`.
        ensemble_size: M.
        ensemble: how the members differ, see :func:`timm_moe.convert_to_moe`; in ``"multi_head"`` they part at the last
            expert block.
        kwargs: as :class:`MoeVisionTransformer`.

    Raises:
        ValueError: on ``ensemble="partitioning"``, which repeats no images, and as :class:`MoeVisionTransformer`.
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


#: The stock models whose pretrained tags the ensembles take over.
_STOCK = {
    "vmoe_pbe_b32": "vit_base_patch32_224",
    "vmoe_pbe_b16": "vit_base_patch16_224",
    "vmoe_pbe_l32": "vit_large_patch32_224",
    "vmoe_pbe_l16": "vit_large_patch16_224",
    "vmoe_pbe_h14": "vit_huge_patch14_224",
}

default_cfgs = generate_default_cfgs(
    {
        f"{name}.{cfg.tag}" if cfg.tag else name: replace(cfg, url="", custom_load=False)
        for name, stock in _STOCK.items()
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {"vmoe_pbe_s32": VMOE_S_CFG}
)

#: pBE in fine-tuning (section 4.2, table 5): 2 members with 16 experts each, a token of each goes to 1.
_PBE = {
    **VMOE,
    **dict(ensemble_size=2, top_k=1, capacity_factor=1.5, eval_capacity_factor=8.0, expert_dropout=0.1),
}


def _create(
    variant: str, dense_architecture: str, pretrained: bool, model_args: dict[str, Any], kwargs: dict[str, Any]
) -> nn.Module:
    partitions_only = kwargs.get("ensemble") == "partitioning"  # of the tokens of one ordinary model
    model_class = MoeVisionTransformer if partitions_only else EnsembleVisionTransformer
    return create_moe_vit(variant, dense_architecture, pretrained, {**_PBE, **model_args}, kwargs, model_class)


@register_model
def vmoe_pbe_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-S/32: 512 wide and 8 blocks, not timm's ViT-S."""
    size = dict(embed_dim=512, depth=8, num_heads=8)  # what the export needs beside the name of the stock model
    return _create("vmoe_pbe_s32", "vit_small_patch32_224", pretrained, dict(patch_size=32), {**size, **kwargs})


@register_model
def vmoe_pbe_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-B/32."""
    model_args = dict(patch_size=32, embed_dim=768, depth=12, num_heads=12)
    return _create("vmoe_pbe_b32", _STOCK["vmoe_pbe_b32"], pretrained, model_args, kwargs)


@register_model
def vmoe_pbe_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-B/16."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create("vmoe_pbe_b16", _STOCK["vmoe_pbe_b16"], pretrained, model_args, kwargs)


@register_model
def vmoe_pbe_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-L/32."""
    model_args = dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16)
    return _create("vmoe_pbe_l32", _STOCK["vmoe_pbe_l32"], pretrained, model_args, kwargs)


@register_model
def vmoe_pbe_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-L/16."""
    model_args = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _create("vmoe_pbe_l16", _STOCK["vmoe_pbe_l16"], pretrained, model_args, kwargs)


@register_model
def vmoe_pbe_h14(pretrained: bool = False, **kwargs) -> nn.Module:
    """pBE in V-MoE-H/14."""
    model_args = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16, moe_layers="last-5")
    return _create("vmoe_pbe_h14", _STOCK["vmoe_pbe_h14"], pretrained, model_args, kwargs)
