"""Charts of a study: differences to the baselines with their intervals, and curves of the trainings."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from .results import difference
from .statistics import Difference
from .study import Size, Study

#: From the epoch to the mean over the seeds of train_loss, eval_loss and eval_top1.
Curve = dict[int, dict[str, float]]


def chart_name(study: Study, size: str) -> str:
    """Name the file of the differences."""
    return f"study-{study.name}-{size}.png"


def curves_name(study: Study, size: str) -> str:
    """Name the file of the curves."""
    return f"study-{study.name}-{size}-curves.png"


def differences(study: Study, size: str, results: dict[str, Any]) -> dict[str, Difference]:
    """Compare each arm with its baseline by the first figure, where they share a seed."""
    of_size, key = study.sizes[size], study.measure.figures[0].key
    pairs = {arm.name: of_size.baseline_of(arm.name) for arm in of_size.arms}
    found = {name: difference(results, name, baseline, key) for name, baseline in pairs.items() if name != baseline}
    return {name: pair for name, pair in found.items() if pair is not None}


def curves(size: Size, results: dict[str, Any]) -> dict[str, Curve]:
    """Average the curves of each training that was evaluated on its way, by the first arm that comes from it."""
    arms = {arm.training.name: arm.name for arm in reversed(size.arms)}
    found = {}
    for training, name in reversed(arms.items()):
        known = [cost["curve"] for cost in results["cost"].get(training, {}).values() if cost.get("curve")]
        if known:
            epochs = zip(*known, strict=False)  # up to the last epoch that all seeds have
            found[name] = {of_seeds[0]["epoch"]: _means(of_seeds) for of_seeds in epochs}
    return found


def _means(of_seeds: tuple[dict[str, float], ...]) -> dict[str, float]:
    return {key: mean(entry[key] for entry in of_seeds) for key in ("train_loss", "eval_loss", "eval_top1")}


def draw(study: Study, size: str, results: dict[str, Any], folder: Path) -> None:
    """Write the charts for which there are results."""
    if shown := differences(study, size, results):
        baselines = {study.sizes[size].baseline_of(name) for name in shown}
        title = study.measure.figures[0].title
        with _figure(folder / chart_name(study, size), 1, (7, 0.8 + 0.35 * len(shown))) as (axes,):
            _draw_differences(axes, shown, f"{title}, difference to {'; '.join(sorted(baselines))}")
    if lines := curves(study.sizes[size], results):
        with _figure(folder / curves_name(study, size), 2, (7, 3)) as (left, right):
            _draw_curves(left, right, lines)


@contextmanager
def _figure(path: Path, columns: int, inches: tuple[float, float]) -> Iterator[Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    yield figure.subplots(1, columns, squeeze=False)[0]
    figure.savefig(path, dpi=100, bbox_inches="tight")


def _draw_differences(axes: Any, shown: dict[str, Difference], label: str) -> None:
    means = [pair.mean for pair in shown.values()]
    halves = [pair.mean - pair.low if pair.seeds > 1 else math.nan for pair in shown.values()]
    axes.errorbar(means, range(len(shown)), xerr=halves, fmt="o", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel(f"{label}, {'one seed' if all(map(math.isnan, halves)) else '95 % interval'}")


def _draw_curves(left: Any, right: Any, lines: dict[str, Curve]) -> None:
    for number, (name, curve) in enumerate(lines.items()):
        values = {key: [entry[key] for entry in curve.values()] for key in ("eval_top1", "train_loss", "eval_loss")}
        left.plot(list(curve), values["eval_top1"], color=f"C{number}", label=name)
        right.plot(list(curve), values["eval_loss"], color=f"C{number}")
        right.plot(list(curve), values["train_loss"], color=f"C{number}", linestyle="--")
    left.set(xlabel="epoch", ylabel="top-1 % in evaluation")
    left.legend(fontsize="small")
    right.set(xlabel="epoch", ylabel="loss (dashed: training)")
