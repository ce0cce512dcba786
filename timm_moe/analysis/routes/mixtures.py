"""Patches that feed a slot (Soft MoE), and patches of several experts (Expert Choice).

Slots are shown as in the paper of Soft MoE (arXiv 2308.00951, appendix G).

Shape suffixes: B images of a batch, I images that are shown, N tokens of an image, E experts, S
slots of all experts, M maps of an image.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ...convert.expert_layers import moe_layers
from ...layers import ExpertChoiceRouter, MoeMlp, SoftRouter
from ..data import Inference, batches, image_bytes
from .statistics import RouterCall, RouterWatcher, patch_grid

#: Slots of a layer that are shown.
SHOWN_SLOTS = 6


class Mixture:
    """Numbers on the tokens in one call of a layer in which no token chooses.

    They are gathered batch by batch.

    Args:
        layer: name of the call.
        router: a SoftRouter or an ExpertChoiceRouter.
        grid: rows and columns of the patches; None if the tokens are not patches.
    """

    def __init__(self, layer: str, router: Any, grid: tuple[int, int] | None):
        self.layer, self.router, self.grid = layer, router, grid
        self.is_soft = isinstance(router, SoftRouter)
        self.images = 0
        self._sums: dict[str, Tensor] = {}  # over the images
        self._shown: list[Tensor] = []  # weights of the tokens of each image that is shown, (M, N)

    def add(self, output: Any, images: int, shown: Sequence[int]) -> None:
        """Take in the routing of a batch.

        Args:
            output: what the router gave.
            images: number of images.
            shown: indices of the images that are shown.
        """
        if self.is_soft:
            weight_BMN, combine_BNS = output[0].mT, output[1]
            figures = {
                "tokens_per_slot": _perplexity(weight_BMN),
                "slots_per_token": _perplexity(combine_BNS),
            }
        else:
            count_BN = (output.experts() < self.router.num_experts).sum(1).view(images, -1)
            weight_BMN = count_BN.unsqueeze(1)
            counted_BNE = nn.functional.one_hot(count_BN, self.router.num_experts + 1)
            figures = {"share_by_experts": counted_BNE.float().mean(1)}
        for name, figure in figures.items():
            self._sums[name] = self._sums.get(name, 0) + figure.cpu().double().sum(0)
        self._shown += weight_BMN[list(shown)].cpu().unbind()
        self.images += images

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the layer, means over the images.

        ``tokens_per_slot`` is the exponential of the entropy of a slot's weights, averaged over the
        slots: 1 for a slot of a single token, N for an even mean. ``slots_per_token`` is the same
        for the weights of a token's output. ``share_by_experts`` are the shares of the tokens that
        0, 1, ... E experts took.
        """
        means = {name: total / self.images for name, total in self._sums.items()}
        size = {
            "layer": self.layer,
            "experts": self.router.num_experts,
            "tokens": self._shown[0].shape[1],
        }
        if not self.is_soft:
            return {**size, "share_by_experts": means["share_by_experts"].tolist()}
        size["slots"] = len(means["tokens_per_slot"])
        return {**size, **{name: mean.mean().item() for name, mean in means.items()}}

    def __str__(self) -> str:
        own = self.summary()
        if self.is_soft:
            slot = f"a slot mixes {own['tokens_per_slot']:.1f} of {own['tokens']} tokens"
            token = f"a token {own['slots_per_token']:.1f} of {own['slots']} slots"
            return f"{self.layer}: {slot}, {token}."
        shares = (
            f"{share:.1%} have {number}"
            for number, share in enumerate(own["share_by_experts"])
            if share
        )
        return f"{self.layer}: of the tokens, {', '.join(shares)} of {own['experts']} experts."

    def maps(self) -> dict[str, Tensor]:
        """Return weights of the patches of the images that are shown, by their names.

        Each is (I, rows, columns).

        Of Soft MoE these are the slots that mix the fewest tokens, of Expert Choice the number of
        experts of each patch.
        """
        if self.grid is None:
            return {}
        patch_IMP = torch.stack(self._shown)[..., -math.prod(self.grid) :].unflatten(2, self.grid)
        if not self.is_soft:
            return {"number of experts": patch_IMP[:, 0]}
        each = self.router.slots_per_expert
        sharpest = self._sums["tokens_per_slot"].argsort(stable=True)[:SHOWN_SLOTS].tolist()
        names = (
            f"expert {slot // each}" + (f", slot {slot % each}" if each > 1 else "")
            for slot in sharpest
        )
        return {name: patch_IMP[:, slot] for name, slot in zip(names, sharpest, strict=True)}


def _perplexity(weights: Tensor) -> Tensor:
    """Return the exponential of the entropy over the last dimension."""
    return torch.special.entr(weights).sum(-1).exp()


def mixing_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """Find the layers of Soft MoE and Expert Choice by their paths.

    In these no token chooses its experts by itself.
    """
    kinds = (SoftRouter, ExpertChoiceRouter)
    return {
        name: layer for name, layer in moe_layers(model).items() if isinstance(layer.router, kinds)
    }


def add_calls(
    mixtures: dict[str, Mixture],
    calls: Sequence[RouterCall],
    model: nn.Module,
    images: Tensor,
    shown: Sequence[int],
) -> None:
    """Add a batch's calls to the mixtures by name.

    Args:
        mixtures: by the names of the calls; new calls are put here.
        calls: of the batch, by a :class:`RouterWatcher`.
        model: that was called.
        images: (B, channels, H, W), the batch as the model got it.
        shown: indices of the images that are shown.
    """
    for call in calls:
        if call.layer.router.depends_on_input:
            continue
        if call.name not in mixtures:
            grid = patch_grid(model, call.x, images.shape[2:])
            mixtures[call.name] = Mixture(call.name, call.layer.router, grid)
        # A layer of an ensemble sees an image once for each member. The first member's is shown.
        members = len(call.x) // len(images)
        mixtures[call.name].add(call.routing, len(call.x), [members * index for index in shown])


@torch.inference_mode()
def collect_mixtures(
    model: nn.Module, images: ImageDataset, inference: Inference
) -> tuple[list[Mixture], Tensor]:
    """Run a model on images and gather the numbers of its layers.

    Returns:
        The numbers, with maps of the first image; and that image as bytes (3, H, W).
    """
    mixtures: dict[str, Mixture] = {}
    first: list[Tensor] = []
    with RouterWatcher(mixing_layers(model)) as watcher:
        for (x,), labels in batches([model], images, inference):
            with inference.autocast(x):
                model(x)
            add_calls(mixtures, watcher.end_batch(labels.cpu()), model, x, [] if first else [0])
            first = first or [image_bytes(x[:1], model)[0]]
    return [*mixtures.values()], first[0]
