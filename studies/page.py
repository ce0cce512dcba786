"""The page of all results, written from the JSON files: tables, what the intervals allow to be said, and charts."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from .catalogue import STUDIES
from .statistics import Difference, paired, standard_error
from .study import Arm, Study

NOTHING = (
    "No study has been run yet: nothing here shows that EWA, routed experts or ensembles improve on dense training."
)
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TEMPLATE = Path(__file__).with_name("results.md")


def write(folder: Path) -> None:
    """Write the page, and a chart for each study that has results."""
    from .chart import draw

    for study, size, results in stored(folder):
        draw(study, size, results, PAGE.parent / "images")
    PAGE.write_text(text(folder))


def text(folder: Path) -> str:
    """The page."""
    sections = [section(study, size, results) for study, size, results in stored(folder)]
    return TEMPLATE.read_text().replace("{studies}", "\n\n".join(sections) or NOTHING)


def stored(folder: Path) -> list[tuple[Study, str, dict[str, Any]]]:
    """The studies that have results, each with its size."""
    return [
        (study, size, json.loads(path.read_text()))
        for study in STUDIES.values()
        for size in study.sizes
        if (path := folder / f"{study.name}-{size}.json").exists()
    ]


def section(study: Study, size: str, results: dict[str, Any]) -> str:
    """Of one study."""
    arms = [arm for arm in study.arms if results["arms"].get(arm.name)]
    baseline = study.arms[0]
    differences = {arm.name: paired(results["arms"][arm.name], results["arms"][baseline.name]) for arm in arms[1:]}
    lines = [
        f"## {study.title}",
        "",
        f"{study.question} ({study.source}; `python -m studies {study.name} --size {size}`)",
        "",
    ]
    lines += [
        f"| | top-1 % | difference to {baseline.name}, 95 % interval | seeds | the paper | CPU time | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(arm, results, differences.get(arm.name), baseline) for arm in arms]
    lines += ["", *(_sentence(name, difference, baseline) for name, difference in differences.items() if difference)]
    versions = results["versions"]
    lines += [
        "",
        f"{versions['device']}; torch {versions['torch']}, timm {versions['timm']}, Python {versions['python']}.",
    ]
    return "\n".join(lines)


def _row(arm: Arm, results: dict[str, Any], difference: Difference | None, baseline: Arm) -> str:
    figures = list(results["arms"][arm.name].values())
    spread = f" ± {standard_error(figures):.2f}" if len(figures) > 1 else ""
    shown = f"{difference.mean:+.2f} ({difference.low:+.2f} to {difference.high:+.2f})" if difference else ""
    paper = "" if arm.paper is None else f"{arm.paper:.2f}"
    own, base = (_cost(results, which) for which in (arm, baseline))
    time = f"{own['cpu_seconds'] / base['cpu_seconds']:.2f}" if own and base else ""
    memory = f"{own['peak_mib'] / base['peak_mib']:.2f}" if own and base else ""
    return f"| {arm.name} | {mean(figures):.2f}{spread} | {shown} | {len(figures)} | {paper} | {time} | {memory} |"


def _cost(results: dict[str, Any], arm: Arm) -> dict[str, float] | None:
    """Mean cost of the trainings of an arm that were not interrupted."""
    whole = [cost for cost in results["cost"].get(arm.training.name, {}).values() if cost["whole"]]
    return {name: mean(cost[name] for cost in whole) for name in ("cpu_seconds", "peak_mib")} if whole else None


def _sentence(name: str, difference: Difference, baseline: Arm) -> str:
    """What the interval allows to be said."""
    if difference.seeds < 2:
        return f"- {name}: one seed, which tells nothing."
    if difference.verdict == "not told apart":
        return f"- {name}: not told apart from {baseline.name}."
    return f"- {name}: {difference.verdict} than {baseline.name}."
