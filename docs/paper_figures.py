"""The sizes and costs that the papers print, beside measurements of the models.

The printed ones are in paper_figures.tsv.
"""

import csv
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from timm.utils import ParseKwargs
from torch import nn

from timm_moe.analysis.info import evaluation_cost, forward_cost
from timm_moe.convert.expert_layers import (
    activated_parameters,
    moe_layers,
    parameters,
    parameters_of_an_expert,
)
from timm_moe.models.publications import PUBLICATIONS
from timm_moe.models.registered import weightless_model

#: The papers whose figures are measured here, in the order of the page, with their arXiv numbers.
PAPERS = {
    name: PUBLICATIONS[name].arxiv
    for name in ("EWA", "WideNet", "OneS", "ViMoE", "Soft MoE", "pBE")
}


@dataclass(frozen=True)
class Figure:
    """A number that a paper prints about a model."""

    paper: str  #: a key of :data:`PAPERS`
    where: str  #: the place in it
    model: str  #: registered name
    quantity: str  #: the size or cost that it is, with its unit
    printed: str | None  #: the number as printed; None if the copy at hand is not legible
    #: arguments of ``timm.create_model`` for the paper's model
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""  #: explains another number of the model
    floor: bool = False  #: the paper cuts digits off instead of rounding

    @property
    def label(self) -> str:
        """Name the model and its options, written as after ``--model-kwargs``."""
        return " ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])

    def measure(self) -> float:
        """Measure the model."""
        return _measured(self.quantity, self.model, self.options)

    def agrees(self, value: float) -> bool:
        """Tell whether a value with the printed digits is the paper's number."""
        if self.printed is None:
            return False
        unit = 10.0 ** -len(self.printed.partition(".")[2])
        difference = value - float(self.printed)
        return 0 <= difference < unit if self.floor else abs(difference) <= unit / 2

    def why(self, value: float) -> str:
        """Explain a value that is not the paper's number."""
        return "" if self.agrees(value) else self.reason


def router_parameters(model: nn.Module) -> int:
    return sum(parameters(layer.router) for layer in moe_layers(model).values())


def training_flops(model: nn.Module) -> float:
    """Count the floating-point operations of a forward and a backward for one image.

    A multiply-add counts as two.

    A backward costs twice a forward, without the gradient of the images. Every expert computes all
    rows of its capacity, used or not, as in V-MoE's implementation. The model is on the meta device
    and ends frozen.
    """
    # The batch is so large that the rounding of capacities does not matter.
    cost = forward_cost(model.train(), batch=64)
    return 2 * (3 * cost.macs - cost.convolution)


def _dense_parameters(model: nn.Module) -> int:
    return activated_parameters(model, experts=1) - router_parameters(model)


def _gmacs(model: nn.Module, attention: bool = True) -> float:
    cost = evaluation_cost(model)
    return (cost.macs - (0 if attention else cost.attention) + 5 * cost.norm) / 1e9


def _routers(model: nn.Module) -> list[Any]:
    return [layer.router for layer in moe_layers(model).values()]


def _reached(model: nn.Module, experts: float) -> float:
    """Count the parameters, in millions, that the tokens of an image reach.

    On average they reach so many routed experts in all layers.
    """
    layers = list(moe_layers(model).values())
    idle = sum(layer.num_experts for layer in layers) - experts
    return (
        parameters(model) - router_parameters(model) - idle * parameters_of_an_expert(layers[0])
    ) / 1e6


@cache
def _training_cost(name: str, **options: Any) -> float:
    return training_flops(weightless_model(name, **options)) / 2**30


#: Measurements of a module, which they may change.
_OF_MODULE: dict[str, Callable[[Any], float]] = {
    "parameters (M)": lambda model: parameters(model) / 1e6,
    "parameters (10^9)": lambda model: parameters(model) / 1e9,
    "activated parameters (M)": lambda model: (
        (activated_parameters(model) - router_parameters(model)) / 1e6
    ),
    "parameters of the dense model (M)": lambda model: _dense_parameters(model) / 1e6,
    "parameters / the dense model's": lambda model: parameters(model) / _dense_parameters(model),
    "MACs (G)": _gmacs,
    "GFLOPs": lambda model: 2 * evaluation_cost(model).macs / 1e9,
    "MACs (G) without attention's products": partial(_gmacs, attention=False),
    "MACs (G) with ADE20K's classifier": lambda model: (
        _gmacs(model) + 150 * model.embed_dim * model.patch_embed.num_patches / 1e9
    ),
    "ways through the experts": lambda model: math.prod(
        router.routing_degree() for router in _routers(model)
    ),
    "FFN cost / the dense model's": lambda model: (
        _routers(model)[0].top_k * _routers(model)[0].capacity_factor
    ),
}


def _measured(quantity: str, name: str, options: dict[str, Any]) -> float:
    """Measure a quantity of a registered model with options of ``timm.create_model``."""
    if quantity == "training cost (2^30 operations)":
        return _training_cost(name, **options)
    if over := re.fullmatch(r"training cost over (\d) (\w+) \(%\)", quantity):
        others = int(over[1]) * _training_cost(over[2], **options)
        return 100 * (_training_cost(name, **options) / others - 1)
    model = weightless_model(name, **options)
    if reached := re.fullmatch(
        r"activated parameters \(M\), (.+) routed experts reached", quantity
    ):
        return _reached(model, float(reached[1]))
    return _OF_MODULE[quantity](model)


def _figure(row: dict[str, str]) -> Figure:
    """Make a figure of a row of paper_figures.tsv."""
    stated, printed = Namespace(), row["printed"]
    ParseKwargs(["--"], "options")(ArgumentParser(), stated, row["options"].split())
    return Figure(
        *(row["paper"], row["where"], row["model"], row["quantity"]),
        printed=printed.removesuffix("…") or None,
        options=stated.options,
        reason=row["reason"],
        floor=printed.endswith("…"),
    )


def _figures() -> list[Figure]:
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader((line for line in lines if line[0] != "#"), restval="", delimiter="\t")
    return [_figure(row) for row in rows]


#: All figures, in the order of the page.
FIGURES = _figures()


def number_text(value: float) -> str:
    """Write a number as the documentation does."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
