"""The sections of a report: what was measured, as sentences, charts, tables and images for the page."""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.evaluation import LABELS
from ..callbacks.epoch_log import read_epochs
from ..checkpoints.history import History
from ..convert.blocks import moe_layers
from ..convert.find import ffn_paths
from ..info import ModelInfo
from ..layers import EnsembleRouter, MoeMlp, RandomPartition, SharedExpertMlp
from ..model_config import get_pretrained_cfg
from . import charts
from .alike import Likeness
from .images import data_uri, sheet
from .observe import ENTROPY_BINS, LayerObservation, Observation

#: What the words of the routing's section mean.
_WORDS = (
    "A row is what an expert layer sees of one patch, or of the class token. A gate is how likely the router finds an "
    "expert for a row, from 0 to 1. A choice is an expert that the router takes for a row; a row may have several, the "
    "first is that with the largest gate."
)
_BLOCK = re.compile(r"blocks\.(\d+)\.mlp")
#: Share of an even load below which an expert counts as dead.
DEAD = 0.1
#: Distance of the experts from their mean, over the size of that mean, below which they count as together.
TOGETHER = 0.1
#: What such a distance means.
MEASURED = (
    "The distance is divided by the size (the norm) of that mean: at 0 all experts are equal, and near √(E - 1), for E "
    "experts, they have nothing in common."
)
#: Columns of summary.csv, and what they are called.
LOSS_COLUMNS = {"train_loss": "training", "eval_loss": "evaluation"}
#: Points by which confidence and accuracy may differ before the model is called over- or under-confident.
TOLERANCE = 0.01
#: Pairs of classes that are shown as confused, bins of the reliability diagram, and of confidences.
CONFUSED, RELIABILITY_BINS, CONFIDENCE_BINS = 15, 15, 20


@dataclass
class Part:
    """Something to look at.

    Attributes:
        title: says what to see in it.
        text: sentences below.
        chart: a Vega-Lite specification.
        table: rows of cells, the first the head.
        routes: what the page draws of a layer, see the page's script.
    """

    title: str
    text: str = ""
    chart: dict[str, Any] | None = None
    table: list[list[str]] | None = None
    routes: dict[str, Any] | None = None


@dataclass
class Section:
    """A part of the page with a heading of its own.

    Attributes:
        name: its anchor.
        title: its heading.
        parts: in their order.
        text: sentences below the heading.
    """

    name: str
    title: str
    parts: list[Part] = field(default_factory=list)
    text: str = ""


def model_section(model: nn.Module, info: ModelInfo, history: History) -> Section:
    """The model: its blocks, sizes and options, and where its weights came from."""
    boxes = _boxes(model)
    rows = [["", ""], ["model", info.name], ["experts", _experts(info)]]
    rows += [["members", f"{info.members}{_own_experts(model)}"]] if info.members > 1 else []
    rows += [["parameters in training", f"{info.total:,}"], ["activated for a token", f"{info.activated:,}"]]
    rows += [["exported", f"{info.exported:,}"]] if info.exported is not None else []
    rows += [["evaluation of an image", f"{info.gflops:.3f} GFLOPs"]]
    rows += [["input", " x ".join(map(str, info.input_size))]]
    options = [["option", "value"], *([name, value] for name, value in history.options.items())]
    origin = [["", ""], *([name, str(value)] for name, value in _origin(history))]
    parts = [
        Part(
            "Where the experts sit",
            f"{_sitting(info, boxes)}{_random(model)}{_shared(model)}",
            routes={"kind": "blocks", "blocks": boxes},
        ),
        Part("Size and cost", table=rows),
    ]
    if len(options) > 1:
        parts.append(Part("How it was trained", "train.py's options, those that are set.", table=options))
    if len(origin) > 1:
        parts.append(Part("Where it came from", table=origin))
    return Section("model", "The model", parts)


def _experts(info: ModelInfo) -> str:
    if not info.moe_layers:
        return "none"
    unit = "image" if info.routing_unit == "image" else "token"
    layers = f"each of {len(info.moe_layers)} layers" if len(info.moe_layers) > 1 else "one layer"
    return f"{info.num_experts} in {layers}; {info.top_k} for each {unit}"


