"""Ways to merge experts that the package does not have, tried by the study ``search``."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from timm_moe import moe_layers
from timm_moe.layers import RandomPartition, Routing
from timm_moe.schedules import SCHEDULES


def cyclic(progress: float, share_rate: float) -> float:
    """Ten times in a run experts stay apart and are averaged in the last tenth of the cycle."""
    return share_rate if progress * 10 % 1 > 0.9 or progress == 1 else 0.0


def annealed(progress: float, share_rate: float) -> float:
    """The rate rises as a cosine schedule's learning rate falls."""
    return share_rate * (1 - math.cos(math.pi * progress)) / 2


def last(progress: float, share_rate: float) -> float:
    """Experts stay apart, and are averaged in the last tenth of the run, at the lowest learning rates."""
    return share_rate if progress > 0.9 else 0.0


CANDIDATES: dict[str, Callable[[float, float], float]] = {"cyclic": cyclic, "annealed": annealed, "last": last}


def follow(schedule: str, model: nn.Module) -> None:
    """Let the experts of a model be averaged by a candidate, which its options, stored in checkpoints, cannot name."""
    SCHEDULES[schedule] = CANDIDATES[schedule]
    for layer in moe_layers(model).values():
        layer.share_schedule = schedule  # type: ignore[assignment]


def rate_by_depth(model: nn.Module) -> None:
    """The last layer of experts is averaged at its full rate, the first at the smallest part of it."""
    layers = list(moe_layers(model).values())
    for number, layer in enumerate(layers, start=1):
        layer.share_rate = layer.share_rate * number / len(layers)  # type: ignore[operator, assignment]


class ImagePartition(RandomPartition):
    """Partition of the images over the experts, as equal as may be: all rows of an image go to one expert.

    So each expert sees images, crops and augmentations of its own.
    """

    routing_unit = "image"

    def forward(self, x: Tensor) -> Routing:
        """Partition the images of x of shape (B, N, D)."""
        of_images = super().forward(x[:, 0])
        rows = x.shape[1]
        row = torch.arange(rows, device=x.device)
        indices = (of_images.token_indices, of_images.slots)
        token_indices, slots = ((index.view(-1, 1) * rows + row).flatten() for index in indices)
        return Routing(token_indices, of_images.offsets * rows, slots.unsqueeze(1), None)


def whole_images(model: nn.Module) -> None:
    """An image's rows all go to one expert."""
    for layer in moe_layers(model).values():
        layer.router = ImagePartition(layer.num_experts)
