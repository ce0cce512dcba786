"""The size and cost of the models as the papers print them, and the same measured on the models.

``python -m timm_moe.papers.papers > docs/generated/papers.md`` writes the page of all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

from torch import nn

from ..convert.blocks import moe_layers
from ..info import (
    activated_parameters,
    evaluation_cost,
    is_named_after_stock,
    model_info,
    parameters,
    parameters_of_an_expert,
    registered_models,
    router_parameters,
    training_flops,
    weightless_model,
)
from ..models.publications import PUBLICATIONS

#: Those whose figures are measured here, in the order of the page, with their arXiv numbers.
PAPERS = {name: PUBLICATIONS[name].arxiv for name in ("EWA", "WideNet", "OneS", "ViMoE", "pBE")}


@dataclass(frozen=True)
class Quantity:
    """Something to measure on a model.

    Attributes:
        name: what it is, with its unit.
        measure: takes the registered name of a model and arguments of ``timm.create_model``.
    """

    name: str
    measure: Callable[..., float]


@dataclass(frozen=True)
class Figure:
    """A number that a paper prints about a model.

    Attributes:
        paper: a key of :data:`PAPERS`.
        where: the place in it.
        model: registered name.
        quantity: what the number says.
        printed: the number as printed, or None where it is not legible in the copy at hand.
        options: arguments of ``timm.create_model`` that make the paper's model.
        reason: why the model has another number, where it has.
        floor: the digits that are not printed are cut off, not rounded.
    """

    paper: str
    where: str
    model: str
    quantity: Quantity
    printed: str | None
    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    floor: bool = False

    @property
    def label(self) -> str:
        """The model and its options, written as after ``--model-kwargs``."""
        return " ".join([self.model, *(f"{name}={value}" for name, value in self.options.items())])

    def measure(self) -> float:
        """The number that the model has."""
        return self.quantity.measure(self.model, **self.options)

    def agrees(self, value: float) -> bool:
        """Whether ``value`` with the printed digits is what the paper prints."""
        if self.printed is None:
            return False
        unit = 10.0 ** -len(self.printed.partition(".")[2])
        difference = value - float(self.printed)
        return 0 <= difference < unit if self.floor else abs(difference) <= unit / 2


def _on_module(measure: Callable[[Any], float]) -> Callable[..., float]:
    """A :attr:`Quantity.measure` from a function of the module, which may change it."""
    return lambda name, **options: measure(weightless_model(name, **options))


def _dense_parameters(model: nn.Module) -> int:
    return activated_parameters(model, experts=1) - router_parameters(model)


def _gmacs(model: nn.Module, attention: bool = True) -> float:
    cost = evaluation_cost(model)
    return (cost.macs - (0 if attention else cost.attention) + 5 * cost.norm) / 1e9


def _segmentation_gmacs(model: Any) -> float:
    return _gmacs(model) + 150 * model.embed_dim * model.patch_embed.num_patches / 1e9


def _routes(model: nn.Module) -> int:
    return math.prod(router.routing_degree() for router in _routers(model))


def _places(model: nn.Module) -> float:
    router = _routers(model)[0]
    return router.top_k * router.capacity_factor


def _routers(model: nn.Module) -> list[Any]:
    return [layer.router for layer in moe_layers(model).values()]


@cache
def _training_cost(name: str, **options: Any) -> float:
    return training_flops(weightless_model(name, **options)) / 2**30


def _against(reference: str, copies: int = 1) -> Quantity:
    """Training cost over that of one or more copies of another model with the same options."""

    def measure(name: str, **options: Any) -> float:
        return 100 * (_training_cost(name, **options) / (copies * _training_cost(reference, **options)) - 1)

    return Quantity(f"training cost over {copies} {reference} (%)", measure)


def _reached(experts: float) -> Quantity:
    """Parameters for an image whose tokens reach so many routed experts, counted over all layers (a mean)."""

    def measure(model: nn.Module) -> float:
        layers = list(moe_layers(model).values())
        idle = sum(layer.num_experts for layer in layers) - experts
        return (parameters(model) - router_parameters(model) - idle * parameters_of_an_expert(layers[0])) / 1e6

    return Quantity(f"activated parameters (M), {experts} routed experts reached", _on_module(measure))


PARAMETERS = Quantity("parameters (M)", _on_module(lambda model: parameters(model) / 1e6))
BILLIONS = Quantity("parameters (10^9)", _on_module(lambda model: parameters(model) / 1e9))
ACTIVATED = Quantity(
    "activated parameters (M)", _on_module(lambda model: (activated_parameters(model) - router_parameters(model)) / 1e6)
)
DENSE = Quantity("parameters of the dense model (M)", _on_module(lambda model: _dense_parameters(model) / 1e6))
RATIO = Quantity(
    "parameters / the dense model's", _on_module(lambda model: parameters(model) / _dense_parameters(model))
)
MACS = Quantity("MACs (G)", _on_module(_gmacs))
LINEAR_MACS = Quantity(
    "MACs (G) without attention's products", _on_module(lambda model: _gmacs(model, attention=False))
)
SEGMENTATION_MACS = Quantity("MACs (G) with ADE20K's classifier", _on_module(_segmentation_gmacs))
TRAINING = Quantity("training cost (2^30 operations)", _training_cost)
ROUTES = Quantity("ways through the experts", _on_module(_routes))
PLACES = Quantity("FFN cost / the dense model's", _on_module(_places))


#: The positions and layers that the paper's counts include.
_OFFICIAL = dict(official_compat=True)


def _widenet_tables_1_and_3() -> Iterator[Figure]:
    for model, experts, shared_norm, dense in [
        ("widenet_b", "29", "29", "9"),
        ("widenet_l", "40", "40", "15"),
        ("widenet_h", "63", "63", "23"),
    ]:
        width: dict[str, Any] = (
            {"mlp_ratio": 4} if model == "widenet_b" else {}
        )  # with that of its experts it would be 10
        for where, printed, options in [
            ("tables 1, 3", experts, {}),
            ("table 3", shared_norm, {"shared_norm": True}),
            ("table 3", dense, {"num_experts": 0, **width}),
        ]:
            yield Figure("WideNet", where, model, PARAMETERS, printed, {**_OFFICIAL, **options}, floor=True)


def _widenet_tables_4_and_5() -> Iterator[Figure]:
    for printed, options in [
        ("40", {"depth": 12}),
        ("15", {"num_experts": 0}),
        ("24", {"num_experts": 0, "mlp_ratio": 8}),
    ]:
        yield Figure("WideNet", "table 4", "widenet_l", PARAMETERS, printed, {**_OFFICIAL, **options}, floor=True)
    cifar = {**_OFFICIAL, "pre_logits": False, "num_classes": 10}
    reason = "28.3 by the count that all other models of the table fit but ViT-L"
    yield Figure("WideNet", "table 5", "widenet_b", PARAMETERS, "27", cifar, reason, floor=True)
    yield Figure("WideNet", "table 5", "widenet_l", PARAMETERS, "38", cifar, floor=True)


def _ones() -> Iterator[Figure]:
    for model, printed in (("ones_b", "10"), ("ones_l", "15")):
        yield Figure("OneS", "table 1", model, PARAMETERS, printed, _OFFICIAL, floor=True)
    yield Figure("OneS", "table 2", "widenet_b", PLACES, "2.4")


def _vimoe_options(experts: int, blocks: int) -> dict[str, Any]:
    registered = (experts, blocks) == (8, 2)
    return {} if registered else dict(num_experts=experts, moe_layers=f"tail-{blocks}")


def _vimoe_table_1() -> Iterator[Figure]:
    for experts, blocks, shared, total, activated in [
        (2, 5, False, "27.9", "22.0"),
        (2, 5, True, "33.8", "27.9"),
        (2, 12, True, "50.4", "36.2"),
        (4, 3, False, "32.7", "22.0"),
        (4, 3, True, "36.2", "25.6"),
        (4, 12, True, "78.8", "36.2"),
        (8, 2, False, "38.6", "22.0"),
        (8, 2, True, "40.9", "24.4"),
        (8, 12, True, "135.5", "36.2"),
    ]:
        model = "vimoe_s14_shared" if shared else "vimoe_s14"
        options = _vimoe_options(experts, blocks)
        reason = "rounds to 78.7: 0.003 M are missing" if total == "78.8" else ""
        yield Figure("ViMoE", "table 1", model, PARAMETERS, total, options, reason)
        yield Figure("ViMoE", "table 1", model, ACTIVATED, activated, options)


def _vimoe_tables_1_and_6() -> Iterator[Figure]:
    yield Figure("ViMoE", "tables 1, 6", "vimoe_s14", MACS, "6.14")
    for experts, blocks, gmacs in [(8, 2, "6.74"), (4, 3, "7.05"), (2, 5, "7.65"), (8, 12, "9.77")]:
        options = _vimoe_options(experts, blocks)
        yield Figure("ViMoE", "tables 1, 6", "vimoe_s14_shared", MACS, gmacs, options)


def _vimoe_table_3() -> Iterator[Figure]:
    yield Figure("ViMoE", "table 3", "vimoe_b14", MACS, "23.19")
    yield Figure("ViMoE", "table 3", "vimoe_b14_shared", MACS, "25.61")
    yield Figure("ViMoE", "table 3", "vimoe_b14", DENSE, "86.5")
    yield Figure("ViMoE", "table 3", "vimoe_b14_shared", ACTIVATED, "95.9")
    reason = "the paper leaves attention's products out of this row, not of B/16, S/14 and B/14"
    yield Figure("ViMoE", "table 3", "vit_small_patch16_224", MACS, "4.25", reason=reason)
    yield Figure("ViMoE", "table 3", "vit_small_patch16_224", LINEAR_MACS, "4.25")
    yield Figure("ViMoE", "table 3", "vit_base_patch16_224", MACS, "17.58")
    yield Figure("ViMoE", "table 3", "vit_large_patch16_224", LINEAR_MACS, "59.70")


def _vimoe_table_4() -> Iterator[Figure]:
    image = dict(img_size=518, num_classes=0)  # 512 pixels give 37 x 37 patches there, as 518 here
    yield Figure("ViMoE", "table 4", "vit_small_patch14_dinov2", SEGMENTATION_MACS, "47", image)
    options = {**image, "routing_unit": "token", "moe_layers": "tail-1"}
    reason = "with moe_layers=tail-2 it is 50.1: the model may have had experts in two blocks"
    yield Figure("ViMoE", "table 4", "vimoe_s14_shared", SEGMENTATION_MACS, "50", options, reason)


def _vimoe_table_5() -> Iterator[Figure]:
    for experts, blocks, reached, activated in [
        (8, 2, 14.3, "38.9"),
        (4, 3, 11.4, "35.5"),
        (2, 5, 9.8, "33.6"),
        (8, 12, 93.6, "132.6"),
    ]:
        options = {"routing_unit": "token", **_vimoe_options(experts, blocks)}
        yield Figure("ViMoE", "table 5", "vimoe_s14_shared", _reached(reached), activated, options)


def _vimoe_section_4_2() -> Iterator[Figure]:
    for experts, blocks, degree in [(2, 5, "32"), (4, 3, "64"), (8, 2, "64")]:
        options = _vimoe_options(experts, blocks)
        yield Figure("ViMoE", "section 4.2", "vimoe_s14", ROUTES, degree, options)


#: The models of pre-training: JFT has 18,291 classes.
_UPSTREAM = dict(num_classes=18291, pre_logits=True)
#: The models of fine-tuning.
_DOWNSTREAM = dict(img_size=384, capacity_factor=1.5)


def _pbe_table_26() -> Iterator[Figure]:
    legible = {"b32": ("102.1", "395.0")}
    for size in ("s32", "b32", "b16", "l32", "l16", "h14"):
        dense, sparse = legible.get(size, (None, None))
        yield Figure("pBE", "table 26", f"vmoe_{size}", DENSE, dense, _UPSTREAM)
        yield Figure("pBE", "table 26", f"vmoe_{size}", PARAMETERS, sparse, _UPSTREAM)
        yield Figure("pBE", "table 26", f"vmoe_pbe_{size}", PARAMETERS, sparse, _UPSTREAM)


def _pbe_table_11() -> Iterator[Figure]:
    vmoe_s = dict(embed_dim=512, depth=8, num_heads=8)  # which is not timm's ViT-S
    for size, vit, options, dense, top_1, top_2, pbe in [
        ("s32", "vit_small_patch32_224", vmoe_s, "22.32", "23.22", "28.23", "32.71"),
        ("b32", "vit_base_patch32_224", {}, "72.46", "73.55", "84.74", "94.51"),
        ("b16", "vit_base_patch16_224", {}, "310.67", "313.95", "358.70", "403.92"),
        ("l32", "vit_large_patch32_224", {}, "252.61", "249.70", "269.51", "287.14"),
        ("l16", "vit_large_patch16_224", {}, "1069.53", "1055.14", "1134.41", "1210.91"),
        ("h14", "vit_huge_patch14_224", {}, "2962.57", "3008.02", "3436.74", "3967.77"),
    ]:
        reason, moe_reason = "up to 0.6 % below", "3 to 4 % above"
        if size == "h14":
            reason, moe_reason = "5 % below", "2 to 3 % below"
        yield Figure("pBE", "table 11", vit, TRAINING, dense, {**options, "img_size": 384}, reason)
        for model, printed, top_k in [("vmoe", top_1, 1), ("vmoe", top_2, 2), ("vmoe_pbe", pbe, 1)]:
            routed = {**_DOWNSTREAM, "top_k": top_k}
            yield Figure("pBE", "table 11", f"{model}_{size}", TRAINING, printed, routed, moe_reason)


def _pbe_table_9() -> Iterator[Figure]:
    reason = "5 % below; the paper does not say which operations count"
    for members, printed in ((2, "94.8"), (4, "132.1")):
        options = dict(img_size=384, ensemble_size=members)
        yield Figure("pBE", "table 9", "vit_be_b32", TRAINING, printed, options, reason)
    for members, repetitions, printed in ((2, 1, "90.2"), (4, 1, "92.8"), (2, 2, "180.3"), (4, 2, "185.4")):
        options = dict(img_size=384, ensemble_size=members, batch_repetitions=repetitions)
        yield Figure("pBE", "table 9", "vmoe_mimo_b32", TRAINING, printed, options, "1.4 % below")


def _pbe_table_12() -> Iterator[Figure]:
    options = {**_DOWNSTREAM, "top_k": 1}
    for size, vmoe, ensemble in [
        ("s32", "40.88", "-29.56"),
        ("b32", "28.51", "-35.75"),
        ("b16", "28.66", "-35.67"),
        ("l32", "14.99", "-42.50"),
        ("l16", "14.76", "-42.62"),
        ("h14", "31.91", "-34.05"),
    ]:
        for copies, printed in ((1, vmoe), (2, ensemble)):
            quantity = _against(f"vmoe_{size}", copies)
            yield Figure(
                "pBE", "table 12", f"vmoe_pbe_{size}", quantity, printed, options, "less than 0.6 points apart"
            )


def _pbe_section_4_1() -> Iterator[Figure]:
    reason = "the costs of the paper's table 11 give -39.7"
    options = {**_DOWNSTREAM, "top_k": 2}
    yield Figure("pBE", "section 4.1", "vmoe_pbe_l16", _against("vmoe_l16", 2), "-47", options, reason)


#: All figures, in the order of the page.
FIGURES: list[Figure] = [
    Figure("EWA", "table 1", "vit_small_moe", RATIO, "3.25", dict(num_experts=8)),
    *_widenet_tables_1_and_3(),
    *_widenet_tables_4_and_5(),
    *_ones(),
    *_vimoe_table_1(),
    *_vimoe_tables_1_and_6(),
    *_vimoe_table_3(),
    *_vimoe_table_4(),
    *_vimoe_table_5(),
    *_vimoe_section_4_2(),
    *_pbe_table_26(),
    Figure("pBE", "abstract", "vmoe_pbe_h14", BILLIONS, "2.7", _UPSTREAM),
    *_pbe_table_9(),
    *_pbe_table_11(),
    *_pbe_table_12(),
    *_pbe_section_4_1(),
]


def comparisons(model: str) -> Iterator[tuple[str, str]]:
    """What the papers print about a model and what it has, as labels and texts for ``timm-moe info``.

    Args:
        model: registered name, perhaps with a pretrained tag.
    """
    name = model.partition(".")[0]
    figures = [figure for figure in FIGURES if figure.model == name]
    if not figures:
        yield "paper", "prints neither size nor cost of this model"
    for paper, of_paper in groupby(figures, key=lambda figure: figure.paper):
        yield "paper", f"{paper}, arXiv {PAPERS[paper]}"
        for figure in of_paper:
            value = figure.measure()
            options = figure.label.removeprefix(name)
            why = _why(figure, value)
            yield (
                f"  {figure.where}",
                f"{figure.quantity.name}: {figure.printed or 'not legible'}, here {_number(value)}"
                f"{f' with{options}' if options else ''}{f'; {why}' if why else ''}",
            )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


def _why(figure: Figure, value: float) -> str:
    return "" if figure.agrees(value) else figure.reason


_INTRODUCTION = """\
# The models beside their papers

