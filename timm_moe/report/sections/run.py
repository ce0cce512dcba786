"""The training run of a report: what summary.csv and experts.json tell, as charts over the epochs."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...training.epoch_log import read_epochs
from .. import charts
from .alike import MEASURED
from .part import Part, Section
from .routing import DEAD

#: Distance of the experts from their mean, over the size of that mean, below which they count as together.
TOGETHER = 0.1
#: Columns of summary.csv, and what they are called.
LOSS_COLUMNS = {"train_loss": "training", "eval_loss": "evaluation"}


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
    augmented = " The training loss is that of augmented images, with label smoothing and the routers' losses in it."
    both = augmented if len({point["images"] for point in losses}) > 1 else ""
    lowest, last = min(own, key=lambda point: point["value"]), own[-1]
    if lowest is last:
        return f"The {images} loss was lowest in the last epoch, {last['epoch']}: {last['value']:.4g}.{both}"
    return (
        f"The {images} loss was lowest in epoch {lowest['epoch']}: {lowest['value']:.4g}. In the last epoch, "
        f"{last['epoch']}, it was {last['value']:.4g}.{both}"
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
        text = "After each step every expert moves by this share towards the mean of the other experts."
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
    text = (
        f"{_idle(epochs[-1])} The chart has each expert's share of the choices. A line that falls to 0 is an "
        "expert that the router no longer takes."
    )
    return [Part("Is every expert used in training?", text, chart.to_dict())]


def _idle(last: dict[str, Any]) -> str:
    """A sentence on the experts that the last epoch hardly used."""
    loads = {name: layer["load"] for name, layer in last["layers"].items() if layer.get("load")}
    idle = [
        f"expert {expert} of {name}"
        for name, load in loads.items()
        for expert, share in enumerate(load)
        if share is not None and share * len(load) < DEAD
    ]
    if not idle:
        return f"In the last epoch, {last['epoch']}, none had less than a tenth of an even share."
    return f"In the last epoch, {last['epoch']}, these had less than a tenth of an even share: {', '.join(idle)}."


def _dropped_part(epochs: Sequence[dict[str, Any]]) -> list[Part]:
    dropped = _by_layer(epochs, lambda layer: layer.get("dropped"))
    if not any(row["value"] for row in dropped):
        return []
    chart = charts.lines(dropped, "epoch", "value", "layer", x_title="epoch", y_title="dropped choices", percent=True)
    last = [row["value"] for row in dropped if row["epoch"] == dropped[-1]["epoch"]]
    text = (
        f"In the last epoch up to {max(last):.1%} of a layer's choices were dropped, because their expert was "
        "full. A larger capacity_factor, or a balancing loss, leaves more of them a place."
    )
    return [Part("How many choices found no place?", text, chart.to_dict())]


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
    text = (
        "These losses keep the experts evenly used, and are added to the training loss. Even use is 0 for importance "
        "and load, 1 for balance."
    )
    return [Part(title, " ".join(filter(None, [text, lost])), charts.chosen(chart, "loss", "loss", names).to_dict())]


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
