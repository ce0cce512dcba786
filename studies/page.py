"""The page of all results, written from the JSON files: tables, what the intervals allow to be said, and charts."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from . import claims
from .catalogue import STUDIES
from .chart import chart_name, differences, draw
from .measure import Figure
from .results import difference, figures_of, read, values
from .statistics import CONFIDENCE, ONE_SEED, Difference, standard_error
from .study import Arm, Size, Study, Training

NOTHING = (
    "No study has been run yet: nothing here shows that EWA, routed experts or ensembles improve on dense training."
)
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TEMPLATE = Path(__file__).with_name("results.md")
SUMMARY = re.compile(rf"\{{(?P<study>{'|'.join(STUDIES)}): (?P<rest>[^{{}}]+)\}}")


def write(folder: Path) -> int:
    """Write the page, and a chart for each study that has results.

    Returns:
        How many of the page's claims the results do not bear out.
    """
    for study, size, results in stored(folder):
        draw(study, size, results, PAGE.parent / "images")
    PAGE.write_text(written := text(folder))
    return written.count(claims.NOT_BORNE_OUT)


def text(folder: Path) -> str:
    """The page."""
    known = stored(folder)
    sections = "\n\n".join(section(study, size, results) for study, size, results in known)
    shown = re.sub(r"^\*\*Reading.*$", "", sections, flags=re.MULTILINE)
    intervals = len(re.findall(r"\([+-][\d.]+ to [+-][\d.]+\)", shown))
    parts = {
        "{studies}": sections or NOTHING,
        "{recipes}": "\n\n".join(recipe(study, size, results) for study, size, results in known),
        "{intervals}": f"{intervals} intervals",
        "{by chance}": f"about {round(intervals * (1 - CONFIDENCE))}",
        "{hours}": f"{_hours(_costs_of_all(known)):.0f} hours",
    }
    whole = summary(TEMPLATE.read_text(), folder)
    for place, part in parts.items():
        whole = whole.replace(place, part)
    return whole


def summary(text: str, folder: Path) -> str:
    """A text with figures for its claims about several studies, ``{scratch: EWA, linear < dense}``, of small size."""
    return SUMMARY.sub(lambda claim: _filled(STUDIES[claim["study"]], claim["rest"], folder), text)


def _filled(study: Study, claim: str, folder: Path) -> str:
    return claims.fill(f"{{{claim}}}", study, read(folder / f"{study.name}-small.json"))


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
    figures = [figure for figure in study.measure.figures if any(values(results, arm.name, figure.key) for arm in arms)]
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
            *_reading(study, size, results),
            *_chart(study, size, results),
            *_circumstances(study, size, results),
        ]
    )


def recipe(study: Study, size: str, results: dict[str, Any]) -> str:
    """How the arms of a study were trained that have results."""
    of_all = study.sizes[size]
    arms = [arm for arm in of_all.arms if figures_of(results, arm.name)]
    seeds = ", ".join(sorted({seed for arm in arms for seed in figures_of(results, arm.name)}, key=int))
    options = " ".join([*of_all.options, "--model-kwargs", *of_all.kwargs])
    return "\n".join(
        [
            f"### {study.title}: recipe",
            "",
            f"Seeds {seeds}. Of every training: `{options}`. Where an option comes again below, that counts.",
            "",
            "| | trained by, one after the other | deployed by |",
            "|---|---|---|",
            *(f"| {arm.name} | {_trained_by(arm, of_all)} | {arm.deployment.told} |" for arm in arms),
        ]
    )


def _trained_by(arm: Arm, size: Size) -> str:
    return "; ".join(_command(training, size) for training in arm.trainings())


def _command(training: Training, size: Size) -> str:
    kwargs = ["--model-kwargs", *training.kwargs] if training.kwargs else []
    options = " ".join(["--model", size.models[training.model], *kwargs, *training.options])
    more = f", callback `{training.callback}`" if training.callback else ""
    return f"`{options}`{more}{', another draw' if training.draw else ''}"


def _circumstances(study: Study, size: str, results: dict[str, Any]) -> Iterator[str]:
    """What the intervals resolve, hardware and versions, how many runs had a break, and the time of all."""
    yield from _resolution(study, size, results)
    costs = _costs(results)
    for versions in sorted({tuple(cost["versions"].items()) for cost in costs}):
        yield "; ".join(name if key == "device" else f"{key} {name}" for key, name in versions) + "."
    broken = sum(not cost["whole"] for cost in costs)
    uncounted = ", without what they had done before it" if broken else ""
    yield f"Of {len(costs)} trainings {broken} went on after a break. All took {_hours(costs):.1f} hours{uncounted}."
    if len({cost["versions"]["device"] for cost in costs}) > 1:
        yield "They ran on several kinds of CPU, also some that are compared with each other."


def _resolution(study: Study, size: str, results: dict[str, Any]) -> Iterator[str]:
    halves = [found.high - found.mean for found in differences(study, size, results).values() if found.seeds > 1]
    if halves:
        half = median(halves)
        figure = study.measure.figures[0]
        yield f"In the median, an interval of {figure.title} reaches {half:.{figure.decimals}f} to either side."


def _costs(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all trainings."""
    return [cost for of_training in results["cost"].values() for cost in of_training.values()]


