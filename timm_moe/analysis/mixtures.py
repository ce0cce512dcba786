"""Soft MoE and Expert Choice watched while a model classifies images: which patches feed a slot, or several experts.

Slots are shown as in the paper of Soft MoE (arXiv 2308.00951, appendix G).

Shape suffixes: B images of a batch, I images that are shown, N tokens of an image, E experts, S slots of all experts.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..convert.blocks import moe_layers
from ..layers import ExpertChoiceRouter, SoftRouter
from .data import Inference, batches, image_bytes
from .routing_statistics import numbered, patch_grid

#: Slots of a layer that are shown.
SHOWN_SLOTS = 6


class Mixture(ABC):
    """Numbers on the tokens of images in one call of a layer in which no token chooses, gathered batch by batch.

    Args:
        layer: name of the call.
        router: of the layer.
        grid: rows and columns of the patches; None if the tokens are not patches.
    """

    def __init__(self, layer: str, router: Any, grid: tuple[int, int] | None):
        self.layer, self.router, self.grid = layer, router, grid
        self.images = 0
        self._sums: dict[str, Tensor] = {}  # over the images
        self._shown: list[Tensor] = []  # weights of the tokens of each image that is shown, (..., N)

    @abstractmethod
    def _measure(self, output: Any, images: int) -> tuple[dict[str, Tensor], Tensor]:
        """Give figures of each image, (B, ...) by their names, and weights of its tokens, (B, ..., N)."""

    @abstractmethod
    def _numbers(self, means: dict[str, Tensor]) -> dict[str, Any]:
        """Give the numbers of a layer from the figures' means over the images."""

    @abstractmethod
    def _named(self, maps: Tensor) -> dict[str, Tensor]:
        """Choose the maps that are shown, of (I, ..., rows, columns) weights."""

    def add(self, output: Any, images: int, shown: Sequence[int]) -> None:
        """Take in what the router gave for so many images, and the indices of images that are shown."""
        figures, weight_BxN = self._measure(output, images)
        for name, figure in figures.items():
            self._sums[name] = self._sums.get(name, 0) + figure.cpu().double().sum(0)
        self._shown += weight_BxN[list(shown)].cpu().unbind()
        self.images += images

    def summary(self) -> dict[str, Any]:
        """Give the numbers of the layer, means over the images."""
        size = {"layer": self.layer, "experts": self.router.num_experts, "tokens": self._shown[0].shape[-1]}
        return {**size, **self._numbers({name: total / self.images for name, total in self._sums.items()})}

    def maps(self) -> dict[str, Tensor]:
        """Give weights of the patches of the images that are shown, (I, rows, columns), by their names."""
        if self.grid is None:
            return {}
        weight_IxN = torch.stack(self._shown)
        return self._named(weight_IxN[..., weight_IxN.shape[-1] - math.prod(self.grid) :].unflatten(-1, self.grid))


class SoftMixture(Mixture):
    """The slots of Soft MoE: its maps are the weights of the patches in the slots that mix the fewest tokens.

    ``tokens_per_slot`` is the exponential of the entropy of a slot's weights, averaged over the slots: 1 for a slot of
    a single token, N for an even mean. ``slots_per_token`` is the same for the weights of a token's output.
    """

    def _measure(self, output: Any, images: int) -> tuple[dict[str, Tensor], Tensor]:
        weight_BSN, weight_BNS = output[0].mT, output[1]
        return {"tokens_per_slot": _perplexity(weight_BSN), "slots_per_token": _perplexity(weight_BNS)}, weight_BSN

    def _numbers(self, means: dict[str, Tensor]) -> dict[str, Any]:
        return {"slots": len(means["tokens_per_slot"]), **{name: mean.mean().item() for name, mean in means.items()}}

    def _named(self, maps: Tensor) -> dict[str, Tensor]:
        each = self.router.slots_per_expert
        sharpest = self._sums["tokens_per_slot"].argsort(stable=True)[:SHOWN_SLOTS].tolist()
        names = (f"expert {slot // each}" + (f", slot {slot % each}" if each > 1 else "") for slot in sharpest)
        return {name: maps[:, slot] for name, slot in zip(names, sharpest, strict=True)}

    def __str__(self) -> str:
        tokens, slots, mixed, combined = (
            self.summary()[name] for name in ("tokens", "slots", "tokens_per_slot", "slots_per_token")
        )
        return f"{self.layer}: a slot mixes {mixed:.1f} of {tokens} tokens, a token {combined:.1f} of {slots} slots."


