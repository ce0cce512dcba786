"""Charts of a study.

They are the differences to the baselines with their intervals, and curves of the trainings.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from timm_moe.analysis.paired import Difference

from .outcome import Outcome

#: From the epoch to the mean over the seeds of train_loss, eval_loss and eval_top1.
Curve = dict[int, dict[str, float]]


def chart_name(outcome: Outcome) -> str:
    """Name the file of the differences."""
    return f"study-{outcome.study.name}-{outcome.size_name}.png"


def curves_name(outcome: Outcome) -> str:
    """Name the file of the curves."""
    return f"study-{outcome.study.name}-{outcome.size_name}-curves.png"


def differences(outcome: Outcome) -> dict[str, Difference]:
    """Compare each arm with its baseline by the first figure, where they share a seed."""
    found = {
        arm.name: outcome.to_baseline(arm.name, outcome.study.measure.figures[0])
        for arm in outcome.size.arms
    }
    return {name: pair for name, pair in found.items() if pair is not None}


def curves(outcome: Outcome) -> dict[str, Curve]:
    """Average the curves of each training that was evaluated on its way.

    A curve is named by the first arm that comes from its training. With an EMA of the weights,
    train.py evaluates the model and then the EMA, and its summary has the EMA's figures.
    """
    found: dict[str, Curve] = {}
    seen: set[str] = set()
    for arm in outcome.size.arms:
        of_seeds = outcome.results["cost"].get(arm.training.name, {}).values()
        known = [cost["curve"] for cost in of_seeds if cost.get("curve")]
        if known and arm.training.name not in seen:
            epochs = zip(*known, strict=False)  # up to the last epoch that all seeds have
            has_ema = "--model-ema" in arm.training.options
            found[f"{arm.name}, its EMA" if has_ema else arm.name] = {
                entries[0]["epoch"]: _means(entries) for entries in epochs
            }
        seen.add(arm.training.name)
    return found


def _means(entries: tuple[dict[str, float], ...]) -> dict[str, float]:
    return {
        key: mean(entry[key] for entry in entries)
        for key in ("train_loss", "eval_loss", "eval_top1")
    }


def draw(outcome: Outcome, folder: Path) -> None:
    """Write the charts for which there are results."""
    if shown := differences(outcome):
        baselines = {outcome.size.baseline_of(name) for name in shown}
        baseline = min(baselines) if len(baselines) == 1 else "its baseline"
        label = f"{outcome.study.measure.figures[0].title}, difference from {baseline}"
        with _figure(folder / chart_name(outcome), 1, (7, 0.8 + 0.35 * len(shown))) as (axes,):
            _draw_differences(axes, shown, label)
    if lines := curves(outcome):
        with _figure(folder / curves_name(outcome), 2, (7, 3)) as (left, right):
            _draw_curves(left, right, lines)


@contextmanager
def _figure(path: Path, columns: int, inches: tuple[float, float]) -> Iterator[Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    yield figure.subplots(1, columns, squeeze=False)[0]
    figure.savefig(path, dpi=100, bbox_inches="tight")


def _draw_differences(axes: Any, shown: dict[str, Difference], label: str) -> None:
    means = [pair.mean for pair in shown.values()]
    halves = [pair.mean - pair.low if pair.pairs > 1 else math.nan for pair in shown.values()]
    axes.errorbar(means, range(len(shown)), xerr=halves, fmt="o", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel(f"{label}, {'one seed' if all(map(math.isnan, halves)) else '95 % interval'}")


def _draw_curves(left: Any, right: Any, lines: dict[str, Curve]) -> None:
    for number, (name, curve) in enumerate(lines.items()):
        values = {
            key: [entry[key] for entry in curve.values()]
            for key in ("eval_top1", "train_loss", "eval_loss")
        }
        left.plot(list(curve), values["eval_top1"], color=f"C{number}", label=name)
        right.plot(list(curve), values["eval_loss"], color=f"C{number}")
        right.plot(list(curve), values["train_loss"], color=f"C{number}", linestyle="--")
    left.set(xlabel="epoch", ylabel="top-1 % in evaluation")
    left.legend(fontsize="small")
    right.set(xlabel="epoch", ylabel="loss (dashed: training)")
