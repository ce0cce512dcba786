"""The page of all results, written from the JSON files: tables, what the intervals allow to be said, and charts."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from .catalogue import STUDIES
from .chart import chart_name, differences, draw
from .measure import Figure
from .results import read
from .statistics import CONFIDENCE, Difference, paired, standard_error
from .study import Arm, Size, Study, Training

NOTHING = (
    "No study has been run yet: nothing here shows that EWA, routed experts or ensembles improve on dense training."
)
ONE_SEED = "one seed, which tells nothing"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TEMPLATE = Path(__file__).with_name("results.md")


def write(folder: Path) -> None:
    """Write the page, and a chart for each study that has results."""
    for study, size, results in stored(folder):
        draw(study, size, results, PAGE.parent / "images")
    PAGE.write_text(text(folder))


def text(folder: Path) -> str:
    """The page."""
    known = stored(folder)
    sections = "\n\n".join(section(study, size, results) for study, size, results in known)
    intervals = len(re.findall(r"\([+-][\d.]+ to [+-][\d.]+\)", sections))
    parts = {
        "{studies}": sections or NOTHING,
        "{recipes}": "\n\n".join(recipe(study, size) for study, size, _ in known),
        "{intervals}": f"{intervals} intervals",
        "{by chance}": f"about {round(intervals * (1 - CONFIDENCE))}",
    }
    whole = TEMPLATE.read_text()
    for place, part in parts.items():
        whole = whole.replace(place, part)
    return whole


def stored(folder: Path) -> list[tuple[Study, str, dict[str, Any]]]:
    """The studies that have results, each with its size."""
    return [
        (study, size, results)
        for study in STUDIES.values()
        for size in study.sizes
        if _has_figures(results := read(folder / f"{study.name}-{size}.json"))
    ]


def _has_figures(results: dict[str, Any]) -> bool:
    return any(figures_of(results, arm) for arm in results["arms"])


def section(study: Study, size: str, results: dict[str, Any]) -> str:
    """Of one study."""
    arms = [arm for arm in study.sizes[size].arms if figures_of(results, arm.name)]
    baseline = study.sizes[size].arms[0]
    figures = [figure for figure in study.measure.figures if any(_values(results, arm, figure) for arm in arms)]
    heads = [head for figure in figures for head in (figure.title, f"beside {baseline.name}, 95 % interval")]
    return "\n".join(
        [
            f"## {study.title}",
            "",
            f"{study.question} ({study.source}; `python -m studies {study.name} --size {size}`)",
            "",
            f"| | {' | '.join(heads)} | seeds | the paper | time in all | memory |",
            "|---" * (len(heads) + 5) + "|",
            *(_row(arm, figures, results, baseline) for arm in arms),
            "",
            *_sentences(study, size, figures, results),
            "",
            *_reading(study, size),
            *_chart(study, size, results),
            *_circumstances(results),
        ]
    )


def recipe(study: Study, size: str) -> str:
    """How the arms of a study are trained."""
    of_all = study.sizes[size]
    seeds = ", ".join(map(str, of_all.seeds))
    options = " ".join([*of_all.options, "--model-kwargs", *of_all.kwargs])
    return "\n".join(
        [
            f"### {study.title}: recipe",
            "",
            f"Seeds {seeds}. Of every training: `{options}`. Where an option comes again below, that counts.",
            "",
            "| | trained by, one after the other | deployed by |",
            "|---|---|---|",
            *(f"| {arm.name} | {_trained_by(arm, of_all)} | {arm.deployment.told} |" for arm in of_all.arms),
        ]
    )


def _trained_by(arm: Arm, size: Size) -> str:
    return "; ".join(_command(training, size) for training in arm.trainings())


def _command(training: Training, size: Size) -> str:
    kwargs = ["--model-kwargs", *training.kwargs] if training.kwargs else []
    options = " ".join(["--model", size.models[training.model], *kwargs, *training.options])
    more = f", callback `{training.callback}`" if training.callback else ""
    return f"`{options}`{more}{', another draw' if training.draw else ''}"


def figures_of(results: dict[str, Any], arm: str) -> dict[str, dict[str, float]]:
    """Of each seed."""
    return results["arms"].get(arm, {}).get("figures", {})


def _circumstances(results: dict[str, Any]) -> Iterator[str]:
    """Hardware and versions, and how many runs had a break."""
    costs = [cost for of_training in results["cost"].values() for cost in of_training.values()]
    for versions in sorted({tuple(cost["versions"].items()) for cost in costs}):
        yield "; ".join(name if key == "device" else f"{key} {name}" for key, name in versions) + "."
    broken = sum(not cost["whole"] for cost in costs)
    yield f"Of {len(costs)} trainings {broken} went on after a break."


def _reading(study: Study, size: str) -> list[str]:
    return [f"**Reading:** {study.readings[size]}", ""] if size in study.readings else []


def _chart(study: Study, size: str, results: dict[str, Any]) -> list[str]:
    if not differences(study, size, results):
        return []
    return [f"![The differences with their intervals](images/{chart_name(study, size)})", ""]


def _row(arm: Arm, figures: list[Figure], results: dict[str, Any], baseline: Arm) -> str:
    cells = [cell for figure in figures for cell in _cells(arm, figure, results, baseline)]
    own, base = (_cost(results, which) for which in (arm, baseline))
    time, memory = _ratio(own, base, "seconds"), _ratio(own, base, "peak_mib")
    seeds = len(figures_of(results, arm.name))
    return f"| {arm.name} | {' | '.join(cells)} | {seeds} | {arm.paper} | {time} | {memory} |"


def _cells(arm: Arm, figure: Figure, results: dict[str, Any], baseline: Arm) -> tuple[str, str]:
    """The mean, and the difference to the baseline."""
    values = _values(results, arm, figure)
    if not values:
        return "", ""
    digits = figure.decimals
    spread = f" ± {standard_error(list(values.values())):.{digits}f}" if len(values) > 1 else ""
    difference = None if arm is baseline else paired(values, _values(results, baseline, figure))
    shown = "" if difference is None else _interval(difference, figure)
    return f"{mean(values.values()):.{digits}f}{spread}", shown


def _interval(difference: Difference, figure: Figure) -> str:
    low, middle, high = (
        f"{value:+.{figure.decimals}f}" for value in (difference.low, difference.mean, difference.high)
    )
    return f"{middle} ({low} to {high})" if difference.seeds > 1 else middle


def _values(results: dict[str, Any], arm: Arm, figure: Figure) -> dict[str, float]:
    known = figures_of(results, arm.name)
    return {seed: figures[figure.key] for seed, figures in known.items() if figure.key in figures}


def _cost(results: dict[str, Any], arm: Arm) -> dict[str, dict[str, Any]]:
    """Of each seed, all trainings that an arm takes: the sum of their times, the most memory, and where they ran.

    Left out are seeds of which a training is missing, had a break, or ran elsewhere than the others.
    """
    of_trainings = [results["cost"].get(training.name, {}) for training in arm.trainings()]
    known: dict[str, dict[str, Any]] = {}
    for seed in set.intersection(*map(set, of_trainings)):
        costs = [of_training[seed] for of_training in of_trainings]
        devices = {cost["versions"]["device"] for cost in costs}
        if all(cost["whole"] for cost in costs) and len(devices) == 1:
            known[seed] = {
                "seconds": sum(cost["seconds"] for cost in costs),
                "peak_mib": max(cost["peak_mib"] for cost in costs),
                "device": devices.pop(),
            }
    return known


def _ratio(own: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]], key: str) -> str:
    """Of the means over the seeds that ran on the same device."""
    seeds = [seed for seed in own if seed in base and own[seed]["device"] == base[seed]["device"]]
    return f"{mean(own[seed][key] for seed in seeds) / mean(base[seed][key] for seed in seeds):.2f}" if seeds else ""


def _sentences(study: Study, size: str, figures: list[Figure], results: dict[str, Any]) -> Iterator[str]:
    """What the intervals allow to be said, of each arm and the baseline, and of the other pairs."""
    arms = {arm.name: arm for arm in study.sizes[size].arms}
    baseline, *others = arms
    for figure in figures:
        if not figure.sign:
            continue
        against = {name: _difference(results, arms[name], arms[baseline], figure) for name in others}
        known = {name: difference for name, difference in against.items() if difference is not None}
        yield from _verdicts(known, baseline, figure)
        for name, other in study.pairs:
            if not {name, other} <= set(arms):  # of another size
                continue
            difference = _difference(results, arms[name], arms[other], figure)
            if difference is not None:
                verdict = _verdict(difference, figure)
                yield f"- {figure.title}: *{name}* beside *{other}*: {verdict}, {_interval(difference, figure)}."


def _difference(results: dict[str, Any], arm: Arm, other: Arm, figure: Figure) -> Difference | None:
    return paired(_values(results, arm, figure), _values(results, other, figure))


def _verdicts(known: dict[str, Difference], baseline: str, figure: Figure) -> Iterator[str]:
    """One line for each verdict."""
    by_verdict: dict[str, list[str]] = {}
    for name, difference in known.items():
        by_verdict.setdefault(_verdict(difference, figure), []).append(f"*{name}*")
    if set(by_verdict) == {ONE_SEED}:
        yield f"- {figure.title} beside *{baseline}*: {ONE_SEED}."
        return
    for verdict, names in by_verdict.items():
        yield f"- {figure.title} beside *{baseline}*: {verdict}: {'; '.join(names)}."


def _verdict(difference: Difference, figure: Figure) -> str:
    return difference.verdict(figure.sign) if difference.seeds > 1 else ONE_SEED
