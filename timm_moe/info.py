"""What a model has: parameters in all and for a token, and the cost of an evaluation."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .convert import ffn_paths, moe_layers, to_dense
from .layers import MoeMlp, TopKRouter
from .model_config import model_input_size


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of an expert model.

    Attributes:
        name: registered name.
        moe_layers: names of the expert layers.
        blocks: number of blocks in which an expert layer could sit.
        num_experts: experts in each layer.
        top_k: experts that a token passes through in training.
        total: parameters in training.
        activated: parameters that one token passes through in training.
        exported: parameters of the dense model, or None where the experts are routed, also in evaluation.
        gflops: floating-point operations of an evaluation for one image in 10^9, a multiply-add counted as two (timm's
            GMACs are half of it). Routed experts take every token K times.
        input_size: (channels, height, width) of that image.
    """

    name: str
    moe_layers: list[str]
    blocks: int
    num_experts: int
    top_k: int
    total: int
    activated: int
    exported: int | None
    gflops: float
    input_size: tuple[int, ...]


def model_info(name: str, **kwargs: Any) -> ModelInfo:
    """Measure a registered expert model without allocating its weights.

    Args:
        name: registered model name.
        kwargs: arguments of ``timm.create_model``.

    Raises:
        ValueError: if the model has no expert layers.
    """
    with torch.device("meta"):
        model = timm.create_model(name, **kwargs).eval()
    layers = list(moe_layers(model).values())
    if not layers:
        raise ValueError(f"{name} has no expert layers.")
    first = layers[0]
    routed = isinstance(first.router, TopKRouter)
    deployed = model if routed else to_dense(model).eval()
    total = _parameters(model)
    input_size = model_input_size(model)
    return ModelInfo(
        name=name,
        moe_layers=list(moe_layers(model)),
        blocks=len(ffn_paths(model)),
        num_experts=first.num_experts,
        top_k=_top_k(first),
        total=total,
        activated=total - sum(_idle_parameters(layer) for layer in layers),
        exported=None if routed else _parameters(deployed),
        gflops=_flops_per_image(deployed, input_size) / 1e9,
        input_size=input_size,
    )


def _top_k(layer: MoeMlp) -> int:
    return layer.router.top_k if isinstance(layer.router, TopKRouter) else 1


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle_parameters(layer: MoeMlp) -> int:
    """Parameters of the experts that a token does not pass through."""
    experts = sum(stacked.numel() for _, stacked in layer.named_expert_parameters())
    return experts // layer.num_experts * (layer.num_experts - _top_k(layer))


def _flops_per_image(model: nn.Module, input_size: tuple[int, ...]) -> int:
    """Operations of a forward on the meta device, where every expert works on as many rows as it has places.

    At a capacity factor of 1 these are exactly K for each token, given a batch of E images.
    """
    batch = 1
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.eval_capacity_factor, module.capacity_multiple, module.group_images = 1.0, 1, None
            batch = module.num_experts
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(batch, *input_size, device="meta"))
    return counter.get_total_flops() // batch
