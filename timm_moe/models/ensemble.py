"""Ensembles inside one V-MoE: pBE (arXiv 2110.03360), published as E³, and its ablations."""

from dataclasses import replace
from typing import Any

import torch
from timm.models import generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..layers import Tile, ensemble_log_probabilities
from .vision_transformer import VMOE, VMOE_S_CFG, MoeVisionTransformer, create_moe_vit

__all__ = ["EnsembleVisionTransformer"]  # timm adds the entrypoints


class EnsembleVisionTransformer(MoeVisionTransformer):
    """A V-MoE that holds M members, which part at the first expert block (pBE, section 4).

    At the input of that block each image is repeated M times in a row, so that ``forward_features`` gives (B M, N, D).
    In training the output is that of all members, (B, M, C), for :class:`timm_moe.MemberLoss`, which timm's training
    tasks get by themselves. In eval mode it is the logarithm of the mean of their probabilities, (B, C); without a
    classifier, the mean of their features.

    Args:
        args: as :class:`MoeVisionTransformer`.
        ensemble_size: M.
        ensemble: how the members differ, see :func:`timm_moe.convert_to_moe`; in ``"multi_head"`` they part at the last
            expert block.
        kwargs: as :class:`MoeVisionTransformer`.

    Attributes:
        ensemble_size: M; 1 once the blocks where the members differ are pruned.
        parting_block: number of the block at whose input images are repeated.

    Raises:
        ValueError: on ``ensemble="partitioning"``, which repeats no images, and as :class:`MoeVisionTransformer`.
    """

    def __init__(self, *args: Any, ensemble_size: int = 2, ensemble: str = "pbe", **kwargs: Any):
        if ensemble == "partitioning":
            raise ValueError("ensemble='partitioning' has one output: it is an option of MoeVisionTransformer.")
        super().__init__(*args, ensemble_size=ensemble_size, ensemble=ensemble, **kwargs)
        self.ensemble_size = ensemble_size
        blocks = [int(path.split(".")[1]) for path in moe_layers(self)]
        self.parting_block = blocks[-1 if ensemble == "multi_head" else 0]
        self._tiling = self.blocks[self.parting_block].register_forward_pre_hook(Tile(ensemble_size))

    def forward_members(self, x: Tensor) -> Tensor:
        """The logits (B, M, C) of each member for images x of shape (B, channels, height, width)."""
        return self._members(super().forward_head(self.forward_features(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        members = self._members(super().forward_head(x, pre_logits))
        if self.training:
            return members
        if pre_logits or isinstance(self.head, nn.Identity):
            return members.mean(1)
        precise = members.to(torch.promote_types(members.dtype, torch.float32))
        return ensemble_log_probabilities(precise.log_softmax(-1)).to(members.dtype)

    def forward_intermediates(  # type: ignore[override]  # the rest, which differs between versions, is handed on
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As timm's, with the mean of the members for each intermediate feature; the final one has all (B M, N, D)."""
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        result: Any = super().forward_intermediates(
            x, indices, return_prefix_tokens, norm, stop_early, "NLC", intermediates_only, output_dict=True, **kwargs
        )
        if "image_features" in result and len(result["image_features"]) < len(x) * self.ensemble_size:
            # stopped before the members part
            result["image_features"] = result["image_features"].repeat_interleave(self.ensemble_size, 0)
        for name in {"image_intermediates", "image_intermediates_prefix"} & result.keys():
            result[name] = [feature.unflatten(0, (x.shape[0], -1)).mean(1) for feature in result[name]]
        if output_fmt == "NCHW":
            size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            result["image_intermediates"] = [
                feature.mT.unflatten(2, size).contiguous() for feature in result["image_intermediates"]
            ]
        if output_dict:
            return result
        features = result["image_intermediates"]
        if "image_intermediates_prefix" in result:
            features = list(zip(features, result["image_intermediates_prefix"], strict=True))
        return features if intermediates_only else (result["image_features"], features)

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> list[int]:
        kept = super().prune_intermediate_layers(*args, **kwargs)
        if len(self.blocks) <= self.parting_block:
            self.ensemble_size = 1
        return kept

    def restore_stock_class(self) -> None:
        self._tiling.remove()
        for name in ("ensemble_size", "parting_block", "_tiling"):
            delattr(self, name)
        super().restore_stock_class()

    def _members(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (x.shape[0] // self.ensemble_size, self.ensemble_size))


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
