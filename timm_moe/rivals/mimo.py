"""Ensembles that take M images at once (MIMO, arXiv 2010.06610), and in V-MoE (pBE, 2110.03360, appendix C).

Shape suffixes: M members, B images, R repetitions, T = R B rows of a mixed batch.
"""

from dataclasses import replace
from typing import Any

import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, get_arch_pretrained_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from ..layers.checks import check_integer, check_number
from ..models.members import as_one_classifier
from ..models.mixin import MoeMixin
from ..models.vision_transformer import (
    VMOE,
    VMOE_S_CFG,
    MoeVisionTransformer,
    PreLogitsVisionTransformer,
    create_moe_vit,
)

__all__ = ["MimoMoeVisionTransformer", "MimoVisionTransformer"]  # timm adds the entrypoints


def draw_mixture(
    batch: int, members: int, input_repetition: float, batch_repetitions: int, device: torch.device | None = None
) -> Tensor:
    """(T, M) numbers of images: row t of a mixed batch shows image ``[t, m]`` to member m, who sees each image R times.

    Args:
        batch: B.
        members: M.
        input_repetition: share of the rows that show all members the same image.
        batch_repetitions: R.
        device: of the result.

    Raises:
        ValueError: if so few rows are left to be shuffled that all members would see the same image in each.
    """
    rows = batch * batch_repetitions
    shuffled = int(rows * (1 - input_repetition))
    if members > 1 and shuffled < 2:
        raise ValueError(
            f"A batch of {batch} with input_repetition={input_repetition} leaves nothing to shuffle, so that no member "
            "would learn to tell its image from the others: take a larger batch."
        )
    image_T = torch.randperm(rows, device=device) % batch
    first_T, others_T = image_T[:shuffled], image_T[shuffled:]
    drawn = [first_T[torch.randperm(shuffled, device=device)] for _ in range(members)]
    return torch.stack([torch.cat([own_T, others_T]) for own_T in drawn], 1)


def mix(x: Tensor, image_TM: Tensor) -> Tensor:
    """Images (B, C, H, W) as rows (T, M C, H, W), those of the members one after the other in the channels."""
    return x[image_TM].flatten(1, 2)


def unmix(output: Tensor, image_TM: Tensor, batch: int) -> Tensor:
    """Outputs (T, M, ...) in the order of the B images: (B, R M, ...), of each all that its members put out for it."""
    row_TM = image_TM.argsort(dim=0, stable=True)
    member_M = torch.arange(image_TM.shape[1], device=output.device)
    return output[row_TM, member_M].unflatten(0, (batch, -1)).flatten(1, 2)


class MimoMixin(VisionTransformer):
    """A Vision Transformer that takes M images at once and has a classifier for each (pBE, 2110.03360, appendix C).

    Its patch embedding takes the channels of M images, its classifier has M C outputs. In training each member gets an
    image of its own from the batch; the output holds all that was put out for each image, (B, R M, C), for
    :class:`timm_moe.MemberLoss`, which timm's training tasks get by themselves. In eval mode all members get the same
    image: the output is the logarithm of the mean of their probabilities, (B, C), and the features are common to all.

    Weights of an ordinary ViT are repeated M times and divided by M, in the patch embedding and the classifier.

    Args:
        ensemble_size: M.
        input_repetition: share of the rows of a mixed batch in which all members get the same image; below 1.
        batch_repetitions: R, how often each member sees each image of a batch.
        in_chans: channels of one image.
        num_classes: C.
        kwargs: as the class that this is mixed into.

    Raises:
        ValueError: on an option outside its range; in training on a batch too small to be mixed.
    """

    def __init__(
        self,
        *,
        ensemble_size: int = 2,
        input_repetition: float = 0.5,
        batch_repetitions: int = 1,
        in_chans: int = 3,
        num_classes: int = 1000,
        **kwargs: Any,
    ):
        check_integer("ensemble_size", ensemble_size, 1)
        check_integer("batch_repetitions", batch_repetitions, 1)
        check_number("input_repetition", input_repetition, 0)
        if input_repetition >= 1:
            raise ValueError(
                f"input_repetition must be below 1, got {input_repetition}: members that always see the same image "
                "do not learn to tell theirs from the others."
            )
        super().__init__(in_chans=ensemble_size * in_chans, num_classes=ensemble_size * num_classes, **kwargs)
        self.num_classes = num_classes
        self.in_chans = in_chans  # what timm's loaders ask for
        self.ensemble_size = ensemble_size
        self.input_repetition = input_repetition
        self.batch_repetitions = batch_repetitions

    def reset_classifier(self, num_classes: int, *args: Any, **kwargs: Any) -> None:
        super().reset_classifier(self.ensemble_size * num_classes, *args, **kwargs)
        self.num_classes = num_classes

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.training or isinstance(self.head, nn.Identity):
            return super().forward(x, *args, **kwargs)
        batch = len(x)
        image_TM = draw_mixture(batch, self.ensemble_size, self.input_repetition, self.batch_repetitions, x.device)
        return unmix(super().forward(mix(x, image_TM), *args, **kwargs), image_TM, batch)

    def forward_members(self, x: Tensor) -> Tensor:
        """The logits (B, M, C) of each member for images x (B, channels, height, width), which all of them get."""
        return self._members(super().forward_head(self.forward_features(x)))

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward_features(self._for_all_members(x), *args, **kwargs)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward_intermediates(self._for_all_members(x), *args, **kwargs)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = super().forward_head(x, pre_logits)
        if pre_logits or isinstance(self.head, nn.Identity):
            return x
        members = self._members(x)
        return members if self.training else as_one_classifier(members)

    def _members(self, logits: Tensor) -> Tensor:
        return logits.unflatten(1, (self.ensemble_size, -1))

    def _for_all_members(self, x: Tensor) -> Tensor:
        """Images of M members are taken as they are; others are shown to all members."""
        one_image = x.shape[1] == self.in_chans
        return x.repeat(1, self.ensemble_size, 1, 1) if one_image else x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        repeated = [
            self._repeat_for_members(state_dict, f"{prefix}{name}", parameter, dim, divisor)
            for name, parameter, dim, divisor in (
                ("patch_embed.proj.weight", self.patch_embed.proj.weight, 1, self.ensemble_size),
                ("head.weight", getattr(self.head, "weight", None), 0, self.ensemble_size),
                ("head.bias", getattr(self.head, "bias", None), 0, 1),
            )
        ]
        if {True, False} <= set(repeated):
            raise ValueError(
                f"The checkpoint has one image in its patch embedding and several in its classifier, or the reverse: "
                f"create the model with the ensemble_size, in_chans and num_classes of the checkpoint "
                f"(here {self.ensemble_size}, {self.in_chans} and "
                f"{self.num_classes})."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _repeat_for_members(
        self, state_dict: dict[str, Any], name: str, parameter: Tensor | None, dim: int, divisor: int
    ) -> bool | None:
        """Whether a tensor was that of one member and was repeated; None if there is none, or it has another shape."""
        loaded = state_dict.get(name)
        if loaded is None or parameter is None or self.ensemble_size == 1:
            return None
        if loaded.shape == parameter.shape:
            return False
        if loaded.shape[dim] * self.ensemble_size != parameter.shape[dim]:
            return None
        state_dict[name] = loaded.repeat(*(self.ensemble_size if d == dim else 1 for d in range(loaded.ndim))) / divisor
        return True


class MimoVisionTransformer(MimoMixin, PreLogitsVisionTransformer):
    """A dense ViT as :class:`MimoMixin` says."""


class MimoMoeVisionTransformer(MimoMixin, MoeVisionTransformer):
    """A V-MoE as :class:`MimoMixin` says. Its dense form is a :class:`MimoVisionTransformer`."""

    def restore_stock_class(self) -> None:
        MoeMixin.restore_stock_class(self)
        self.__class__ = MimoVisionTransformer  # type: ignore[assignment]


#: The stock models whose pretrained tags the ensembles take over, and the arguments of each size.
_STOCK = {
    "s32": None,
    "b32": "vit_base_patch32_224",
    "b16": "vit_base_patch16_224",
    "l32": "vit_large_patch32_224",
    "l16": "vit_large_patch16_224",
}
_ARGS = {
    "s32": dict(patch_size=32, embed_dim=512, depth=8, num_heads=8),
    "b32": dict(patch_size=32, embed_dim=768, depth=12, num_heads=12),
    "b16": dict(patch_size=16, embed_dim=768, depth=12, num_heads=12),
    "l32": dict(patch_size=32, embed_dim=1024, depth=24, num_heads=16),
    "l16": dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16),
}

