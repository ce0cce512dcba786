"""The two pages of results, written from the JSON files: docs/results.md and docs/generated/studies.md."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from .catalogue import STUDIES
from .chart import chart_name, curves, curves_name, differences, draw
from .costs import all_costs, cost_of, costs_of_studies, hours, ratio
from .findings import problems
from .measure import Figure
from .results import difference, figures_of, interaction, read, values
from .statistics import BETTER, CONFIDENCE, WORSE, Difference, standard_error
from .study import Arm, Size, Study, Training

NOTHING = "No study has been run yet."
DOCS = Path(__file__).parents[1] / "docs"
#: The pages, by the texts around their studies.
PAGES = {"results.md": "results.md", "generated/studies.md": "details.md"}
TEMPLATES = Path(__file__).parent

Stored = list[tuple[Study, str, dict[str, Any]]]


def write(folder: Path) -> list[str]:
    """Write both pages and the charts of all studies that have results.

    Returns:
        A line for each finding that disagrees with the results.
    """
    known = stored(folder)
    for study, size, results in known:
        draw(study, size, results, DOCS / "images")
    for page, written in pages(folder).items():
        (DOCS / page).write_text(written)
    return [
        f"{study.name}: {problem}"
        for study, size, results in known
        for finding in study.findings.get(size, ())
        for problem in problems(finding, study, size, results)
    ]


def stored(folder: Path) -> Stored:
    """Read the results of all studies that have some, each with its size."""
    return [
        (study, size, results)
        for study in STUDIES.values()
        for size in study.sizes
        if _measured(study.sizes[size], results := read(folder / f"{study.name}-{size}.json"))
    ]


def pages(folder: Path) -> dict[str, str]:
    """Write both pages as texts, by their names in docs/."""
    known = stored(folder)
    details = "\n\n".join(detailed(study, size, results) for study, size, results in known) or NOTHING
    intervals = len(re.findall(r"\([+-][\d.]+ to [+-][\d.]+\)", details))
    parts = {
        "results.md": "\n\n".join(section(study, size, results) for study, size, results in known) or NOTHING,
        "details.md": details,
    }
    places = {
        "{intervals}": f"{intervals} intervals",
        "{by chance}": f"about {round(intervals * (1 - CONFIDENCE))}",
        "{hours}": f"{hours(costs_of_studies(known)):.0f} hours",
    }
    written = {}
    for page, template in PAGES.items():
        text = (TEMPLATES / template).read_text()
        for place, part in {**places, "{studies}": parts[template]}.items():
            text = text.replace(place, part)
        written[page] = text
    return written


def section(study: Study, size: str, results: dict[str, Any]) -> str:
    """Write the section of docs/results.md: a table, the findings and the charts."""
    figures = [figure for figure in study.measure.figures if figure.is_main]
    images = [f"![Differences](images/{chart_name(study, size)})"] if differences(study, size, results) else []
    images += [f"![Curves](images/{curves_name(study, size)})"] if curves(study.sizes[size], results) else []
    anchor = re.sub(r"[^a-z0-9 -]", "", study.title.lower()).replace(" ", "-")
    return "\n".join(
        [
            f"## {study.title}",
            "",
            f"{study.question} ({study.source}; [in full](generated/studies.md#{anchor}))",
            *_incomplete(study.sizes[size], results),
            "",
            *_table(_rows(study, size, results, figures, _shown(study, size))),
            "",
            *(f"- {finding.text}" for finding in study.findings.get(size, ())),
            *(["", *images] if images else []),
        ]
    )


def detailed(study: Study, size: str, results: dict[str, Any]) -> str:
    """Write the section of docs/generated/studies.md: all figures, pairs, costs, recipes and circumstances."""
    of_size = study.sizes[size]
    arms = _measured(of_size, results)
    pairs = [row for first, second in study.pairs if len(row := _pair(study, results, first, second)) > 2]
    options = " ".join([*of_size.options, "--model-kwargs", *of_size.kwargs])
    recipes = [
        {
            "": arm.name,
            "trained by, one after the other": _trained_by(arm, of_size),
            "deployed by": arm.deployment.description,
        }
        for arm in arms
    ]
    return "\n".join(
        [
            f"## {study.title}",
            "",
            f"`python -m studies {study.name} --size {size}`",
            *_incomplete(of_size, results),
            "",
            *_table(_rows(study, size, results, study.measure.figures, [arm.name for arm in arms], is_full=True)),
            "",
            *(["Further comparisons:", "", *_table(pairs), ""] if pairs else []),
            f"Options of every training: `{options}`. A later option below overrides an earlier one.",
            "",
            *_table(recipes),
            "",
            *_circumstances(study, size, results),
        ]
    )


def _shown(study: Study, size: str) -> list[str]:
    """Name the arms that the findings are about, and their baselines; all arms if there are no findings yet."""
    of_size, findings = study.sizes[size], study.findings.get(size, ())
    compared = {name for finding in findings for pair in finding.compared for name in (pair.first, pair.second)}
    compared |= {of_size.baseline_of(name) for name in compared}
    return [arm.name for arm in of_size.arms if arm.name in compared or not findings]


def _measured(size: Size, results: dict[str, Any]) -> list[Arm]:
    return [arm for arm in size.arms if figures_of(results, arm.name)]


def _incomplete(size: Size, results: dict[str, Any]) -> list[str]:
    """Say which results are missing, if some are."""
    seeds, wanted = {arm.name: len(figures_of(results, arm.name)) for arm in size.arms}, len(size.seeds)
    lacking = [f"*{name}* ({number} of {wanted} seeds)" for name, number in seeds.items() if number < wanted]
    return ["", f"**Incomplete:** {'; '.join(lacking)}."] if lacking else []


def _table(rows: list[dict[str, str]]) -> list[str]:
    """Write rows, each a cell by its head, without the columns that are empty in all of them."""
    heads = [head for head in dict.fromkeys(head for row in rows for head in row) if any(row.get(head) for row in rows)]
    heads = ["", *heads] if "" not in heads else heads
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *([row.get(head, "") for head in heads] for row in rows))]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


def _rows(
    study: Study,
    size: str,
    results: dict[str, Any],
    figures: Sequence[Figure],
    names: Sequence[str],
    is_full: bool = False,
) -> list[dict[str, str]]:
    """Write a row for each of the arms that has results, and for each interaction of two of them.

    Args:
        study: the study.
        size: its size.
        results: its results.
        figures: figures to show.
        names: names of the arms to show.
        is_full: show standard errors, seeds and costs.
    """
    of_size = study.sizes[size]
    arms = [arm for arm in _measured(of_size, results) if arm.name in names]
    baselines = {of_size.baseline_of(arm.name) for arm in arms}
    to = f"difference to {min(baselines)}" if len(baselines) == 1 else "difference"
    rows = []
    for arm in arms:
        baseline = of_size.baseline_of(arm.name)
        is_one = len(baselines) == 1 or baseline == arm.name
        row = {"": arm.name, "compared with": "" if is_one else baseline}
        for figure in figures:
            row[figure.title] = _mean(results, arm, figure, is_full)
            found = None if baseline == arm.name else difference(results, arm.name, baseline, figure.key)
            row[_head(figure, figures, to)] = _judged(found, figure)
        number = len(figures_of(results, arm.name))
        row["seeds"] = str(number) if is_full or number != len(of_size.seeds) else ""
        row["the paper"] = arm.paper
        if is_full:
            own, base = (cost_of(results, of_size.arm(name)) for name in (arm.name, baseline))
            row |= {"time": ratio(own, base, "seconds"), "memory": ratio(own, base, "peak_mib")}
        rows.append(row)
    for first, second in study.interactions:
        found_by = {figure: interaction(of_size, results, first, second, figure.key) for figure in figures}
        cells = {_head(figure, figures, to): _interval(pair, figure) for figure, pair in found_by.items() if pair}
        if cells and {first, second} <= set(names):
            rows.append({"": f"*{first}* less *{second}*", "compared with": "difference of differences", **cells})
    return rows


def _head(figure: Figure, figures: Sequence[Figure], to: str) -> str:
    return to if len(figures) == 1 else f"{figure.title}: {to}"


def _pair(study: Study, results: dict[str, Any], first: str, second: str) -> dict[str, str]:
    found = {figure: difference(results, first, second, figure.key) for figure in study.measure.figures}
    cells = {figure.title: _judged(pair, figure) for figure, pair in found.items() if pair}
    return {"": first, "compared with": second, **cells}


def _mean(results: dict[str, Any], arm: Arm, figure: Figure, with_error: bool) -> str:
    known = list(values(results, arm.name, figure.key).values())
    if not known:
        return ""
    spread = f" ± {standard_error(known):.{figure.decimals}f}" if with_error and len(known) > 1 else ""
    return f"{mean(known):.{figure.decimals}f}{spread}"


def _judged(found: Difference | None, figure: Figure) -> str:
    """Write a difference, its interval, and "better" or "worse" if the interval allows it."""
    if found is None:
        return ""
    verdict = found.verdict(figure.sign) if figure.sign else ""
    return f"{_interval(found, figure)}{f', {verdict}' if verdict in (BETTER, WORSE) else ''}"


def _interval(found: Difference, figure: Figure) -> str:
    low, middle, high = (f"{value:+.{figure.decimals}f}" for value in (found.low, found.mean, found.high))
    return f"{middle} ({low} to {high})" if found.seeds > 1 else middle


def _trained_by(arm: Arm, size: Size) -> str:
    return "; ".join(_command(training, size) for training in arm.trainings())


def _command(training: Training, size: Size) -> str:
    kwargs = ["--model-kwargs", *training.kwargs] if training.kwargs else []
    options = " ".join(["--model", size.models[training.model], *kwargs, *training.options])
    callback = f", callback `{training.callback}`" if training.callback else ""
    return f"`{options}`{callback}{', another draw' if training.draw else ''}"


def _circumstances(study: Study, size: str, results: dict[str, Any]) -> Iterator[str]:
    """Report seeds, widths of the intervals, hardware, versions, resumed trainings and time."""
    seeds = {seed for arm in study.sizes[size].arms for seed in figures_of(results, arm.name)}
    yield f"Seeds {', '.join(sorted(seeds, key=int))}."
    halves = [found.high - found.mean for found in differences(study, size, results).values() if found.seeds > 1]
    if halves:
        figure = study.measure.figures[0]
        yield f"Half the width of an interval of {figure.title}, in the median: {median(halves):.{figure.decimals}f}."
    costs = all_costs(results)
    for versions in sorted({tuple(cost["versions"].items()) for cost in costs}):
        yield "; ".join(name if key == "device" else f"{key} {name}" for key, name in versions) + "."
    resumed = sum(not cost["whole"] for cost in costs)
    uncounted = ", not counting what came before the break" if resumed else ""
    yield f"{len(costs)} trainings, {resumed} of them resumed after a break; {hours(costs):.1f} hours{uncounted}."
    if len({cost["versions"]["device"] for cost in costs}) > 1:
        yield "Arms that are compared ran on different kinds of CPU in part."
