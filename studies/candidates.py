"""Ways of training and merging experts that only studies try.

The import registers their routers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from timm_moe import RouterSpec, moe_layers, register_router
from timm_moe.layers import EwaMlp, RandomPartition, Routing
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


#: Optimizer steps of the trainings of study ``twenty``: 120 epochs of 39 batches.
UPDATES = 120 * 39


def every_ten(progress: float, share_rate: float) -> float:
    """Average the experts at every tenth step."""
    return share_rate if round(progress * UPDATES) % 10 == 0 else 0.0


CANDIDATES: dict[str, Callable[[float, float], float]] = {
    "cyclic": cyclic,
    "annealed": annealed,
    "last": last,
    "every_ten": every_ten,
}


def follow(schedule: str, model: nn.Module) -> None:
    """Average a model's experts by a candidate.

    It is set here because the options in checkpoints cannot name it.
    """
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


register_router(
    RouterSpec(
        "image_partition",
        lambda dim, num_experts: ImagePartition(num_experts),
        layer=EwaMlp,
        layer_options={},
    )
)


def drop_path_by_expert(model: nn.Module) -> None:
    """Give each expert of a ViT another rate of drop path.

    The rates are from 0 to twice that of the block, which is their mean.

    The rows of an image that one expert computes are dropped together, independently of the other
    experts'.
    """
    for block in model.blocks:  # type: ignore[union-attr]
        if isinstance(block.mlp, EwaMlp) and isinstance(block.drop_path2, nn.Module):
            rate = getattr(block.drop_path2, "drop_prob", 0.0)
            _drop_experts(block.mlp, rate)
            block.drop_path2 = nn.Identity()


def _drop_experts(layer: EwaMlp, rate: float) -> None:
    """Drop the outputs (B, N, D) of a layer by image and expert.

    Expert e is dropped at the rate 2 rate e / (E - 1). What is kept is scaled.
    """
    kept_E = 1 - 2 * rate * torch.arange(layer.num_experts) / (layer.num_experts - 1)
    routings: list[Routing] = []

    def keep_routing(router: nn.Module, inputs: Any, routing: Routing) -> None:
        if layer.training:
            routings.append(routing)

    def drop(layer: nn.Module, inputs: tuple[Tensor], y_BND: Tensor) -> Tensor | None:
        if not routings:
            return None
        images, rows = y_BND.shape[:2]
        factor_BE = torch.bernoulli(kept_E.expand(images, -1)) / kept_E
        expert_BN = routings.pop().experts().view(images, rows)
        return y_BND * factor_BE.gather(1, expert_BN).unsqueeze(2).to(y_BND.dtype)

    layer.router.register_forward_hook(keep_routing)
    layer.register_forward_hook(drop)