default_cfgs = generate_default_cfgs(
    {
        f"{family}_{size}.{cfg.tag}" if cfg.tag else f"{family}_{size}": replace(cfg, url="", custom_load=False)
        for family in ("vit_mimo", "vmoe_mimo")
        for size, stock in _STOCK.items()
        if stock
        for cfg in get_arch_pretrained_cfgs(stock).values()
    }
    | {"vit_mimo_s32": VMOE_S_CFG, "vmoe_mimo_s32": VMOE_S_CFG}
)
#: As pBE's models in fine-tuning, but 2 of all 32 experts (table 9).
_VMOE = {**VMOE, **dict(top_k=2, capacity_factor=1.5, eval_capacity_factor=8.0, expert_dropout=0.1)}


def _create_dense(size: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    return build_model_with_cfg(
        MimoVisionTransformer,
        f"vit_mimo_{size}",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **{**_ARGS[size], **kwargs},
    )


def _create_sparse(size: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    name, dense = f"vmoe_mimo_{size}", f"vit_mimo_{size}"
    model = create_moe_vit(name, dense, pretrained, {**_VMOE, **_ARGS[size]}, kwargs, MimoMoeVisionTransformer)
    if isinstance(model, MimoMoeVisionTransformer):
        model.dense_args = {**(model.dense_args or {}), "ensemble_size": model.ensemble_size}
    return model


@register_model
def vit_mimo_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in ViT-S/32: 512 wide and 8 blocks, not timm's ViT-S."""
    return _create_dense("s32", pretrained, kwargs)


@register_model
def vit_mimo_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in ViT-B/32."""
    return _create_dense("b32", pretrained, kwargs)


@register_model
def vit_mimo_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in ViT-B/16."""
    return _create_dense("b16", pretrained, kwargs)


@register_model
def vit_mimo_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in ViT-L/32."""
    return _create_dense("l32", pretrained, kwargs)


@register_model
def vit_mimo_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in ViT-L/16."""
    return _create_dense("l16", pretrained, kwargs)


@register_model
def vmoe_mimo_s32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in V-MoE-S/32: 512 wide and 8 blocks, not timm's ViT-S."""
    return _create_sparse("s32", pretrained, kwargs)


@register_model
def vmoe_mimo_b32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in V-MoE-B/32."""
    return _create_sparse("b32", pretrained, kwargs)


@register_model
def vmoe_mimo_b16(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in V-MoE-B/16."""
    return _create_sparse("b16", pretrained, kwargs)


@register_model
def vmoe_mimo_l32(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in V-MoE-L/32."""
    return _create_sparse("l32", pretrained, kwargs)


@register_model
def vmoe_mimo_l16(pretrained: bool = False, **kwargs) -> nn.Module:
    """MIMO in V-MoE-L/16."""
    return _create_sparse("l16", pretrained, kwargs)