def _sitting(info: ModelInfo, boxes: Sequence[dict[str, Any]]) -> str:
    if not info.moe_layers:
        return "This model has no expert layers."
    places, layers = sum(box["experts"] > 0 for box in boxes), len(info.moe_layers)
    text = f"{places} of {len(boxes)} feed-forward networks hold {info.num_experts} experts each."
    if places > layers:
        text += f" They share {'one expert layer' if layers == 1 else f'{layers} expert layers'}: these are the same."
    return text


def _random(model: nn.Module) -> str:
    """Sentences on experts that no router chooses."""
    layers = moe_layers(model).values()
    if not layers or not all(isinstance(layer.routed_by, RandomPartition) for layer in layers):
        return ""
    return (
        " No router chooses: in training each token gets a random expert, so none of them sees some classes more than "
        "others, and none can die."
    )


def _shared(model: nn.Module) -> str:
    """A sentence on the shared experts."""
    layers = [path for path, layer in moe_layers(model).items() if isinstance(layer, SharedExpertMlp)]
    if not layers:
        return ""
    return f" Beside these there is a shared expert, which every token passes through, in {', '.join(layers)}."


def _own_experts(model: nn.Module) -> str:
    """Which experts belong to which member of an ensemble inside one model; empty where all have all."""
    routers = [layer.routed_by for layer in moe_layers(model).values() if isinstance(layer.routed_by, EnsembleRouter)]
    if not routers:
        return ""
    members, own = routers[0].ensemble_size, routers[0].num_experts // routers[0].ensemble_size
    told = [f"member {number + 1} has {_numbered(number * own, own)}" for number in range(members)]
    return f"; {', '.join(told)}"


def _numbered(first: int, number: int) -> str:
    return f"expert {first}" if number == 1 else f"experts {first} to {first + number - 1}"


def _boxes(model: nn.Module) -> list[dict[str, Any]]:
    """All places of feed-forward networks, in order, of one that stands in several blocks each of them."""
    networks = {model.get_submodule(path) for path in ffn_paths(model)}
    found = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if module in networks]
    numbers = [_BLOCK.fullmatch(path) for path, _ in found]
    plain = all(numbers)
    return [
        {
            "name": f"block {number[1]}" if plain and number else path,
            "experts": module.num_experts if isinstance(module, MoeMlp) else 0,
        }
        for number, (path, module) in zip(numbers, found, strict=True)
    ]


def _origin(history: History) -> list[tuple[str, Any]]:
    known = {"file": history.file, "epoch": history.epoch, "pretrained weights": history.base, "start": history.start}
    known |= {"weights": "the EMA weights of the checkpoint" if history.ema else None}
    known |= {"data": history.dataset, "gathered by": history.method}
    known |= (
        {}
        if history.experts is None
        else {f"experts' {name}": value for name, value in asdict(history.experts).items()}
    )
    return [(name, value) for name, value in known.items() if value is not None]


def run_section(folder: Path | None, classes: int | None = None) -> Section | None:
    """The training run, from train.py's folder; None where there is none at hand.

    Args:
        folder: train.py's.
        classes: how many there are; with five or fewer the best five are always right, and are left out.

    Raises:
        ValueError: if a file is damaged.
    """
    rows = _summary(folder) if folder else []
    epochs = read_epochs(folder) if folder else []
    if not rows and not epochs:
        return None
    section = Section("run", "The training run")
    columns = {"eval_top1": "top-1"} | ({} if classes and classes <= 5 else {"eval_top5": "top-5"})
    _add_lines(section, "Does the loss still fall?", *_curves(rows, LOSS_COLUMNS, "images"), _trend, "loss")
    _add_lines(
        section, "How accurate was it in each epoch?", *_curves(rows, columns, "accuracy"), _best,
        "accuracy (%)",
    )  # fmt: skip
    section.parts += _of_epochs(epochs)
    return section


def _summary(folder: Path) -> list[dict[str, str]]:
    file = folder / "summary.csv"
    if not file.exists():
        return []
    try:
        with open(file, newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if (row.get("epoch") or "").isdecimal()]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is damaged: it is not the table that train.py writes.") from error
    return list({row["epoch"]: row for row in rows}.values())


