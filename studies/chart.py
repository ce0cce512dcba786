"""A chart of each study: the differences to the baseline with their intervals."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from .statistics import paired
from .study import Study


def draw(study: Study, size: str, results: dict[str, Any], folder: Path) -> None:
    """Write ``study-<name>-<size>.png``; nothing where no arm has two seeds beside the baseline."""
    baseline, *others = study.arms
    arms = results["arms"]
    pairs = {arm.name: paired(arms.get(arm.name, {}), arms.get(baseline.name, {})) for arm in others}
    shown = {name: pair for name, pair in pairs.items() if pair and math.isfinite(pair.low)}
    if not shown:
        return
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.4 * len(shown)), layout="constrained")
    means = [pair.mean for pair in shown.values()]
    axes.errorbar(means, range(len(shown)), xerr=[pair.mean - pair.low for pair in shown.values()], fmt="o", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    axes.set_xlabel(f"top-1 in points beside {baseline.name}, 95 % interval")
    figure.savefig(folder / f"study-{study.name}-{size}.png", dpi=100)
    pyplot.close(figure)
