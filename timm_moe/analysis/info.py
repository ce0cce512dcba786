"""Sizes and cost of a model: all parameters, those that a token passes through, operations."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..console import in_layers
from ..convert.dense import to_dense
from ..convert.expert_layers import (
    activated_parameters,
    moe_layers,
    numbers_of_experts,
    parameters,
)
from ..convert.find import ffn_paths
from ..layers.router import Router
from ..model_config import model_input_size, preprocessing
from ..models.mixin import StockForm
from ..models.registered import check_registered, weightless_model

#: Of a number in float32.
BYTES = 4


def byte_text(number: float) -> str:
    """Write a number of bytes in GB, MB or kB, powers of ten."""
    if number < 1e6:
        return f"{number / 1e3:.0f} kB"
    if number < 1e7:
        return f"{number / 1e6:.1f} MB"
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.0f} MB"


def _short(giga: float, unit: str) -> str:
    """Write a number of billions with its unit; of millions where it is below a tenth."""
    if giga < 0.1:
        return f"{1000 * giga:.3g} M{unit}"
    return f"{giga:.3f} G{unit}" if giga >= 1 else f"{giga:.3g} G{unit}"


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a model, with experts or without."""

    name: str
    moe_layers: list[str]
    blocks: int  #: number of blocks that could hold an expert layer; in WideNet all share one
    #: experts in each layer, as "4", or "4/8" if layers differ; empty, as the next, without any
    num_experts: str
    #: experts that a token passes through in each layer in training, or the most, or their mean,
    #: as "2", "1/2", "1.5 on average" or "up to 4"
    experts_of_row: str
    routing_unit: str  #: of the first layer: "token" or "image"
    members: int  #: members of the ensemble inside the model; each routes its own tokens
    total: int  #: parameters in training
    #: parameters that one token passes through in training; a layer that blocks share is counted as
    #: one block uses it
    activated: int
    #: parameters of the dense model; None without experts, or if they stay routed in evaluation
    exported: int | None
    #: floating-point operations to evaluate one image, in 10^9; a multiply-add counts as two
    #: (timm's GMACs are half); routed experts take every token K times
    gflops: float
    input_size: tuple[int, ...]  #: (channels, height, width) of that image
    #: of a registered name: the registered dense model that, with the same options, differs in the
    #: experts alone, not in image size or preprocessing; None if there is none
    dense_twin: str | None = None

    def rows(self) -> dict[str, str]:
        """Write the sizes, by labels to show."""
        return {
            "input": "x".join(str(size) for size in self.input_size),
            "experts": self._experts(),
            **({"expert layers": ", ".join(self.moe_layers)} if self.moe_layers else {}),
            **({"dense twin": self.dense_twin} if self.dense_twin else {}),
            "parameters, training": f"{self.total:,}",
            "parameters, activated": f"{self.activated:,} per token",
            **({} if self.exported is None else {"parameters, exported": f"{self.exported:,}"}),
            "evaluation": f"{_short(self.gflops, 'FLOPs')} per image "
            f"({_short(self.gflops / 2, 'MACs')})",
        }

    def memory_rows(self) -> dict[str, str]:
        """Return what training by AdamW in float32 holds in memory and in a file, by label."""
        weights = BYTES * self.total
        exported = BYTES * (self.total if self.exported is None else self.exported)
        return {
            "weights, training": byte_text(weights),
            "gradients": byte_text(weights),
            "AdamW's moments": byte_text(2 * weights),
            "train.py's checkpoint": byte_text(3 * weights),
            "exported file": byte_text(exported),
        }

    def _experts(self) -> str:
        if not self.moe_layers:
            return "none"
        layers = in_layers(len(self.moe_layers))
        text = f"{self.num_experts} {layers}, the model has {self.blocks} blocks"
        if self.exported is not None:  # a token goes to one expert, no matter to which
            return text
        if self.members > 1:
            return f"{text}; {self.members} members, a token of each takes {self.experts_of_row}"
        unit = "an image" if self.routing_unit == "image" else "a token"
        return f"{text}, {unit} takes {self.experts_of_row}"


@dataclass(frozen=True)
class Cost:
    """Multiply-adds of a forward for one image, and the number of outputs of its layer norms."""

    macs: float
    convolution: float  #: the part in convolutions
    attention: float  #: the part in attention's two products
    norm: float


def model_info(name: str, **kwargs: Any) -> ModelInfo:
    """Measure a registered model without allocating its weights.

    Raises:
        ValueError: if there is no such model.
    """
    check_registered(name)
    model = weightless_model(name, **kwargs)
    twin = _dense_twin(model, name, kwargs)
    return replace(measure(model, name), dense_twin=twin)


