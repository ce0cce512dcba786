"""The sizes and costs that the papers print, beside measurements of the models."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

from torch import nn

from ..convert.blocks import moe_layers
from ..info import (
    activated_parameters,
    evaluation_cost,
    parameters,
    parameters_of_an_expert,
    router_parameters,
    training_flops,
    weightless_model,
)
from ..models.publications import PUBLICATIONS
from ..models.registration import SIZES

#: The papers whose figures are measured here, in the order of the page, with their arXiv numbers.
PAPERS = {name: PUBLICATIONS[name].arxiv for name in ("EWA", "WideNet", "OneS", "ViMoE", "Soft MoE", "pBE")}


@dataclass(frozen=True)
class Quantity:
    """A size or cost of a model."""

    name: str  #: with its unit
    measure: Callable[..., float]  #: takes the registered name of a model and arguments of ``timm.create_model``


@dataclass(frozen=True)
class Figure:
    """A number that a paper prints about a model."""

    paper: str  #: a key of :data:`PAPERS`
    where: str  #: the place in it
    model: str  #: registered name
    quantity: Quantity
    printed: str | None  #: the number as printed; None if the copy at hand is not legible
    options: dict[str, Any] = field(default_factory=dict)  #: arguments of ``timm.create_model`` for the paper's model
    reason: str = ""  #: explains another number of the model
    floor: bool = False  #: the paper cuts digits off instead of rounding

    @property
    def label(self) -> str:
        """Name the model and its options, written as after ``--model-kwargs``."""
        return " ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])

    def measure(self) -> float:
        """Measure the model."""
        return self.quantity.measure(self.model, **self.options)

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


def _of_module(name: str, measure: Callable[[Any], float]) -> Quantity:
    """Make a quantity from a function of the module, which may change it."""
    return Quantity(name, lambda model, **options: measure(weightless_model(model, **options)))


def _dense_parameters(model: nn.Module) -> int:
    return activated_parameters(model, experts=1) - router_parameters(model)


def _gmacs(model: nn.Module, attention: bool = True) -> float:
    cost = evaluation_cost(model)
    return (cost.macs - (0 if attention else cost.attention) + 5 * cost.norm) / 1e9


def _routers(model: nn.Module) -> list[Any]:
    return [layer.router for layer in moe_layers(model).values()]


@cache
def _training_cost(name: str, **options: Any) -> float:
    return training_flops(weightless_model(name, **options)) / 2**30


def _against(reference: str, copies: int) -> Quantity:
    """Compare training cost with one or more copies of another model with the same options."""

    def measure(name: str, **options: Any) -> float:
        return 100 * (_training_cost(name, **options) / (copies * _training_cost(reference, **options)) - 1)

    return Quantity(f"training cost over {copies} {reference} (%)", measure)


def _reached(experts: float) -> Quantity:
    """Count parameters for an image whose tokens reach so many routed experts in all layers, on average."""

    def measure(model: nn.Module) -> float:
        layers = list(moe_layers(model).values())
        idle = sum(layer.num_experts for layer in layers) - experts
        return (parameters(model) - router_parameters(model) - idle * parameters_of_an_expert(layers[0])) / 1e6

    return _of_module(f"activated parameters (M), {experts} routed experts reached", measure)


PARAMETERS = _of_module("parameters (M)", lambda model: parameters(model) / 1e6)
BILLIONS = _of_module("parameters (10^9)", lambda model: parameters(model) / 1e9)
ACTIVATED = _of_module(
    "activated parameters (M)", lambda model: (activated_parameters(model) - router_parameters(model)) / 1e6
)
DENSE = _of_module("parameters of the dense model (M)", lambda model: _dense_parameters(model) / 1e6)
RATIO = _of_module("parameters / the dense model's", lambda model: parameters(model) / _dense_parameters(model))
MACS = _of_module("MACs (G)", _gmacs)
GFLOPS = _of_module("GFLOPs", lambda model: 2 * evaluation_cost(model).macs / 1e9)
LINEAR_MACS = _of_module("MACs (G) without attention's products", lambda model: _gmacs(model, attention=False))
SEGMENTATION_MACS = _of_module(
    "MACs (G) with ADE20K's classifier",
    lambda model: _gmacs(model) + 150 * model.embed_dim * model.patch_embed.num_patches / 1e9,
)
TRAINING = Quantity("training cost (2^30 operations)", _training_cost)
ROUTES = _of_module(
    "ways through the experts", lambda model: math.prod(router.routing_degree() for router in _routers(model))
)
PLACES = _of_module(
    "FFN cost / the dense model's", lambda model: _routers(model)[0].top_k * _routers(model)[0].capacity_factor
)


def _widenet_and_ones() -> Iterator[Figure]:
    official = dict(official_compat=True)  # the positions and layers that the papers' counts include
    no_experts: dict[str, Any] = {**official, "num_experts": 0}
    for size, experts, dense in [("b", "29", "9"), ("l", "40", "15"), ("h", "63", "23")]:
        # with the ratio of its experts, the dense WideNet-B would have 10
        dense_options = {**no_experts, "mlp_ratio": 4} if size == "b" else no_experts
        for where, printed, options in [
            ("tables 1, 3", experts, official),
            ("table 3", experts, {**official, "shared_norm": True}),
            ("table 3", dense, dense_options),
        ]:
            yield Figure("WideNet", where, f"widenet_{size}", PARAMETERS, printed, options, floor=True)
    deep, wide = {**official, "depth": 12}, {**no_experts, "mlp_ratio": 8}
    for printed, options in [("40", deep), ("15", no_experts), ("24", wide)]:
        yield Figure("WideNet", "table 4", "widenet_l", PARAMETERS, printed, options, floor=True)
    cifar = {**official, "pre_logits": False, "num_classes": 10}
    reason = "28.3 by the count that all other models of the table fit but ViT-L"
    yield Figure("WideNet", "table 5", "widenet_b", PARAMETERS, "27", cifar, reason, floor=True)
    yield Figure("WideNet", "table 5", "widenet_l", PARAMETERS, "38", cifar, floor=True)
    for model, printed in (("ones_b", "10"), ("ones_l", "15")):
        yield Figure("OneS", "table 1", model, PARAMETERS, printed, official, floor=True)
    yield Figure("OneS", "table 2", "widenet_b", PLACES, "2.4")


def _vimoe_options(experts: int, blocks: int) -> dict[str, Any]:
    return {} if (experts, blocks) == (8, 2) else dict(num_experts=experts, moe_layers=f"tail-{blocks}")


def _vimoe() -> Iterator[Figure]:
    for experts, blocks, shared, total, activated in [
        *((2, 5, False, "27.9", "22.0"), (2, 5, True, "33.8", "27.9"), (2, 12, True, "50.4", "36.2")),
        *((4, 3, False, "32.7", "22.0"), (4, 3, True, "36.2", "25.6"), (4, 12, True, "78.8", "36.2")),
        *((8, 2, False, "38.6", "22.0"), (8, 2, True, "40.9", "24.4"), (8, 12, True, "135.5", "36.2")),
    ]:
        model = "vimoe_s14_shared" if shared else "vimoe_s14"
        options = _vimoe_options(experts, blocks)
        reason = "rounds to 78.7: 0.003 M are missing" if total == "78.8" else ""
        yield Figure("ViMoE", "table 1", model, PARAMETERS, total, options, reason)
        yield Figure("ViMoE", "table 1", model, ACTIVATED, activated, options)
    yield Figure("ViMoE", "tables 1, 6", "vimoe_s14", MACS, "6.14")
    for experts, blocks, gmacs in [(8, 2, "6.74"), (4, 3, "7.05"), (2, 5, "7.65"), (8, 12, "9.77")]:
        yield Figure("ViMoE", "tables 1, 6", "vimoe_s14_shared", MACS, gmacs, _vimoe_options(experts, blocks))
    unlike = "the paper leaves attention's products out of this row, not of B/16, S/14 and B/14"
    for model, quantity, printed, reason in [
        ("vimoe_b14", MACS, "23.19", ""),
        ("vimoe_b14_shared", MACS, "25.61", ""),
        ("vimoe_b14", DENSE, "86.5", ""),
        ("vimoe_b14_shared", ACTIVATED, "95.9", ""),
        ("vit_small_patch16_224", MACS, "4.25", unlike),
        ("vit_small_patch16_224", LINEAR_MACS, "4.25", ""),
        ("vit_base_patch16_224", MACS, "17.58", ""),
        ("vit_large_patch16_224", LINEAR_MACS, "59.70", ""),
    ]:
        yield Figure("ViMoE", "table 3", model, quantity, printed, reason=reason)
    image = dict(img_size=518, num_classes=0)  # 512 pixels give 37 x 37 patches there, as 518 here
    yield Figure("ViMoE", "table 4", "vit_small_patch14_dinov2", SEGMENTATION_MACS, "47", image)
    options = {**image, "routing_unit": "token", "moe_layers": "tail-1"}
    reason = "with moe_layers=tail-2 it is 50.1: the model may have had experts in two blocks"
    yield Figure("ViMoE", "table 4", "vimoe_s14_shared", SEGMENTATION_MACS, "50", options, reason)
    reached_experts = [(8, 2, 14.3, "38.9"), (4, 3, 11.4, "35.5"), (2, 5, 9.8, "33.6"), (8, 12, 93.6, "132.6")]
    for experts, blocks, reached, activated in reached_experts:
        options = {"routing_unit": "token", **_vimoe_options(experts, blocks)}
        yield Figure("ViMoE", "table 5", "vimoe_s14_shared", _reached(reached), activated, options)
    for experts, blocks, degree in [(2, 5, "32"), (4, 3, "64"), (8, 2, "64")]:
        yield Figure("ViMoE", "section 4.2", "vimoe_s14", ROUTES, degree, _vimoe_options(experts, blocks))


def _soft_moe() -> Iterator[Figure]:
    jft = dict(num_classes=29593)
    for size, quantity, printed, gflops, reason in [
        ("s16", PARAMETERS, "933", "8.6", ""),
        ("s14", BILLIONS, "1.8", "13.2", "0.6 % below"),
        ("b16", BILLIONS, "3.7", "32.0", "0.5 % below"),
        ("l16", BILLIONS, "13.1", "111.1", "0.4 % below"),
        ("h14", BILLIONS, "54.1", "342.4", "0.3 % below"),
    ]:
        yield Figure("Soft MoE", "table 8", f"soft_moe_{size}", quantity, printed, jft, floor=True)
        yield Figure("Soft MoE", "table 8", f"soft_moe_{size}", GFLOPS, gflops, jft, reason)


#: Options of the models of pre-training (JFT has 18,291 classes), and of fine-tuning.
_UPSTREAM, _DOWNSTREAM = dict(num_classes=18291, pre_logits=True), dict(img_size=384, capacity_factor=1.5)


def _pbe() -> Iterator[Figure]:
    for size in ("s32", "b32", "b16", "l32", "l16", "h14"):
        dense, sparse = ("102.1", "395.0") if size == "b32" else (None, None)  # the others are not legible
        yield Figure("pBE", "table 26", f"vmoe_{size}", DENSE, dense, _UPSTREAM)
        yield Figure("pBE", "table 26", f"vmoe_{size}", PARAMETERS, sparse, _UPSTREAM)
        yield Figure("pBE", "table 26", f"vmoe_pbe_{size}", PARAMETERS, sparse, _UPSTREAM)
    yield Figure("pBE", "abstract", "vmoe_pbe_h14", BILLIONS, "2.7", _UPSTREAM)
    reason = "5 % below; the paper does not say which operations count"
    for members, printed in ((2, "94.8"), (4, "132.1")):
        options = dict(img_size=384, ensemble_size=members)
        yield Figure("pBE", "table 9", "vit_be_b32", TRAINING, printed, options, reason)
    for members, repetitions, printed in ((2, 1, "90.2"), (4, 1, "92.8"), (2, 2, "180.3"), (4, 2, "185.4")):
        options = dict(img_size=384, ensemble_size=members, batch_repetitions=repetitions)
        yield Figure("pBE", "table 9", "vmoe_mimo_b32", TRAINING, printed, options, "1.4 % below")
    yield from _pbe_table_11()
    top_1, apart = {**_DOWNSTREAM, "top_k": 1}, "less than 0.6 points apart"
    for size, vmoe, ensemble in [
        *(("s32", "40.88", "-29.56"), ("b32", "28.51", "-35.75"), ("b16", "28.66", "-35.67")),
        *(("l32", "14.99", "-42.50"), ("l16", "14.76", "-42.62"), ("h14", "31.91", "-34.05")),
    ]:
        for copies, printed in ((1, vmoe), (2, ensemble)):
            against = _against(f"vmoe_{size}", copies)
            yield Figure("pBE", "table 12", f"vmoe_pbe_{size}", against, printed, top_1, apart)
    reason = "the costs of the paper's table 11 give -39.7"
    top_2 = {**_DOWNSTREAM, "top_k": 2}
    yield Figure("pBE", "section 4.1", "vmoe_pbe_l16", _against("vmoe_l16", 2), "-47", top_2, reason)


def _pbe_table_11() -> Iterator[Figure]:
    for size, vit, options, dense, top_1, top_2, pbe in [
        ("s32", "vit_small_patch32_224", SIZES["vmoe_small"], "22.32", "23.22", "28.23", "32.71"),
        ("b32", "vit_base_patch32_224", {}, "72.46", "73.55", "84.74", "94.51"),
        ("b16", "vit_base_patch16_224", {}, "310.67", "313.95", "358.70", "403.92"),
        ("l32", "vit_large_patch32_224", {}, "252.61", "249.70", "269.51", "287.14"),
        ("l16", "vit_large_patch16_224", {}, "1069.53", "1055.14", "1134.41", "1210.91"),
        ("h14", "vit_huge_patch14_224", {}, "2962.57", "3008.02", "3436.74", "3967.77"),
    ]:
        reason = "5 % below" if size == "h14" else "up to 0.6 % below"
        moe_reason = "2 to 3 % below" if size == "h14" else "3 to 4 % above"
        yield Figure("pBE", "table 11", vit, TRAINING, dense, {**options, "img_size": 384}, reason)
        for model, printed, top_k in [("vmoe", top_1, 1), ("vmoe", top_2, 2), ("vmoe_pbe", pbe, 1)]:
            routed = {**_DOWNSTREAM, "top_k": top_k}
            yield Figure("pBE", "table 11", f"{model}_{size}", TRAINING, printed, routed, moe_reason)


#: All figures, in the order of the page.
FIGURES: list[Figure] = [
    Figure("EWA", "table 1", "vit_small_moe", RATIO, "3.25", dict(num_experts=8)),
    *_widenet_and_ones(),
    *_vimoe(),
    *_soft_moe(),
    *_pbe(),
]


def comparisons(model: str) -> Iterator[tuple[str, str]]:
    """Compare a registered model with what the papers print about it: labels and texts for ``timm-moe info``."""
    name = model.partition(".")[0]
    figures = [figure for figure in FIGURES if figure.model == name]
    if not figures:
        yield "paper", "prints neither size nor cost of this model"
    for paper, of_paper in groupby(figures, key=lambda figure: figure.paper):
        yield "paper", f"{paper}, arXiv {PAPERS[paper]}"
        for figure in of_paper:
            value = figure.measure()
            options = figure.label.removeprefix(name)
            text = f"{figure.quantity.name}: {figure.printed or 'not legible'}, here {number_text(value)}"
            text += f" with{options}" if options else ""
            yield f"  {figure.where}", text + (f"; {figure.why(value)}" if figure.why(value) else "")


def number_text(value: float) -> str:
    """Write a number as the documentation does."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
