"""Ways of merging experts that only the study ``search`` tries."""

import math
from collections.abc import Callable

from torch import Tensor, nn

from timm_moe import moe_layers
from timm_moe.layers import RandomPartition, Routing
from timm_moe.schedules import SCHEDULES


def cyclic(progress: float, share_rate: float) -> float:
    """Average the experts in the last tenth of each of ten cycles."""
    return share_rate if progress * 10 % 1 > 0.9 or progress == 1 else 0.0


def annealed(progress: float, share_rate: float) -> float:
    """Raise the rate as a cosine schedule lowers the learning rate."""
    return share_rate * (1 - math.cos(math.pi * progress)) / 2


def last(progress: float, share_rate: float) -> float:
    """Average the experts in the last tenth of the run, at the lowest learning rates."""
    return share_rate if progress > 0.9 else 0.0


CANDIDATES: dict[str, Callable[[float, float], float]] = {"cyclic": cyclic, "annealed": annealed, "last": last}


def follow(schedule: str, model: nn.Module) -> None:
    """Average a model's experts by a candidate; it is set here because the options in checkpoints cannot name it."""
    SCHEDULES[schedule] = CANDIDATES[schedule]
    for layer in moe_layers(model).values():
        layer.share_schedule = schedule  # type: ignore[assignment]


def rate_by_depth(model: nn.Module) -> None:
    """Raise the rate with the depth: layer n of N is averaged at n / N of the rate."""
    layers = list(moe_layers(model).values())
    for number, layer in enumerate(layers, start=1):
        layer.share_rate = layer.share_rate * number / len(layers)  # type: ignore[operator, assignment]


class ImagePartition(RandomPartition):
    """Random partition of the images into equal parts: all rows of an image go to one expert."""

    routing_unit = "image"

    def forward(self, x: Tensor) -> Routing:
        """Partition the images of x (B, N, D)."""
        return super().forward(x[:, 0]).for_all_rows(x.shape[1])


def whole_images(model: nn.Module) -> None:
    """Send all rows of an image to one expert."""
    for layer in moe_layers(model).values():
        layer.router = ImagePartition(layer.num_experts)