class ExpertChoices(Mixture):
    """The choices of experts: its map is the number of experts that took each patch.

    ``share_by_experts`` are the shares of the tokens that 0, 1, ... E experts took.
    """

    def _measure(self, output: Any, images: int) -> tuple[dict[str, Tensor], Tensor]:
        experts = self.router.num_experts
        count_BN = (output.experts() < experts).sum(1).view(images, -1)
        return {"share_by_experts": nn.functional.one_hot(count_BN, experts + 1).float().mean(1)}, count_BN

    def _numbers(self, means: dict[str, Tensor]) -> dict[str, Any]:
        return {name: mean.tolist() for name, mean in means.items()}

    def _named(self, maps: Tensor) -> dict[str, Tensor]:
        return {"number of experts": maps}

    def __str__(self) -> str:
        shares = enumerate(self.summary()["share_by_experts"])
        taken = ", ".join(f"{number}: {share:.1%}" for number, share in shares if share)
        return f"{self.layer}: tokens by the number of their experts, of {self.router.num_experts}: {taken}."


_KINDS: dict[type[nn.Module], type[Mixture]] = {SoftRouter: SoftMixture, ExpertChoiceRouter: ExpertChoices}


def _perplexity(weights: Tensor) -> Tensor:
    """Exponential of the entropy over the last dimension."""
    return torch.special.entr(weights).sum(-1).exp()


class MixtureWatcher(ExitStack):
    """Context that notes every call of the routers of Soft MoE and Expert Choice. The forward itself does not change.

    Attributes:
        mixtures: what was seen so far, in the order of the calls.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.mixtures: list[Mixture] = []
        self._model = model
        self._noted: list[tuple[str, nn.Module, Tensor, Any]] = []
        for name, layer in moe_layers(model).items():
            if type(layer.router) in _KINDS:
                self.callback(layer.router.register_forward_hook(partial(self._note, name)).remove)

    def _note(self, name: str, router: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        self._noted.append((name, router, inputs[0], output))

    def end_batch(self, images: Tensor, shown: Sequence[int]) -> None:
        """Count a batch of images, (B, 3, height, width), and keep the weights of the ones with these indices."""
        if not self.mixtures:
            names = numbered([name for name, *_ in self._noted])
            for name, (_, router, x, _) in zip(names, self._noted, strict=True):
                grid = patch_grid(self._model, x, math.prod(x.shape[1:-1]), images.shape[2:])
                self.mixtures.append(_KINDS[type(router)](name, router, grid))
        for mixture, (_, _, x, output) in zip(self.mixtures, self._noted, strict=True):
            members = len(x) // len(images)  # an ensemble's layer sees an image once for each; the first is shown
            mixture.add(output, len(x), [members * index for index in shown])
        self._noted = []


def only_mixes(model: nn.Module) -> bool:
    """Tell whether layers of Soft MoE or Expert Choice are all that has something to show."""
    layers = moe_layers(model).values()
    chooses = any(layer.routed_by.depends_on_input for layer in layers)
    return not chooses and any(type(layer.router) in _KINDS for layer in layers)


@torch.inference_mode()
def collect_mixtures(model: nn.Module, images: ImageDataset, inference: Inference) -> tuple[list[Mixture], Tensor]:
    """Run a model on images: the numbers of its layers with maps of the first image, and its bytes, (3, H, W)."""
    first: list[Tensor] = []
    with MixtureWatcher(model) as watcher:
        for (x,), _ in batches([model], images, inference):
            with inference.autocast():
                model(x)
            watcher.end_batch(x, [] if first else [0])
            first = first or [image_bytes(x[:1], model)[0]]
    return watcher.mixtures, first[0]