def _curves(
    rows: Sequence[dict[str, str]], columns: dict[str, str], key: str
) -> tuple[list[dict[str, Any]], str, list[int]]:
    """Points of the columns that are numbers, the key of their series, and the epochs where one is not finite."""
    points: list[dict[str, Any]] = [
        {"epoch": int(row["epoch"]), "value": _number(row[column]), key: series}
        for row in rows
        for column, series in columns.items()
        if row.get(column)
    ]
    known = [point for point in points if math.isfinite(point["value"])]
    return known, key, sorted({point["epoch"] for point in points if not math.isfinite(point["value"])})


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _add_lines(
    section: Section, title: str, points: list[dict[str, Any]], key: str, lost: Sequence[int], tell: Any, y_title: str
) -> None:
    """Add a chart over the epochs; where all numbers are lost, the sentence alone."""
    text = " ".join(filter(None, [tell(points), _lost(lost)]))
    if points:
        chart = charts.lines(points, "epoch", "value", key, x_title="epoch", y_title=y_title)
        section.parts.append(Part(title, text, chart.to_dict()))
    elif lost:
        section.parts.append(Part(title, text))


def _lost(epochs: Sequence[int]) -> str:
    """A sentence on the epochs that a chart leaves out."""
    if not epochs:
        return ""
    return f"Left out: {_listed(epochs)}, where it was not a finite number. The run may have diverged there."


def _listed(epochs: Sequence[int]) -> str:
    """ "epochs 1 to 3 and 7"."""
    spans: list[list[int]] = []
    for epoch in epochs:
        if spans and spans[-1][1] == epoch - 1:
            spans[-1][1] = epoch
        else:
            spans.append([epoch, epoch])
    told = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return f"epoch{'s' if len(epochs) > 1 else ''} " + " and ".join(filter(None, [", ".join(told[:-1]), told[-1]]))


def _trend(losses: Sequence[dict[str, Any]]) -> str:
    images = "evaluation" if any(point["images"] == "evaluation" for point in losses) else "training"
    own = [point for point in losses if point["images"] == images]
    if not own:
        return ""
    lowest, last = min(own, key=lambda point: point["value"]), own[-1]
    if lowest is last:
        return f"The {images} loss was lowest in the last epoch, {last['epoch']}: {last['value']:.4g}."
    return (
        f"The {images} loss was lowest in epoch {lowest['epoch']}: {lowest['value']:.4g}. In the last epoch, "
        f"{last['epoch']}, it was {last['value']:.4g}."
    )


def _best(accuracy: Sequence[dict[str, Any]]) -> str:
    own = [point for point in accuracy if point["accuracy"] == "top-1"]
    if not own:
        return ""
    best = max(own, key=lambda point: point["value"])
    return f"Top-1 ended at {own[-1]['value']:.2f} %; the best was {best['value']:.2f} % in epoch {best['epoch']}."


