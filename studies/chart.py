"""A chart of each study: the differences to the baseline with their intervals."""

import math
from pathlib import Path
from typing import Any

from .results import difference
from .statistics import Difference
from .study import Study


def chart_name(study: Study, size: str) -> str:
    """Of the file."""
    return f"study-{study.name}-{size}.png"


def differences(study: Study, size: str, results: dict[str, Any]) -> dict[str, Difference]:
    """Of the first figure, for the arms that share a seed with the baseline."""
    key = study.measure.figures[0].key
    baseline, *others = (arm.name for arm in study.sizes[size].arms)
    pairs = {name: difference(results, name, baseline, key) for name in others}
    return {name: pair for name, pair in pairs.items() if pair is not None}


def draw(study: Study, size: str, results: dict[str, Any], folder: Path) -> None:
    """Write the chart, if there are differences to show: of one seed points alone."""
    shown = differences(study, size, results)
    if not shown:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(figsize=(7, 0.8 + 0.35 * len(shown)), layout="constrained")
    means = [pair.mean for pair in shown.values()]
    halves = [pair.mean - pair.low if pair.seeds > 1 else math.nan for pair in shown.values()]
    axes.errorbar(means, range(len(shown)), xerr=halves, fmt="o", capsize=3)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(shown)), list(shown))
    axes.invert_yaxis()
    what = "one seed" if all(map(math.isnan, halves)) else "95 % interval"
    axes.set_xlabel(f"{study.measure.figures[0].title} beside {study.sizes[size].arms[0].name}, {what}")
    canvas.savefig(folder / chart_name(study, size), dpi=100, bbox_inches="tight")
    pyplot.close(canvas)