What the papers print about the size and cost of the models, and what the models of this package have. This page is what
`python -m timm_moe.papers.papers` prints: it builds every model without its weights and measures it.
`timm-moe info MODEL` shows the rows of one model.

## The models as registered

*Parameters* are those in training, *activated* those that one token passes through, the routers included, *exported*
those of the dense model that comes out of training where the experts are not routed. *GFLOPs* are the operations of
evaluating one image: linear layers, convolutions and attention's two products, a multiply-add counted as two (timm's
GMACs are half of it).
"""

_LEGEND = """\
## What the papers print

*Model* is a registered name with the options that make it the paper's model, as `timm.create_model` and
`--model-kwargs` take them; a `vit_*_patch*` is timm's own, a dense model that the paper compares with. *Paper* is the
number as printed (some are not legible in the copy at hand), *here* is what the model has. If they still differ after
rounding to the printed digits (WideNet and OneS cut digits off instead), the last column says why, or how far if that
is not known. The quantities:

- *parameters*: all of the model in training. *Activated*: those that one token passes through, the routers not counted;
  where tokens are routed one by one, those that the tokens of one image pass through together, in so many routed
  experts, all layers taken together, as the paper measured on average. *The dense model's*: one network in place of
  the experts.
- *MACs*: of evaluating one image, counted as fvcore does: multiply-adds of linear layers, convolutions and attention's
  two products, and 5 for each number that a layer norm puts out. The paper calls them FLOPs. ADE20K's classifier is a
  linear layer from each patch to 150 classes.