def _costs_of_all(known: list[tuple[Study, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of the trainings of all studies, each once: those of one setting share some."""
    each = {
        (study.sizes[size].setting, name, seed): cost
        for study, size, results in known
        for name, of_training in results["cost"].items()
        for seed, cost in of_training.items()
    }
    return list(each.values())


def _hours(costs: list[dict[str, Any]]) -> float:
    """Of trainings, one after the other."""
    return sum(cost["seconds"] for cost in costs) / 3600


def _reading(study: Study, size: str, results: dict[str, Any]) -> list[str]:
    if size not in study.readings:
        return []
    return [f"**Reading:** {claims.fill(study.readings[size], study, results)}", ""]


def _chart(study: Study, size: str, results: dict[str, Any]) -> list[str]:
    if not differences(study, size, results):
        return []
    return [f"![The differences](images/{chart_name(study, size)})", ""]


def _row(arm: Arm, figures: list[Figure], results: dict[str, Any], baseline: Arm) -> str:
    cells = [cell for figure in figures for cell in _cells(arm, figure, results, baseline)]
    own, base = (_cost(results, which) for which in (arm, baseline))
    time, memory = _ratio(own, base, "seconds"), _ratio(own, base, "peak_mib")
    seeds = len(figures_of(results, arm.name))
    return f"| {arm.name} | {' | '.join(cells)} | {seeds} | {arm.paper} | {time} | {memory} |"


def _cells(arm: Arm, figure: Figure, results: dict[str, Any], baseline: Arm) -> tuple[str, str]:
    """The mean, and the difference to the baseline."""
    known = list(values(results, arm.name, figure.key).values())
    if not known:
        return "", ""
    digits = figure.decimals
    spread = f" ± {standard_error(known):.{digits}f}" if len(known) > 1 else ""
    found = None if arm is baseline else difference(results, arm.name, baseline.name, figure.key)
    shown = "" if found is None else _interval(found, figure)
    return f"{mean(known):.{digits}f}{spread}", shown


def _interval(found: Difference, figure: Figure) -> str:
    low, middle, high = (f"{value:+.{figure.decimals}f}" for value in (found.low, found.mean, found.high))
    return f"{middle} ({low} to {high})" if found.seeds > 1 else middle


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
    baseline, *others = arms = [arm.name for arm in study.sizes[size].arms]
    for figure in figures:
        if not figure.sign:
            continue
        against = {name: difference(results, name, baseline, figure.key) for name in others}
        known = {name: found for name, found in against.items() if found is not None}
        yield from _verdicts(known, baseline, figure)
        for name, other in study.pairs:
            if not {name, other} <= set(arms):  # of another size
                continue
            found = difference(results, name, other, figure.key)
            if found is not None:
                verdict = found.verdict(figure.sign)
                yield f"- {figure.title}: *{name}* beside *{other}*: {verdict}, {_interval(found, figure)}."


def _verdicts(known: dict[str, Difference], baseline: str, figure: Figure) -> Iterator[str]:
    """One line for each verdict."""
    by_verdict: dict[str, list[str]] = {}
    for name, found in known.items():
        by_verdict.setdefault(found.verdict(figure.sign), []).append(f"*{name}*")
    if set(by_verdict) == {ONE_SEED}:
        yield f"- {figure.title} beside *{baseline}*: {ONE_SEED}."
        return
    for verdict, names in by_verdict.items():
        yield f"- {figure.title} beside *{baseline}*: {verdict}: {'; '.join(names)}."