def _of_epochs(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    """What experts.json tells."""
    rates = [
        {"epoch": entry["epoch"], "rate": entry["share_rate"], "of": "share rate"}
        for entry in epochs
        if _is_finite(entry["share_rate"])
    ]
    parts = []
    if rates:
        chart = charts.lines(rates, "epoch", "rate", "of", x_title="epoch", y_title="share rate of the last step")
        text = "After each step every expert moves by this share towards the mean of all."
        parts.append(Part("How much are the experts averaged?", text, chart.to_dict()))
    return [*parts, *_spread_part(epochs), *_load_part(epochs), *_dropped_part(epochs), *_router_losses_part(epochs)]


def _spread_part(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    spreads = _by_layer(epochs, lambda layer: layer["spread"])
    if not spreads:
        return []
    averaged = any(entry["share_rate"] for entry in epochs)
    title = "Did the experts come together?" if averaged else "How far apart are the experts in training?"
    chart = charts.lines(spreads, "epoch", "value", "layer", x_title="epoch", y_title="distance from the mean")
    off = "" if epochs[-1]["share_rate"] is None else " (the share rate was 0)"
    verdict = _verdict(spreads)
    if averaged:
        told = f"{verdict} Averaging was on. "
    else:
        told = f"{verdict.replace('They did not: their', 'Their')} Nothing averaged the experts{off}. "
    return [Part(title, f"{told}{_distances(spreads)}", chart.to_dict())]


def _load_part(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    loads = [
        {"epoch": entry["epoch"], "layer": name, "expert": str(expert), "share": share}
        for entry in epochs
        for name, layer in entry["layers"].items()
        for expert, share in enumerate(layer.get("load", []))
        if _is_finite(share)
    ]
    if not loads:
        return []
    chart = charts.lines(
        loads, "epoch", "share", "expert", x_title="epoch", y_title="share of the choices", percent=True
    )
    names = list(dict.fromkeys(row["layer"] for row in loads))
    chart = charts.chosen(chart, "layer", "layer", names)
    return [Part("Is every expert used in training?", "", chart.to_dict())]


def _dropped_part(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    dropped = _by_layer(epochs, lambda layer: layer.get("dropped"))
    if not any(row["value"] for row in dropped):
        return []
    chart = charts.lines(dropped, "epoch", "value", "layer", x_title="epoch", y_title="dropped choices", percent=True)
    return [Part("How many choices found no place?", "", chart.to_dict())]


def _router_losses_part(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    losses = [
        {"epoch": entry["epoch"], "layer": layer, "value": value, "loss": name}
        for entry in epochs
        for layer, told in entry["layers"].items()
        for name, value in told.get("losses", {}).items()
    ]
    known = [row for row in losses if _is_finite(row["value"])]
    lost = _lost(sorted({row["epoch"] for row in losses if not _is_finite(row["value"])}))
    title = "What did the routers' losses do?"
    if not known:
        return [Part(title, lost)] if lost else []
    chart = charts.lines(known, "epoch", "value", "layer", x_title="epoch", y_title="router's loss, without weight")
    names = list(dict.fromkeys(row["loss"] for row in known))
    return [Part(title, lost, charts.chosen(chart, "loss", "loss", names).to_dict())]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _by_layer(epochs: Sequence[dict[str, Any]], value: Any) -> list[dict[str, Any]]:
    return [
        {"epoch": entry["epoch"], "layer": name, "value": value(layer)}
        for entry in epochs
        for name, layer in entry["layers"].items()
        if _is_finite(value(layer))
    ]


def _ends(spreads: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """First and last epoch, and the distance after it on average over the layers."""
    numbers = [spreads[0]["epoch"], spreads[-1]["epoch"]]
    return [(epoch, fmean(row["value"] for row in spreads if row["epoch"] == epoch)) for epoch in numbers]


def _verdict(spreads: Sequence[dict[str, Any]]) -> str:
    (first, begin), (last, end) = _ends(spreads)
    if first == last:
        return "They are together." if end < TOGETHER else "They are not together."
    if end < TOGETHER:
        return "They were together all along." if begin < TOGETHER else "They came together."
    if end < 0.9 * begin:
        return "They came closer to each other."
    return "They moved apart." if end > 1.1 * begin else "They did not: their distance hardly changed."


def _distances(spreads: Sequence[dict[str, Any]]) -> str:
    (first, begin), (last, end) = _ends(spreads)
    later = "" if first == last else f" and {end:.3g} after epoch {last}"
    return (
        f"Their distance from their mean was {begin:.3g} after epoch {first}{later}, on average over the layers. "
        f"{MEASURED}"
    )


def routing_section(seen: Observation) -> Section | None:
    """Which images and patches go to which experts; None of a model that does not route by what it sees."""
    if not seen.layers:
        return None
    section = Section("routing", "Who goes where", text=_WORDS)
    names = [layer.name for layer in seen.layers]
    loads = [
        {"layer": layer.name, "expert": expert, "share": share}
        for layer in seen.layers
        for expert, share in enumerate(layer.load.tolist())
    ]
    chart = charts.bars(loads, "expert", "share", x_title="expert", y_title="share of the choices", percent=True)
    section.parts += [
        Part("Did any expert die?", _dead(seen.layers), charts.chosen(chart, "layer", "layer", names).to_dict()),
        _classes_part(seen),
        _patches_part(seen),
        *_surest_part(seen),
        *_entropy_part(seen.layers),
        *_pairs_part(seen.layers),
    ]
    return section


def _dead(layers: Sequence[LayerObservation]) -> str:
    dead = []
    for layer in layers:
        load = layer.load * layer.experts
        idle = [str(expert) for expert, share in enumerate(load.tolist()) if share < DEAD]
        dead += [f"{layer.name}: {', '.join(idle)}"] if idle else []
    told = f" {_dropped(layers)}"
    if dead:
        return f"Chosen for less than a tenth of an even share: {'; '.join(dead)}.{told}"
    least = min(layers, key=lambda layer: (layer.load * layer.experts).min().item())
    share = (least.load * least.experts).min().item()
    which = f"expert {int(least.load.argmin())} of {least.name}"
    return f"None has less than a tenth of an even share. The least chosen, {which}, has {share:.0%} of it.{told}"


def _choices(layer: LayerObservation) -> int:
    """Of all images; where the rows of an image go together they are one choice."""
    return len(layer.count_IE) * layer.top_k * layer.members if layer.by_image else int(layer.count_IE.sum())


def _dropped(layers: Sequence[LayerObservation]) -> str:
    choices = sum(_choices(layer) for layer in layers)
    dropped = sum(layer.dropped for layer in layers)
    if not dropped:
        return f"This counts {choices:,} choices in evaluation. None of them was dropped."
    return f"This counts {choices:,} choices in evaluation. {dropped:,} of them found no place and were dropped."


def _classes_part(seen: Observation) -> Part:
    present = seen.labels.unique().tolist()
    return Part(
        "Which expert sees which class?",
        "Share of a class's choices that fell on each expert, before capacities. Sort by an expert, or find a class by "
        f"its name.{_members_share(seen.layers)}",
        routes={
            "kind": "classes",
            "classes": [seen.classes[label] for label in present],
            "layers": [
                {
                    "name": layer.name,
                    "share": _percent(layer.share_CE(seen.labels, len(seen.classes))[present]),
                    "even": 100 / layer.experts,
                }
                for layer in seen.layers
            ],
        },
    )


def _members_share(layers: Sequence[LayerObservation]) -> str:
    members = max(layer.members for layer in layers)
    if members == 1:
        return ""
    return f" The {members} members together make 100%: an expert that one of them has gets {1 / members:.0%} at most."


def _percent(share_CE: Tensor) -> list[list[int]]:
    return (100 * share_CE).round().int().tolist()


def _patches_part(seen: Observation) -> Part:
    layers = [layer for layer in seen.layers if layer.grid is not None]
    return Part(
        "Which patches go to which expert?",
        f"Each patch has the colour and number of its first choice, the more opaque the surer the router is."
        f"{_colourless(layers)}{_whose_patches(layers)}"
        if layers
        else "The rows of these layers are not patches of an image.",
        routes={
            "kind": "patches",
            "images": [data_uri(pixels) for pixels in seen.shown_pixels] if layers else [],
            "labels": [
                f"{seen.classes[seen.labels[number]]}, predicted {seen.classes[seen.predicted[number]]}"
                for number in seen.shown
            ],
            "layers": [
                {
                    "name": layer.name,
                    "grid": layer.grid,
                    "experts": layer.experts,
                    "expert": layer.expert_SP.tolist(),
                    "gate": (100 * layer.gate_SP).round().int().tolist(),
                }
                for layer in layers
            ],
        },
    )


def _colourless(layers: Sequence[LayerObservation]) -> str:
    if not any((layer.expert_SP == layer.experts).any() for layer in layers):
        return ""
    one = all(layer.top_k == 1 for layer in layers)
    which = "its only choice" if one else f"the first of its {max(layer.top_k for layer in layers)} choices"
    return f" Of a patch without colour, {which} found no place and was dropped."


def _whose_patches(layers: Sequence[LayerObservation]) -> str:
    members = max(layer.members for layer in layers)
    return f" The model has {members} members inside; these are the choices of the first one." if members > 1 else ""


def _surest_part(seen: Observation) -> list[Part]:
    layers = [layer for layer in seen.layers if any(layer.surest)]
    if not layers:
        return []
    kind = "images" if layers[0].by_image else "patches"
    around = "" if layers[0].by_image else "with what is around them, "
    return [
        Part(
            "What is each expert surest of?",
            f"The {kind} with the largest gates, {around}at most one of an image.",
            routes={
                "kind": "surest",
                "layers": [
                    {
                        "name": layer.name,
                        "sheet": sheet([[patch.pixels for patch in patches] for patches in layer.surest]),
                        "columns": max(map(len, layer.surest)),
                        "told": [_told(patches, seen.classes) for patches in layer.surest],
                    }
                    for layer in layers
                ],
            },
        )
    ]


def _told(patches: Sequence[Any], classes: Sequence[str]) -> str:
    if not patches:
        return "never chosen first"
    of = ", ".join(dict.fromkeys(classes[patch.label] for patch in patches))
    return f"gates {patches[-1].gate:.2f} to {patches[0].gate:.2f}; of {of}"


def _entropy_part(layers: Sequence[LayerObservation]) -> list[Part]:
    rows = [
        {"entropy": (index + 0.5) / ENTROPY_BINS, "share": share, "layer": layer.name}
        for layer in layers
        if layer.entropy is not None
        for index, share in enumerate((layer.entropy / layer.entropy.sum().clamp(min=1)).tolist())
    ]
    if not rows:
        return []
    chart = charts.histogram(
        rows, "entropy", "share", "layer", x_title="how undecided the router is", y_title="share of the rows"
    )
    text = (
        "At 0 % the router is certain of one expert. At 100 % it finds all experts equally likely. This is the entropy "
        "of the gates, as a share of the largest that is possible."
    )
    return [Part("How sure are the routers?", text, chart.to_dict())]


def _pairs_part(layers: Sequence[LayerObservation]) -> list[Part]:
    rows, names = [], []
    for layer, following in pairwise(layers):
        if layer.next_EE is None:
            continue
        names.append(f"{layer.name} to {following.name}")
        share_EE = layer.next_EE / layer.next_EE.sum(1, keepdim=True).clamp(min=1)
        rows += [
            {"pair": names[-1], "here": here, "there": there, "share": share}
            for here, shares in enumerate(share_EE.tolist())
            for there, share in enumerate(shares)
        ]
    if not rows:
        return []
    chart = charts.heatmap(
        rows, "there", "here", "share",
        x_title="expert in the next layer", y_title="expert", value_title="share of its rows",
        highest=max(row["share"] for row in rows), percent=True,
    )  # fmt: skip
    text = (
        "Take the rows that one expert gets. The chart shows which experts the same rows get in the next expert layer. "
        "Only first choices count."
    )
    return [Part("Do experts follow each other?", text, charts.chosen(chart, "pair", "layers", names).to_dict())]


def alike_section(alike: Sequence[Likeness]) -> Section | None:
    """How alike the experts of each layer are; None of a model without any."""
    if not alike:
        return None
    rows = [
        {"of": f"{of}, {layer.layer}", "a": a, "b": b, "cosine": cosine}
        for of, name in (("weights", "weights_EE"), ("outputs", "outputs_EE"))
        for layer in alike
        for a, cosines in enumerate(getattr(layer, name).tolist())
        for b, cosine in enumerate(cosines)
    ]
    chart = charts.heatmap(
        rows, "b", "a", "cosine", x_title="expert", y_title="expert", value_title="cosine", highest=1.0
    )
    options = list(dict.fromkeys(row["of"] for row in rows))
    known = {layer.layer: layer.spread for layer in alike if layer.spread is not None}
    told = "; ".join(f"{name} {value:.3g}" for name, value in known.items())
    text = (
        "The chart compares two experts by the cosine of their weights, or of their outputs on the same rows. 1 means "
        "that they are the same, 0 that they have nothing to do with each other."
    )
    if told:
        text += f" Distance of the experts from their mean: {told}. {MEASURED}"
    return Section(
        "alike",
        "How alike are the experts?",
        [Part("Do the experts differ?", text, charts.chosen(chart, "of", "of", options).to_dict())],
    )


def classifier_section(observations: dict[str, Observation]) -> Section:
    """What the classifiers get right, and how sure they are; several side by side."""
    section = Section("classifier", "The classifier")
    table = [["", *observations]]
    for name, (label, layout) in LABELS.items():
        cells = [layout.format(seen.figures[name]) if name in seen.figures else "" for seen in observations.values()]
        table += [[label, *cells]] if any(cells) else []
        if name == "error":
            table.append(["top-1 accuracy", *(f"{1 - seen.figures[name]:.2%}" for seen in observations.values())])
    section.parts.append(Part("The figures", "As timm-moe evaluate measures them.", table=table))
    reliable = [row for name, seen in observations.items() for row in _reliability(name, seen)]
    sure = " ".join(_over_confident(name, seen, len(observations) > 1) for name, seen in observations.items())
    section.parts.append(
        Part("Is it as sure as it is right?", f"{sure} Below the dashed line it is surer than it is right.",
             charts.reliability(reliable).to_dict())
    )  # fmt: skip
    confidences = [
        row for name, seen in observations.items() for row in _confidences(name, seen, len(observations) > 1)
    ]
    chart = charts.histogram(
        confidences, "confidence", "share", "images", x_title="confidence", y_title="share of the images"
    )
    other = any(seen.ood_confidence is not None for seen in observations.values())
    text = "Images of other data should be to the left." if other else "--ood-data-dir adds images of other data."
    section.parts.append(Part("How sure is it?", text, chart.to_dict()))
    confused = [row for name, seen in observations.items() for row in _confused(name, seen)]
    if confused:
        head = ["class", "taken for", "images of the class", "share of them"]
        many = len(observations) > 1
        section.parts.append(
            Part(
                "Which classes are confused most?",
                table=[["model", *head] if many else head, *(row if many else row[1:] for row in confused)],
            )
        )
    return section


def _reliability(name: str, seen: Observation) -> list[dict[str, Any]]:
    right = (seen.predicted == seen.labels).double()
    index = (seen.confidence * RELIABILITY_BINS).long().clamp(max=RELIABILITY_BINS - 1)
    count = index.bincount(minlength=RELIABILITY_BINS)
    sure = index.bincount(seen.confidence.double(), RELIABILITY_BINS)
    good = index.bincount(right, RELIABILITY_BINS)
    return [
        {
            "model": name,
            "confidence": (sure[number] / count[number]).item(),
            "accuracy": (good[number] / count[number]).item(),
            "images": int(count[number]),
        }
        for number in count.nonzero().flatten().tolist()
    ]


def _over_confident(name: str, seen: Observation, named: bool) -> str:
    """Whether mean confidence and accuracy differ by more than chance (95 %) and :data:`TOLERANCE`."""
    right = (seen.predicted == seen.labels).double()
    gap = seen.confidence.double() - right
    images = len(gap)
    chance = 1.96 * (gap.std().item() if images > 1 else 1.0) / math.sqrt(images)
    if abs(gap.mean()) <= max(chance, TOLERANCE):
        verdict = f"Neither over- nor under-confident on average, as far as {images:,} images can tell"
    else:
        verdict = f"{'Over' if gap.mean() > 0 else 'Under'}-confident on average"
    return (
        f"{f'{name}: ' if named else ''}{verdict}: confidence {seen.confidence.double().mean():.1%}, accuracy "
        f"{right.mean():.1%}, difference {100 * gap.mean():+.1f} points (95 % interval ±{100 * chance:.1f}), expected "
        f"calibration error {seen.figures['ece']:.3f}."
    )


def _confidences(name: str, seen: Observation, named: bool) -> list[dict[str, Any]]:
    rows = []
    for kind, confidence in (("these images", seen.confidence), ("other data", seen.ood_confidence)):
        if confidence is None:
            continue
        share = torch.histc(confidence.float(), CONFIDENCE_BINS, 0, 1) / len(confidence)
        series = f"{name}, {kind}" if named else kind
        rows += [
            {"confidence": (index + 0.5) / CONFIDENCE_BINS, "share": value, "images": series}
            for index, value in enumerate(share.tolist())
        ]
    return rows


def _confused(name: str, seen: Observation) -> list[list[str]]:
    classes = len(seen.classes)
    wrong = seen.predicted != seen.labels
    pair, count = (seen.labels[wrong] * classes + seen.predicted[wrong]).unique(return_counts=True)
    total = seen.labels.bincount(minlength=classes)
    rows = []
    for index in count.argsort(descending=True)[:CONFUSED].tolist():
        label, taken = divmod(int(pair[index]), classes)
        share = count[index].item() / total[label].item()
        rows.append([name, seen.classes[label], seen.classes[taken], str(int(total[label])), f"{share:.0%}"])
    return rows


def origin_of(model: nn.Module) -> str:
    """The registered name of a model, for :func:`timm_moe.info.measure`."""
    return get_pretrained_cfg(model).get("architecture", type(model).__name__)
