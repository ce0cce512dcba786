"""The training run of a report: ``summary.csv`` and ``experts.json`` as charts over the epochs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from ....checkpoints.description import is_bce, measures_ema
from ....checkpoints.model_spec import Origin
from ....checkpoints.summary_csv import read_summary
from ....convert.expert_layers import moe_layers
from ....training.epoch_log import read_epochs
from .. import charts
from ..page import Part, Section
from .routing import DEAD
from .similarity import DISTANCE

#: Distance of the experts from their mean, over the size of that mean, below which they count as
#: together.
TOGETHER = 0.1
#: Columns of summary.csv, with the key and the name of their series.
COLUMNS = {
    "train_loss": ("images", "training"),
    "eval_loss": ("images", "evaluation"),
    "eval_top1": ("accuracy", "top-1"),
    "eval_top5": ("accuracy", "top-5"),
}
#: Points of a chart over the epochs.
Points = list[dict[str, Any]]
#: An epoch, a layer's name, and its figures in experts.json.
Layers = list[tuple[int, str, dict[str, Any]]]


@dataclass(frozen=True)
class Run:
    """The figures of a training run by epoch: of summary.csv, and of experts.json."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)


def read_run(folder: Path | None) -> Run:
    """Read what a run left in train.py's folder, which may be nothing.

    Raises:
        ValueError: if a file is damaged.
    """
    return Run() if folder is None else Run(_summary(folder), read_epochs(folder))


def run_of_model(run: Run, model: nn.Module) -> Run:
    """Leave out epochs of experts that a model does not have.

    train.py writes a run of the same name to the same folder, where an earlier one may have left
    its experts.json.
    """
    own = moe_layers(model).keys()
    return replace(run, epochs=[entry for entry in run.epochs if entry["layers"].keys() <= own])


def run_section(
    run: Run, classes: int | None = None, origin: Origin | None = None
) -> Section | None:
    """Show a training run; None if nothing is known about it.

    The accuracy of the best five answers is left out if there are five classes or fewer, as it is
    always 1.

    Args:
        run: from :func:`read_run`.
        classes: their number.
        origin: of the weights that the report is about, which may be others than train.py measured.
    """
    rows, epochs = run.rows, run.epochs
    is_of_ema = origin is not None and measures_ema(origin.train_args)
    of_ema = ", EMA weights" if is_of_ema else ""
    points = [
        {
            "epoch": row["epoch"],
            "value": row[column],
            "column": column,
            key: series + (of_ema if column.startswith("eval_") else ""),
        }
        for row in rows
        for column, (key, series) in COLUMNS.items()
        if column in row and not (series == "top-5" and classes and classes <= 5)
    ]
    losses = [point for point in points if "images" in point]
    accuracies = [point for point in points if "accuracy" in point]
    layers = [
        (entry["epoch"], name, layer) for entry in epochs for name, layer in entry["layers"].items()
    ]
    best = _best(accuracies)
    if accuracies and origin is not None and origin.ema != is_of_ema:
        best += _of_other_weights(origin.ema)
    parts = [
        _part("Does the loss still fall?", losses, _trend(losses), "images", _loss_title(origin)),
        _part(
            "How accurate was it in each epoch?",
            accuracies,
            best,
            "accuracy",
            "accuracy (%)",
        ),
        _share_rate_part(epochs),
        _spread_part(epochs, layers),
        _load_part(layers),
        _dropped_part(layers),
        _router_losses_part(layers),
    ]
    known = [part for part in parts if part is not None]
    return Section("run", "The training run", known) if known else None


def _loss_title(origin: Origin | None) -> str | list[str]:
    """Return the name of the losses that train.py was told to take, as lines of an axis's title."""
    args = origin.train_args if origin is not None else {}
    if is_bce(args):
        return ["training: binary cross-entropy", "evaluation: cross-entropy"]
    has_others = any(args.get(name) for name in ("jsd_loss", "kd_model_name"))
    if not args or has_others or args.get("task") == "multilabel":
        return "loss"
    return "cross-entropy"


