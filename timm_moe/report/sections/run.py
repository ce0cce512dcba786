"""The training run of a report: ``summary.csv`` and ``experts.json`` as charts over the epochs."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ...training.epoch_log import read_epochs
from .. import charts
from ..page import Part, Section
from .routing import DEAD
from .similarity import DISTANCE

#: Distance of the experts from their mean, over the size of that mean, below which they count as together.
TOGETHER = 0.1
#: Points of a chart over the epochs.
Points = list[dict[str, Any]]


def run_section(folder: Path | None, classes: int | None = None) -> Section | None:
    """Show the training run in train.py's folder; None if nothing is known about it.

    The accuracy of the best five answers is left out if there are five classes or fewer, as it is always 1.

    Raises:
        ValueError: if a file is damaged.
    """
    rows = _summary(folder) if folder else []
    epochs = read_epochs(folder) if folder else []
    if not rows and not epochs:
        return None
    columns = {"eval_top1": "top-1"} | ({} if classes and classes <= 5 else {"eval_top5": "top-5"})
    losses = _points(rows, {"train_loss": "training", "eval_loss": "evaluation"}, "images")
    accuracies = _points(rows, columns, "accuracy")
    parts = [
        _part("Does the loss still fall?", losses, _trend, "images", "loss"),
        _part("How accurate was it in each epoch?", accuracies, _best, "accuracy", "accuracy (%)"),
        _share_rate_part(epochs),
        _spread_part(epochs),
        _load_part(epochs),
        _dropped_part(epochs),
        _router_losses_part(epochs),
    ]
    return Section("run", "The training run", [part for part in parts if part is not None])


def _summary(folder: Path) -> list[dict[str, str]]:
    """Read the rows of summary.csv; the last one of a repeated epoch."""
    file = folder / "summary.csv"
    if not file.exists():
        return []
    try:
        with open(file, newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if (row.get("epoch") or "").isdecimal()]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is damaged: it is not the table that train.py writes.") from error
    return list({row["epoch"]: row for row in rows}.values())


def _points(rows: Sequence[Mapping[str, str]], columns: Mapping[str, str], key: str) -> Points:
    """List the values of some columns that are there, with the name of their series under a key."""
    return [
        {"epoch": int(row["epoch"]), "value": _number(row[column]), key: series}
        for row in rows
        for column, series in columns.items()
        if row.get(column)
    ]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _part(
    title: str,
    points: Points,
    text: str | Callable[[Points], str],
    series: str,
    y_title: str,
    choice: str | None = None,
    percent: bool = False,
) -> Part | None:
    """Draw the finite values, with a sentence on the epochs of the others; None if there are no values.

    ``series`` names the field whose values are the lines, ``choice`` one of whose values the reader chooses one.
    """
    known = [point for point in points if _is_finite(point["value"])]
    lost = _lost(sorted({point["epoch"] for point in points if not _is_finite(point["value"])}))
    if not known:
        return Part(title, lost) if lost else None
    chart = charts.lines(known, series, y_title, percent)
    chart = charts.chosen(chart, choice, choice) if choice else chart
    sentences = text if isinstance(text, str) else text(known)
    return Part(title, " ".join(filter(None, [sentences, lost])), chart.to_dict())


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _lost(epochs: Sequence[int]) -> str:
    """Write a sentence on the epochs that a chart leaves out, such as "epochs 1 to 3 and 7"."""
    if not epochs:
        return ""
    spans: list[list[int]] = []
    for epoch in epochs:
        if not spans or spans[-1][1] != epoch - 1:
            spans.append([epoch, epoch])
        spans[-1][1] = epoch
    ranges = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    listed = " and ".join(filter(None, [", ".join(ranges[:-1]), ranges[-1]]))
    return (
        f"Left out: epoch{'s' if len(epochs) > 1 else ''} {listed}, where it was not a finite number. The run may have "
        "diverged there."
    )


def _trend(losses: Points) -> str:
    images = "evaluation" if any(point["images"] == "evaluation" for point in losses) else "training"
    own = [point for point in losses if point["images"] == images]
    lowest, last = min(own, key=lambda point: point["value"]), own[-1]
    place = f"the last epoch, {last['epoch']}" if lowest is last else f"epoch {lowest['epoch']}"
    text = f"The {images} loss was lowest in {place}: {lowest['value']:.4g}."
    if lowest is not last:
        text += f" In the last epoch, {last['epoch']}, it was {last['value']:.4g}."
    if len({point["images"] for point in losses}) > 1:
        text += " The training loss is that of augmented images, with label smoothing and the routers' losses in it."
    return text


def _best(accuracies: Points) -> str:
    own = [point for point in accuracies if point["accuracy"] == "top-1"]
    if not own:
        return ""
    best = max(own, key=lambda point: point["value"])
    return f"Top-1 ended at {own[-1]['value']:.2f} %; the best was {best['value']:.2f} % in epoch {best['epoch']}."


def _of_layers(epochs: Sequence[dict[str, Any]], value: Callable[[Any], float | None]) -> Points:
    return [
        {"epoch": entry["epoch"], "layer": name, "value": value(layer)}
        for entry in epochs
        for name, layer in entry["layers"].items()
        if _is_finite(value(layer))
    ]


def _share_rate_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    rates = [
        {"epoch": entry["epoch"], "value": entry["share_rate"], "of": "share rate"}
        for entry in epochs
        if _is_finite(entry["share_rate"])
    ]
    text = "After each step every expert moves by this share towards the mean of the other experts."
    return _part("How much are the experts averaged?", rates, text, "of", "share rate of the last step")


def _spread_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    """Show the distance of the experts from their mean, and judge by its mean over the layers."""
    spreads = _of_layers(epochs, lambda layer: layer["spread"])
    if not spreads:
        return None
    first, last = spreads[0]["epoch"], spreads[-1]["epoch"]
    begin, end = (fmean(row["value"] for row in spreads if row["epoch"] == epoch) for epoch in (first, last))
    if first == last:
        verdict = "They are together." if end < TOGETHER else "They are not together."
    elif end < TOGETHER:
        verdict = "They were together all along." if begin < TOGETHER else "They came together."
    elif end < 0.9 * begin:
        verdict = "They came closer to each other."
    else:
        verdict = "They moved apart." if end > 1.1 * begin else "They did not: their distance hardly changed."
    if any(entry["share_rate"] for entry in epochs):
        title, averaging = "Did the experts come together?", "Averaging was on."
    else:
        title = "How far apart are the experts in training?"
        verdict = verdict.replace("They did not: their", "Their")
        off = "" if epochs[-1]["share_rate"] is None else " (the share rate was 0)"
        averaging = f"Nothing averaged the experts{off}."
    later = "" if first == last else f" and {end:.3g} after epoch {last}"
    text = (
        f"{verdict} {averaging} Their distance from their mean was {begin:.3g} after epoch {first}{later}, on average "
        f"over the layers. {DISTANCE}"
    )
    return _part(title, spreads, text, "layer", "distance from the mean")


def _load_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    loads = [
        {"epoch": entry["epoch"], "layer": name, "expert": str(expert), "value": share}
        for entry in epochs
        for name, layer in entry["layers"].items()
        for expert, share in enumerate(layer.get("load", []))
        if _is_finite(share)
    ]
    if not loads:
        return None
    last = epochs[-1]
    idle = [
        f"expert {row['expert']} of {row['layer']}"
        for row in loads
        if row["epoch"] == last["epoch"] and row["value"] * len(last["layers"][row["layer"]]["load"]) < DEAD
    ]
    little = "had less than a tenth of an even share"
    found = f"these {little}: {', '.join(idle)}" if idle else f"none {little}"
    text = (
        f"In the last epoch, {last['epoch']}, {found}. The chart has each expert's share of the choices. A line that "
        "falls to 0 is an expert that the router no longer takes."
    )
    return _part("Is every expert used in training?", loads, text, "expert", "share of the choices", "layer", True)


def _dropped_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    dropped = _of_layers(epochs, lambda layer: layer.get("dropped"))
    if not any(row["value"] for row in dropped):
        return None
    most = max(row["value"] for row in dropped if row["epoch"] == dropped[-1]["epoch"])
    text = (
        f"In the last epoch up to {most:.1%} of a layer's choices were dropped, because their expert was full. A "
        "larger capacity_factor, or a balancing loss, leaves more of them a place."
    )
    return _part("How many choices found no place?", dropped, text, "layer", "dropped choices", percent=True)


def _router_losses_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    losses = [
        {"epoch": entry["epoch"], "layer": layer, "value": value, "loss": name}
        for entry in epochs
        for layer, epoch_of_layer in entry["layers"].items()
        for name, value in epoch_of_layer.get("losses", {}).items()
    ]
    text = (
        "These losses keep the experts evenly used, and are added to the training loss. Even use is 0 for importance "
        "and load, 1 for balance."
    )
    return _part("What did the routers' losses do?", losses, text, "layer", "router's loss, without weight", "loss")
