"""Sizes of a model: all parameters, the parameters a token passes through, and the cost of an image."""

import difflib
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.models import model_entrypoint
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from .convert.blocks import moe_layers
from .convert.dense import to_dense
from .convert.find import ffn_paths
from .layers import MoeMlp
from .model_config import model_input_size, shown


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of an expert model, or of a model of this package without experts.

    Attributes:
        blocks: number of blocks that could hold an expert layer; in WideNet all share one.
        num_experts: experts in each layer.
        top_k: experts that a token passes through in training.
        members: members of the ensemble inside the model; each routes its own tokens.
        total: parameters in training.
        activated: parameters that one token passes through in training.
        exported: parameters of the dense model, or None if the experts stay routed in evaluation.
        gflops: floating-point operations to evaluate one image, in 10^9; a multiply-add counts as two (timm's GMACs
            are half). Routed experts take every token K times.
        input_size: (channels, height, width) of that image.
    """

    name: str
    moe_layers: list[str]
    blocks: int
    num_experts: int
    top_k: int
    routing_unit: str
    members: int
    total: int
    activated: int
    exported: int | None
    gflops: float
    input_size: tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of a forward for one image by kind, ``attention`` its two products alone, and outputs of norms."""

    convolution: float
    linear: float
    attention: float
    norm: float

    @property
    def macs(self) -> float:
        return self.convolution + self.linear + self.attention


def registered_models(pattern: str = "", pretrained: bool = False) -> list[str]:
    """List this package's models, or their pretrained tags, whose names match a pattern with wildcards."""
    return [name for name in timm.list_models(pattern, pretrained=pretrained) if is_registered_here(name)]


def is_registered_here(name: str) -> bool:
    """Tell if a registered model belongs to this package."""
    return timm.is_model(name) and model_entrypoint(name).__module__.startswith(f"{__package__}.")


def check_registered(name: str) -> None:
    """Raise ValueError, with the nearest name, if timm knows no model of that name."""
    if timm.is_model(name):
        return
    nearest = difflib.get_close_matches(name.partition(".")[0], timm.list_models(), n=1)
    raise ValueError(f"Unknown model ({shown(name)[1:-1]})" + (f"; did you mean {nearest[0]}?" if nearest else "."))


def is_named_after_stock(name: str) -> bool:
    """Tell if a model is the EWA form of a timm architecture, which its name begins with."""
    architecture = name.partition(".")[0]
    stock = architecture.removesuffix("_ewa_moe")
    return stock != architecture and is_registered_here(name) and timm.is_model(stock) and not is_registered_here(stock)


def weightless_model(name: str, **kwargs: Any) -> nn.Module:
    """Create a model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def model_info(name: str, **kwargs: Any) -> ModelInfo:
    """Measure a registered model without allocating its weights.

    Raises:
        ValueError: if there is no such model, or it has no expert layers and does not belong to this package.
    """
    check_registered(name)
    model = weightless_model(name, **kwargs)
    if not moe_layers(model) and not is_registered_here(name):
        raise ValueError(f"{name} has no expert layers.")
    return measure(model, name)


def measure(model: nn.Module, name: str) -> ModelInfo:
    """Measure a model on the meta device, with experts or without; it is changed."""
    layers = list(moe_layers(model).values())
    deployed_as_mean = bool(layers) and layers[0].deploys_dense
    networks = {model.get_submodule(path) for path in ffn_paths(model)}
    deployed = to_dense(model) if deployed_as_mean else model
    return ModelInfo(
        name=name,
        moe_layers=list(moe_layers(model)),
        blocks=sum(module in networks for _, module in model.named_modules(remove_duplicate=False)),
        num_experts=layers[0].num_experts if layers else 0,
        top_k=layers[0].routed_by.experts_of_row() if layers else 0,
        routing_unit=layers[0].routed_by.routing_unit if layers else "token",
        members=getattr(model, "ensemble_size", 1),
        total=parameters(model),
        activated=activated_parameters(model),
        exported=parameters(deployed) if deployed_as_mean else None,
        gflops=2 * evaluation_cost(deployed).macs / 1e9,
        input_size=model_input_size(model),
    )


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def router_parameters(model: nn.Module) -> int:
    return sum(parameters(layer.router) for layer in moe_layers(model).values())


def activated_parameters(model: nn.Module, experts: int | None = None) -> int:
    """Count the parameters that a token passes through if it takes this many experts per layer, by default K."""
    return parameters(model) - sum(
        (layer.num_experts - (experts or layer.routed_by.experts_of_row())) * parameters_of_an_expert(layer)
        for layer in moe_layers(model).values()
    )


def parameters_of_an_expert(layer: MoeMlp) -> int:
    return sum(stacked.numel() for _, stacked in layer.named_expert_parameters()) // layer.num_experts


def evaluation_cost(model: nn.Module) -> Cost:
    """Measure the cost of evaluating one image on the meta device; routed experts take every token K times."""
    with ExitStack() as stack:
        for layer in moe_layers(model).values():
            stack.enter_context(layer.routed_by.dropping_nothing())
        return _forward_cost(model.eval(), batch=1)


def training_flops(model: nn.Module) -> float:
    """Count floating-point operations of a forward and a backward for one image; a multiply-add counts as two.

    A backward costs twice a forward, without the gradient of the images. Every expert computes all rows of its
    capacity, used or not, as in V-MoE's implementation. The model is on the meta device and ends frozen.
    """
    cost = _forward_cost(model.train(), batch=64)  # large enough that the rounding of capacities does not matter
    return 2 * (3 * cost.macs - cost.convolution)


def _forward_cost(model: nn.Module, batch: int) -> Cost:
    normed: list[int] = []
    model.requires_grad_(False)  # FlopCounterMode fails on views of parameters between modules (PiT's class token)
    with ExitStack() as hooks, FlopCounterMode(display=False) as counter, torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                count = module.register_forward_hook(lambda _module, _inputs, output: normed.append(output.numel()))
                hooks.callback(count.remove)
        model(torch.empty(batch, *model_input_size(model), device="meta"))
    macs = {"convolution": 0.0, "linear": 0.0, "attention": 0.0}
    for operator, flops in counter.get_flop_counts()["Global"].items():
        name = str(operator)
        attends = "bmm" in name or "scaled_dot_product" in name
        kind = "convolution" if "convolution" in name else "attention" if attends else "linear"
        macs[kind] += flops / 2 / batch
    return Cost(**macs, norm=sum(normed) / batch)
