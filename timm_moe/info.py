"""What a model has: parameters in training, per token and after export, and the cost of the exported model."""

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .convert import ffn_paths, moe_layers, to_dense
from .model_config import model_input_size


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of an expert model.

    Attributes:
        name: registered name.
        moe_layers: names of the expert layers.
        blocks: number of blocks in which an expert layer could sit.
        num_experts: experts in each layer.
        total: parameters in training.
        activated: parameters that one token passes through in training.
        exported: parameters of the dense model.
        gflops: floating-point operations of the dense model for one image in 10^9, a multiply-add counted as two
            (timm's GMACs are half of it).
        input_size: (channels, height, width) of that image.
    """

    name: str
    moe_layers: list[str]
    blocks: int
    num_experts: int
    total: int
    activated: int
    exported: int
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
        model = timm.create_model(name, **kwargs)
    layers = moe_layers(model)
    dense = to_dense(model).eval()
    idle = sum(_parameters(layer) // layer.num_experts * (layer.num_experts - 1) for layer in layers.values())
    input_size = model_input_size(dense)
    return ModelInfo(
        name=name,
        moe_layers=list(layers),
        blocks=len(ffn_paths(model)),
        num_experts=next(iter(layers.values())).num_experts,
        total=_parameters(model),
        activated=_parameters(model) - idle,
        exported=_parameters(dense),
        gflops=_flops(dense, input_size) / 1e9,
        input_size=input_size,
    )


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _flops(model: nn.Module, input_size: tuple[int, ...]) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(1, *input_size, device="meta"))
    return counter.get_total_flops()