def measure(model: nn.Module, name: str) -> ModelInfo:
    """Measure a model on the meta device, with experts or without; the model is changed."""
    layers = list(moe_layers(model).values())
    deployed_as_mean = bool(layers) and all(layer.deploys_dense for layer in layers)
    deployed = to_dense(model) if deployed_as_mean else model
    return ModelInfo(
        name=name,
        moe_layers=list(moe_layers(model)),
        blocks=len(ffn_places(model)),
        num_experts=numbers_of_experts(layers),
        experts_of_row=_experts_of_row([layer.router for layer in layers]),
        routing_unit=layers[0].router.routing_unit if layers else "token",
        members=getattr(model, "ensemble_size", 1),
        total=parameters(model),
        activated=activated_parameters(model),
        exported=parameters(deployed) if deployed_as_mean else None,
        gflops=2 * evaluation_cost(deployed).macs / 1e9,
        input_size=model_input_size(model),
    )


def ffn_places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List all places of feed-forward networks, in order; of one in several blocks all of them."""
    networks = {model.get_submodule(path) for path in ffn_paths(model)}
    modules = model.named_modules(remove_duplicate=False)
    return [(path, module) for path, module in modules if module in networks]


def _experts_of_row(routers: Sequence[Router]) -> str:
    """Write the different numbers of experts that a token passes through in routers' layers."""
    numbers: list[str] = []
    for number, varies in sorted({(each.experts_of_row(), each.number_varies) for each in routers}):
        if varies:
            numbers.append(f"up to {number}")
        else:
            numbers.append(f"{number:g}" if number % 1 == 0 else f"{number:g} on average")
    return "/".join(numbers)


def _dense_twin(model: nn.Module, name: str, kwargs: dict[str, Any]) -> str | None:
    """Return the registered dense model that differs from a model of a name in the experts alone.

    It is made with the same options, but for those of the experts. None is returned if there is no
    such model.
    """
    architecture = name.partition(".")[0]
    form: StockForm | None = getattr(model, "stock_form", None)
    candidates = (architecture.removesuffix("_ewa_moe"), form and form.architecture)
    twins = [each for each in candidates if each and each != architecture and timm.is_model(each)]
    if not twins:
        return None
    twin: str = twins[0]
    of_both = {*(form.args if form else ())}
    options = {option: value for option, value in kwargs.items() if option in of_both}
    try:
        dense = weightless_model(twin, **{"num_classes": model.num_classes, **options})
    except TypeError:  # It has no such option, as pre_logits.
        return None
    own = {path: tuple(weight.shape) for path, weight in model.state_dict().items()}
    for path, weight in dense.state_dict().items():
        shape = own.get(path)
        if shape is None or shape[len(shape) - weight.ndim :] != tuple(weight.shape):
            return None
    return twin if preprocessing(dense) == preprocessing(model) else None


def activation_bytes(model: nn.Module, batch: int) -> int:
    """Count the bytes that the forward of a training step keeps for its backward.

    The model has its weights in memory; it is put into training mode and run once on random images
    in its weights' precision. A GPU may keep others: it pads experts to equally many rows.
    """
    weight = next(model.parameters())
    images = torch.randn(batch, *model_input_size(model)).to(weight)
    return saved_bytes(model.train(), images)


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Count the bytes that a forward keeps for its backward.

    Each storage counts once, and parameters do not count.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is reused

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = module(x)
    number = sum(
        tensor.untyped_storage().nbytes()
        for place, tensor in kept.items()
        if place not in parameters
    )
    del outputs
    return number


def evaluation_cost(model: nn.Module) -> Cost:
    """Measure the cost of evaluating one image on the meta device.

    Routed experts take every token K times.
    """
    with ExitStack() as stack:
        for layer in moe_layers(model).values():
            stack.enter_context(layer.router.dropping_nothing())
        return forward_cost(model.eval(), batch=1)


def forward_cost(model: nn.Module, batch: int) -> Cost:
    """Measure the cost of one image of a batch on the meta device.

    The model stays in its mode, and its weights end frozen.
    """
    # FlopCounterMode fails on views of parameters between modules (PiT's class token).
    model.requires_grad_(False)
    norms = {torch.ops.aten.native_layer_norm: lambda *_, out_shape, **__: math.prod(out_shape[0])}
    with FlopCounterMode(display=False, custom_mapping=norms) as counter, torch.no_grad():
        model(torch.empty(batch, *model_input_size(model), device="meta"))
    counts = {
        str(operator): number / batch
        for operator, number in counter.get_flop_counts()["Global"].items()
    }
    norm = counts.pop("aten.native_layer_norm", 0)

    def macs(*operators: str) -> float:
        """Count the multiply-adds of operators with one of these words in their names."""
        return sum(
            flops / 2 for name, flops in counts.items() if any(part in name for part in operators)
        )

    return Cost(
        macs=sum(counts.values()) / 2,
        convolution=macs("convolution"),
        attention=macs("bmm", "scaled_dot_product"),
        norm=norm,
    )