def _of_other_weights(ema: bool) -> str:
    """Tell that train.py measured other weights than those of the report, which may be EMA's."""
    if ema:
        return (
            " That is the accuracy of the weights without EMA. The other sections are of the EMA "
            "weights."
        )
    return (
        " That is the accuracy of the EMA weights. The other sections are of the weights without "
        "EMA; --use-ema takes the EMA weights."
    )


def _summary(folder: Path) -> list[dict[str, Any]]:
    """Read the figures in summary.csv by epoch.

    If an epoch is there again, its earlier row and the rows after that are another run's and left
    out.
    """
    rows: list[dict[str, Any]] = []
    for row in read_summary(folder, COLUMNS):
        while rows and rows[-1]["epoch"] >= row["epoch"]:
            rows.pop()
        rows.append({**row, "epoch": int(row["epoch"])})
    return rows


def _part(
    title: str,
    points: Points,
    text: str,
    series: str,
    y_title: str | list[str],
    choice: str | None = None,
    percent: bool = False,
) -> Part | None:
    """Draw the finite values, with a sentence on the epochs of the others.

    Args:
        title: the question that the part answers.
        points: what is drawn; a value may be None or not finite.
        text: sentences on the chart.
        series: field that gives one line per value.
        y_title: title of the values, or its lines.
        choice: field to select by in a drop-down list.
        percent: whether the values are shares, shown in percent.

    Returns:
        None if there are no values.
    """
    known = _finite(points)
    lost = _lost(sorted({point["epoch"] for point in points if not _is_finite(point["value"])}))
    if not known:
        return Part(title, lost) if lost else None
    chart = charts.lines(known, series, y_title, percent)
    chart = charts.chosen(chart, choice, choice) if choice else chart
    return Part(title, " ".join(filter(None, [text, lost])), chart.to_dict())


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _finite(points: Points) -> Points:
    return [point for point in points if _is_finite(point["value"])]


def _lost(epochs: Sequence[int]) -> str:
    """Write a sentence on the epochs that a chart leaves out, such as "epochs 1 to 3 and 7"."""
    if not epochs:
        return ""
    numbered = groupby(enumerate(epochs), lambda pair: pair[1] - pair[0])
    spans = [[epoch for _, epoch in span] for _, span in numbered]
    ranges = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    listed = " and ".join(filter(None, [", ".join(ranges[:-1]), ranges[-1]]))
    return (
        f"Left out: epoch{'s' if len(epochs) > 1 else ''} {listed}, where it was not a finite "
        "number. The run may have diverged there."
    )


def _trend(losses: Points) -> str:
    """Say when the loss was lowest, in evaluation if there is one."""
    known = _finite(losses)
    if not known:
        return ""
    columns = {point["column"] for point in known}
    column = "eval_loss" if "eval_loss" in columns else "train_loss"
    _, images = COLUMNS[column]
    own = [point for point in known if point["column"] == column]
    lowest, last = min(own, key=lambda point: point["value"]), own[-1]
    place = f"the last epoch, {last['epoch']}" if lowest is last else f"epoch {lowest['epoch']}"
    text = f"The {images} loss was lowest in {place}: {lowest['value']:.4g}."
    if lowest is not last:
        text += f" In the last epoch, {last['epoch']}, it was {last['value']:.4g}."
    if len(columns) > 1:
        text += (
            " The training loss is that of augmented images, with any label smoothing and routers' "
            "losses in it."
        )
    return text


def _best(accuracies: Points) -> str:
    """Say the last and the best top-1 accuracy."""
    own = [point for point in _finite(accuracies) if point["column"] == "eval_top1"]
    if not own:
        return ""
    last, best = own[-1]["value"], max(own, key=lambda point: point["value"])
    return (
        f"Top-1 on the run's validation images ended at {last:.2f} %; the best was "
        f"{best['value']:.2f} % in epoch {best['epoch']}."
    )


def _of_layers(layers: Layers, figure: str) -> Points:
    return _finite(
        [
            {"epoch": epoch, "layer": name, "value": layer.get(figure)}
            for epoch, name, layer in layers
        ]
    )


