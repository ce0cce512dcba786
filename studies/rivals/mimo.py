"""Ensembles that take M images at once (MIMO, arXiv 2010.06610).

In a V-MoE they are those of pBE (arXiv 2110.03360, appendix C).

Shape suffixes: M members, B images, R repetitions, T = R B rows of a mixed batch.
"""

from functools import partial
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from timm_moe.layers.checks import check_integer, check_number
from timm_moe.models.ensemble import as_one_classifier
from timm_moe.models.mixin import MoeMixin
from timm_moe.models.variants import Variant, create_vit, register_variants, vmoe_variants
from timm_moe.models.vision_transformer import (
    VMOE,
    MoeVisionTransformer,
    PreLogitsVisionTransformer,
    create_moe_vit,
)

__all__ = ["MimoMoeVisionTransformer", "MimoVisionTransformer"]  # timm adds the entrypoints


def draw_mixture(
    batch: int,
    members: int,
    input_repetition: float,
    batch_repetitions: int,
    device: torch.device | None = None,
) -> Tensor:
    """Draw the indices (T, M) of the image that each member sees in each row.

    The rows are those of a mixed batch, see :class:`MimoMixin`.

    Raises:
        ValueError: if fewer than two rows are left to shuffle, so that members would always see the
            same image.
    """
    rows = batch * batch_repetitions
    shuffled = int(rows * (1 - input_repetition))
    if members > 1 and shuffled < 2:
        raise ValueError(
            f"A batch of {batch} with input_repetition={input_repetition} leaves nothing to "
            "shuffle, so that no member would learn to tell its image from the others: take a "
            "larger batch."
        )
    image_T = torch.randperm(rows, device=device) % batch
    first_T, others_T = image_T[:shuffled], image_T[shuffled:]
    drawn = [first_T[torch.randperm(shuffled, device=device)] for _ in range(members)]
    return torch.stack([torch.cat([own_T, others_T]) for own_T in drawn], 1)


def mix(x: Tensor, image_TM: Tensor) -> Tensor:
    """Arrange images (B, C, H, W) as rows (T, M C, H, W).

    The members' images lie one after the other in the channels.
    """
    return x[image_TM].flatten(1, 2)


def unmix(output: Tensor, image_TM: Tensor, batch: int) -> Tensor:
    """Sort outputs (T, M, ...) by image: (B, R M, ...) has all outputs for each image."""
    row_TM = image_TM.argsort(dim=0, stable=True)
    member_M = torch.arange(image_TM.shape[1], device=output.device)
    return output[row_TM, member_M].unflatten(0, (batch, -1)).flatten(1, 2)


class MimoMixin(VisionTransformer):
    """A Vision Transformer that takes M images at once and classifies each.

    It is that of pBE (arXiv 2110.03360, appendix C).

    The patch embedding takes the channels of M images, the classifier has M C outputs. In training
    each member sees another image of the batch, and the output (B, R M, C) has all logits for each
    image, for :class:`timm_moe.MemberLoss`; timm's training tasks use it automatically. In eval
    mode all members see the same image, and the output (B, C) is the logarithm of their mean
    probabilities. Features are common to all members.

    Weights of an ordinary ViT are repeated M times and divided by M, in the patch embedding and the
    classifier.

    Args:
        ensemble_size: M.
        input_repetition: share of the rows of a mixed batch in which all members see the same
            image; below 1.
        batch_repetitions: R, how often each member sees each image of a batch.
        in_chans: channels of one image.
        num_classes: C.
        kwargs: arguments of the class that this is mixed into.

    Raises:
        ValueError: if an option is outside its range, or a training batch is too small to be mixed.
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
        super().__init__(
            in_chans=ensemble_size * in_chans, num_classes=ensemble_size * num_classes, **kwargs
        )
        self.num_classes = num_classes
        self.in_chans = in_chans  # timm's loaders read it
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
        image_TM = draw_mixture(
            batch, self.ensemble_size, self.input_repetition, self.batch_repetitions, x.device
        )
        return unmix(super().forward(mix(x, image_TM), *args, **kwargs), image_TM, batch)

    def forward_members(self, x: Tensor) -> Tensor:
        """Compute the logits (B, M, C) of each member for images x (B, channels, height, width)."""
        return super().forward_head(self.forward_features(x)).unflatten(1, (self.ensemble_size, -1))

    def forward_features(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward_features(self._for_all_members(x), *args, **kwargs)

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward_intermediates(self._for_all_members(x), *args, **kwargs)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        x = super().forward_head(x, pre_logits)
        if pre_logits or isinstance(self.head, nn.Identity):
            return x
        members = x.unflatten(1, (self.ensemble_size, -1))
        return members if self.training else as_one_classifier(members)

    def _for_all_members(self, x: Tensor) -> Tensor:
        """Show an image to all members, unless the channels already hold one for each."""
        is_one = x.shape[1] == self.in_chans
        return x.repeat(1, self.ensemble_size, 1, 1) if is_one else x

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Repeat tensors that have the shape for one member."""
        own, members = dict(self.named_parameters()), self.ensemble_size
        for name, dim, divisor in [
            ("patch_embed.proj.weight", 1, members),
            ("head.weight", 0, members),
            ("head.bias", 0, 1),
        ]:
            loaded = state_dict.get(prefix + name)
            if (
                loaded is not None
                and name in own
                and loaded.shape[dim] * members == own[name].shape[dim]
            ):
                copies = [members if d == dim else 1 for d in range(loaded.ndim)]
                state_dict[prefix + name] = loaded.repeat(copies) / divisor
        super()._load_from_state_dict(state_dict, prefix, *args)


class MimoVisionTransformer(MimoMixin, PreLogitsVisionTransformer):
    """MIMO in a dense ViT, see :class:`MimoMixin`."""


class MimoMoeVisionTransformer(MimoMixin, MoeVisionTransformer):
    """MIMO in a V-MoE, see :class:`MimoMixin`.

    Its dense form is a :class:`MimoVisionTransformer`.
    """

    def restore_stock_class(self) -> None:
        MoeMixin.restore_stock_class(self)
        self.__class__ = MimoVisionTransformer  # type: ignore[assignment]


#: As pBE's models in fine-tuning, but with 2 of all 32 experts (table 9).
_VMOE = {**VMOE, **dict(top_k=2, capacity_factor=1.5, eval_capacity_factor=8.0, expert_dropout=0.1)}
_DENSE = vmoe_variants("vit_mimo", "MIMO in ViT", {}, with_huge=False)
_SPARSE = vmoe_variants("vmoe_mimo", "MIMO in V-MoE", _VMOE, with_huge=False)


def _create_sparse(
    name: str, variant: Variant, pretrained: bool, kwargs: dict[str, Any]
) -> nn.Module:
    args, dense = {**variant.own_size, **variant.args}, name.replace("vmoe", "vit")
    model = create_moe_vit(
        MimoMoeVisionTransformer, name, Variant("", dense, args), pretrained, kwargs
    )
    if isinstance(model, MimoMoeVisionTransformer):
        assert model.stock_form is not None
        model.stock_form.args["ensemble_size"] = model.ensemble_size
    return model


register_variants(__name__, _DENSE, partial(create_vit, MimoVisionTransformer))
register_variants(__name__, _SPARSE, _create_sparse)