- *training cost*: operations of a forward and a backward for one image, a multiply-add counted as two, in units of
  2^30. Experts compute as many rows as their capacity allows. The paper does not say how it counts; why its V-MoE costs
  less outside the experts than its ViT, and H/14 more than its size suggests, is not known.
- *training cost over*: by how many percent it is above that of so many other models with the same options.
- *FFN cost*: the places of all experts together for each token, K times the capacity factor.
- *ways through the experts*: the possible choices of an image, multiplied over the layers ("routing degree").
"""


def page(values: Sequence[float]) -> str:
    """The text of docs/generated/papers.md, given what each of :data:`FIGURES` is for the models."""
    sections = [_INTRODUCTION, _table(["model", "parameters", "activated", "exported", "GFLOPs", "pixels"], _sizes())]
    sections.append(_LEGEND)
    for paper, number in PAPERS.items():
        rows = [
            [
                figure.where,
                f"`{figure.label}`",
                figure.quantity.name,
                figure.printed or "not legible",
                _number(value),
                _why(figure, value),
            ]
            for figure, value in zip(FIGURES, values, strict=True)
            if figure.paper == paper
        ]
        sections.append(f"### {paper}, [arXiv {number}](https://arxiv.org/abs/{number})\n")
        sections.append(_table(["where", "model", "quantity", "paper", "here", "why they differ"], rows))
    return "\n".join(sections)


def _sizes() -> Iterator[list[str]]:
    for name in registered_models():
        if is_named_after_stock(name):
            continue  # these are in docs/generated/models.md
        info = model_info(name)
        exported = "" if info.exported is None else _number(info.exported)
        pixels = "x".join(str(size) for size in info.input_size[1:])
        yield [f"`{name}`", _number(info.total), _number(info.activated), exported, _number(info.gflops), pixels]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(page([figure.measure() for figure in FIGURES]), end="")