def _share_rate_part(epochs: Sequence[dict[str, Any]]) -> Part | None:
    rates = [
        {"epoch": entry["epoch"], "value": entry["share_rate"], "of": "share rate"}
        for entry in epochs
    ]
    text = "After each step every expert moves by this share towards the mean of the other experts."
    return _part(
        "How much are the experts averaged?",
        _finite(rates),
        text,
        "of",
        "share rate of the last step",
    )


def _spread_part(epochs: Sequence[dict[str, Any]], layers: Layers) -> Part | None:
    """Show the distance of the experts from their mean, and judge by its mean over the layers."""
    spreads = _of_layers(layers, "spread")
    if not spreads:
        return None
    first, last = spreads[0]["epoch"], spreads[-1]["epoch"]
    begin, end = (
        fmean(row["value"] for row in spreads if row["epoch"] == epoch) for epoch in (first, last)
    )
    if first == last:
        verdict = "They are together." if end < TOGETHER else "They are not together."
    elif end < TOGETHER:
        verdict = (
            f"They were together from epoch {first} on."
            if begin < TOGETHER
            else "They came together."
        )
    elif end < 0.9 * begin:
        verdict = "They came closer to each other."
    else:
        verdict = "They moved apart." if end > 1.1 * begin else "Their distance hardly changed."
    if any(entry["share_rate"] for entry in epochs):
        title, averaging = "Did the experts come together?", "Averaging was on."
    else:
        title = "How far apart are the experts in training?"
        is_known = epochs[-1]["share_rate"] is not None
        off = " (the share rate was 0 at the end of each epoch)" if is_known else ""
        averaging = f"Nothing averaged the experts{off}."
    later = "" if first == last else f" and {end:.3g} after epoch {last}"
    text = (
        f"{verdict} {averaging} Their distance from their mean was {begin:.3g} after epoch "
        f"{first}{later}, on average over the layers. {DISTANCE}"
    )
    return _part(title, spreads, text, "layer", "distance from the mean")


def _load_part(layers: Layers) -> Part | None:
    last = layers[-1][0] if layers else 0
    loads, idle = [], []
    for epoch, name, layer in layers:
        for expert, share in enumerate(layer.get("load", [])):
            if _is_finite(share):
                loads.append({"epoch": epoch, "layer": name, "expert": str(expert), "value": share})
                if epoch == last and share * len(layer["load"]) < DEAD:
                    idle.append(f"expert {expert} of {name}")
    if not loads:
        return None
    little = "had less than a tenth of an even share"
    found = f"these {little}: {', '.join(idle)}" if idle else f"none {little}"
    text = (
        f"In the last epoch, {last}, {found}. The chart has each expert's share of the choices. A "
        "line that falls to 0 is an expert that the router no longer takes."
    )
    return _part(
        "Is every expert used in training?",
        loads,
        text,
        "expert",
        "share of the choices",
        "layer",
        True,
    )


def _dropped_part(layers: Layers) -> Part | None:
    dropped = _of_layers(layers, "dropped")
    if not any(row["value"] for row in dropped):
        return None
    most = max(row["value"] for row in dropped if row["epoch"] == dropped[-1]["epoch"])
    text = (
        f"In the last epoch up to {most:.1%} of a layer's choices were dropped, because their "
        "expert was full. A larger capacity_factor, or a balancing loss, leaves more of them a "
        "place."
    )
    return _part(
        "How many choices found no place?", dropped, text, "layer", "dropped choices", percent=True
    )


def _router_losses_part(layers: Layers) -> Part | None:
    losses = [
        {"epoch": epoch, "layer": name, "value": value, "loss": loss}
        for epoch, name, layer in layers
        for loss, value in layer.get("losses", {}).items()
    ]
    text = (
        "These losses are added to the training loss. z is against large logits, local_entropy for "
        "sure choices; the others keep the experts evenly used. Even use is 0 for importance, load "
        "and global_entropy, 1 for balance."
    )
    return _part(
        "What did the routers' losses do?",
        losses,
        text,
        "layer",
        "router's loss, without weight",
        "loss",
    )
