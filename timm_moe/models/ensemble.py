"""Ensembles inside one Vision Transformer: pBE (arXiv 2110.03360) and its ablations.

The paper was published with the name E³ for the method.
"""

from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ..convert.expert_layers import moe_layers
from ..layers import ensemble_log_probabilities, tile
from .variants import Variant, register_variants, vmoe_variants
from .vision_transformer import VMOE, MoeVisionTransformer, create_moe_vit

__all__ = ["EnsembleVisionTransformer"]  # timm adds the entrypoints


def as_one_classifier(logits: Tensor) -> Tensor:
    """Turn logits (B, M, C) into the log of the members' mean probabilities, (B, C).

    The result is in float32 at least. A narrower type would round different probabilities to the
    same number, and so change predictions.
    """
    precise = torch.promote_types(logits.dtype, torch.float32)
    return ensemble_log_probabilities(logits.to(precise).log_softmax(-1))


class MembersMixin(VisionTransformer):
    """A Vision Transformer with M members that part at one of its blocks (pBE, section 4).

    The input of that block holds each image M times in a row, so ``forward_features`` returns (B M,
    N, D). In training the output holds the logits of all members, (B, M, C), for
    :class:`timm_moe.MemberLoss`, which timm's training tasks use automatically. In eval mode the
    output is the log of their mean probabilities, (B, C). A model of one output gives the members'
    mean, (B, 1), and one without a classifier the mean of their features.

    Subclasses are written ``class X(MembersMixin, Y)``, with Y another subclass of
    VisionTransformer, and call :meth:`part_at` in their constructor.

    Attributes:
        parting_block: number of the block whose input holds the repeated images.
    """

    parting_block: int

    def part_at(self, block: int, ensemble_size: int) -> None:
        """Let M members part at the input of this block, by hooks that repeat the images there."""
        parting: Any = self.blocks[block]
        parting.copies = ensemble_size
        self.parting_block = block
        self._tiling = tile([*self.blocks][block:], ensemble_size)

    @property
    def ensemble_size(self) -> int:
        """M; 1 once the block at which the members part is gone, as in ``model.blocks[:1]``."""
        return max((getattr(block, "copies", 1) for block in self.blocks), default=1)

    def forward_members(self, x: Tensor) -> Tensor:
        """Compute the logits (B, M, C) of all members for images (B, channels, height, width)."""
        return self._members(super().forward_head(self.forward_features(x)))

    def forward_member_features(self, x: Tensor) -> Tensor:
        """Compute the features (B, M, D) of all members before the classifier, for such images."""
        return self._members(super().forward_head(self.forward_features(x), pre_logits=True))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Map features (B M, N, D) to outputs as the class describes them.

        With ``pre_logits`` these are features before the classifier: in eval mode the members'
        mean (B, D), in training all of them, (B, M, D).
        """
        members = self._members(super().forward_head(x, pre_logits))
        if self.training:
            return members
        # The softmax of one class is always 1.
        if pre_logits or self.num_classes == 1 or isinstance(self.head, nn.Identity):
            return members.mean(1)
        return as_one_classifier(members)

    # Other arguments of timm's method differ between its versions and are handed on.
    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: Any = None,
        *,
        output_fmt: str = "NCHW",
        output_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return features as timm's ViT does.

        Each intermediate feature is the mean over the members. The final one holds all members,
        (B M, N, D).

        Raises:
            ValueError: if ``output_fmt`` is neither ``"NCHW"`` nor ``"NLC"``.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt must be NCHW or NLC, got {output_fmt!r}.")
        result: Any = super().forward_intermediates(
            x, indices, output_fmt="NLC", output_dict=True, **kwargs
        )
        final = result.get("image_features")
        if final is not None and len(final) < len(x) * self.ensemble_size:
            # timm stopped before the block at which the members part.
            result["image_features"] = final.repeat_interleave(self.ensemble_size, 0)
        for name in {"image_intermediates", "image_intermediates_prefix"} & result.keys():
            result[name] = [
                feature.unflatten(0, (x.shape[0], -1)).mean(1) for feature in result[name]
            ]
        if output_fmt == "NCHW":
            size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
            result["image_intermediates"] = [
                feature.mT.unflatten(2, size).contiguous()
                for feature in result["image_intermediates"]
            ]
        if output_dict:
            return result

        features = result["image_intermediates"]
        if "image_intermediates_prefix" in result:
            features = list(zip(features, result["image_intermediates_prefix"], strict=True))
        return (result["image_features"], features) if "image_features" in result else features

    def _members(self, x: Tensor) -> Tensor:
        """Give the members a dimension of their own: (B M, ...) -> (B, M, ...)."""
        return x.unflatten(0, (x.shape[0] // self.ensemble_size, self.ensemble_size))


class EnsembleVisionTransformer(MembersMixin, MoeVisionTransformer):
    """A V-MoE with M members, which part at the first expert block (pBE, section 4).

    Its outputs are those of :class:`MembersMixin`.

    Args:
        args: as :class:`MoeVisionTransformer`.
        ensemble_size: M.
        ensemble: kind of ensemble that repeats images, see :func:`timm_moe.convert_to_moe`; with
            ``"multi_head"`` the members part at the last expert block.
        kwargs: as :class:`MoeVisionTransformer`.
    """

    def __init__(self, *args: Any, ensemble_size: int = 2, ensemble: str = "pbe", **kwargs: Any):
        super().__init__(*args, ensemble_size=ensemble_size, ensemble=ensemble, **kwargs)
        blocks = [int(path.split(".")[1]) for path in moe_layers(self)]
        self.part_at(blocks[-1 if ensemble == "multi_head" else 0], ensemble_size)

    def restore_stock_class(self) -> None:
        """Turn into timm's ViT: no image is repeated any more."""
        for handle in self._tiling:
            handle.remove()
        for block in self.blocks:  # The one at which the members part may be gone.
            vars(block).pop("copies", None)
        del self._tiling, self.parting_block
        super().restore_stock_class()


#: pBE in fine-tuning (appendix B.2, table 5): there are 2 members with 16 experts each, and each
#: token of a member goes to 1 of them.
_PBE = VMOE | dict(
    ensemble_size=2,
    top_k=1,
    capacity_factor=1.5,
    eval_capacity_factor=8.0,
    expert_dropout=0.1,
)
_VARIANTS = vmoe_variants("vmoe_pbe", "pBE in V-MoE", _PBE)


def _create(name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    """Build a variant; ``kwargs`` are the caller's."""
    # With "partitioning" no image is repeated, so that an ordinary V-MoE does.
    is_partitioned = kwargs.get("ensemble") == "partitioning"
    model_class = MoeVisionTransformer if is_partitioned else EnsembleVisionTransformer
    return create_moe_vit(model_class, name, variant, pretrained, kwargs)


register_variants(__name__, _VARIANTS, _create)
