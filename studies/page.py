"""The two pages of results and their pictures, made from the JSON files.

The pages are docs/results.md and docs/generated/studies.md.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from scipy.stats import sem

from timm_moe.analysis.paired import BETTER, CONFIDENCE, WORSE, Difference

from . import overview
from .catalogue import STUDIES
from .chart import chart_name, curves, curves_name, differences, draw
from .findings import problems
from .measure import Figure
from .operations import operations, routed_share
from .outcome import Outcome, costs_of_studies, hours
from .results import read
from .study import Arm, Size
from .summary import summary

NOTHING = "No study has been run yet."
DOCS = Path(__file__).parents[1] / "docs"
TEMPLATES = Path(__file__).parent

#: A cell by its head.
Row = dict[str, str]


def write(folder: Path) -> list[str]:
    """Write both pages, the charts of all studies that have results, and the README's picture.

    Returns:
        A line for each finding that disagrees with the results.
    """
    known = stored(folder)
    for outcome in known:
        if not (outcome.is_primary_pending() or _has_only_begun(outcome)):
            draw(outcome, DOCS / "images")
    overview.draw(known, DOCS / "images" / "methods.png")
    for page, text in pages(folder).items():
        (DOCS / page).write_text(text)
    return [
        f"{outcome.study.name}: {problem}"
        for outcome in known
        for finding in outcome.size.findings
        for problem in problems(finding, outcome)
    ]


def stored(folder: Path) -> list[Outcome]:
    """Read the results of all studies that have some."""
    outcomes = [
        Outcome(study, size, read(folder / f"{study.name}-{size}.json"))
        for study in STUDIES.values()
        for size in study.sizes
    ]
    return [outcome for outcome in outcomes if outcome.arms()]


def pages(folder: Path) -> dict[str, str]:
    """Write both pages as texts, by their names in docs/."""
    known = stored(folder)
    details = "\n\n".join(map(detailed, known)) or NOTHING
    intervals = len(re.findall(r"\([+-][\d.]+ to [+-][\d.]+\)", details))
    small = [outcome for outcome in known if outcome.size_name == "small"]
    places = {
        "{intervals}": f"{intervals} intervals",
        "{by chance}": f"about {round(intervals * (1 - CONFIDENCE))}",
        "{hours}": f"{hours(costs_of_studies(small)):.0f} hours",
    }
    full = (TEMPLATES / "details.md").read_text()
    for place, text in places.items():
        full = full.replace(place, text)
    questions = summary(known)
    short = (
        (TEMPLATES / "results.md")
        .read_text()
        .replace("{summary}", "\n".join(_table(questions)) if questions else NOTHING)
        .replace("{studies}", "\n\n".join(map(section, known)) or NOTHING)
    )
    return {"results.md": short, "generated/studies.md": full.replace("{studies}", details)}


def section(outcome: Outcome) -> str:
    """Write the section of docs/results.md.

    It has a table, the findings and the charts, once there is something to find.
    """
    study = outcome.study
    anchor = re.sub(r"[^a-z0-9 -]", "", study.title.lower()).replace(" ", "-")
    head = [
        f"## {study.title}",
        "",
        f"{study.question} ({study.source}; [in full](generated/studies.md#{anchor}))",
    ]
    if study.stated:
        head += ["", f"Stated before the runs: {study.stated}"]
    if outcome.is_primary_pending():
        return "\n".join([*head, "", _pending(outcome)])
    if _has_only_begun(outcome):
        return "\n".join([*head, "", "**Incomplete:** the full page has the figures so far."])
    figures = [figure for figure in study.measure.figures if figure.is_main]
    images = [f"![Differences](images/{chart_name(outcome)})"] if differences(outcome) else []
    images += [f"![Curves](images/{curves_name(outcome)})"] if curves(outcome) else []
    return "\n".join(
        [
            *head,
            *_incomplete(outcome),
            "",
            *_table(_rows(outcome, figures, _shown(outcome))),
            *(
                ["", *(f"- {finding.text}" for finding in outcome.size.findings)]
                if outcome.size.findings
                else []
            ),
            *(["", *images] if images else []),
        ]
    )


def detailed(outcome: Outcome) -> str:
    """Write the section of docs/generated/studies.md.

    It has all figures, pairs, recipes and circumstances.
    """
    study, size, arms = outcome.study, outcome.size, outcome.arms()
    head = [
        f"## {study.title}",
        "",
        f"`python -m studies {study.name} --size {outcome.size_name}`",
        *(["", f"Stated before the runs: {study.stated}"] if study.stated else []),
    ]
    if outcome.is_primary_pending():
        return "\n".join([*head, "", _pending(outcome)])
    pairs = [row for pair in outcome.further_pairs() if len(row := _pair(outcome, *pair)) > 2]
    options = " ".join([*size.options, *(["--model-kwargs", *size.kwargs] if size.kwargs else [])])
    recipes = [
        {
            "": arm.name,
            "trainings, one after the other": _trained_by(arm, size),
            "deployment": arm.deployment.description,
        }
        for arm in arms
    ]
    return "\n".join(
        [
            *head,
            *_incomplete(outcome),
            "",
            *_table(
                _rows(outcome, study.measure.figures, [arm.name for arm in arms], is_full=True)
            ),
            "",
            *(["Further comparisons:", "", *_table(pairs), ""] if pairs else []),
            f"Options of every training: `{options}`. A later option below overrides an earlier "
            "one.",
            "",
            *_table(recipes),
            "",
            *_circumstances(outcome),
        ]
    )


def _shown(outcome: Outcome) -> list[str]:
    """Name the arms that the findings compare, and their baselines.

    If the findings compare none, these are all arms.
    """
    compared = {name for pair in outcome.size.compared() for name in pair}
    compared |= {outcome.size.baseline_of(name) for name in compared}
    return [arm.name for arm in outcome.size.arms if arm.name in compared or not compared]


def _pending(outcome: Outcome) -> str:
    """Say how many pairs of a primary comparison are there; no difference is shown before all."""
    known, stated = outcome.primary_pairs()
    return (
        f"**Incomplete:** {known} of {stated} pairs are trained. Differences are shown when all "
        "are."
    )


def _has_only_begun(outcome: Outcome) -> bool:
    """Tell if results are missing and nothing was found yet."""
    return bool(_incomplete(outcome)) and not outcome.size.findings


def _incomplete(outcome: Outcome) -> list[str]:
    """Say which results are missing, if some are."""
    lacking = []
    for arm in outcome.size.arms:
        number, wanted = len(outcome.seeds(arm.name)), len(outcome.size.seeds_of(arm.training))
        if number < wanted:
            lacking.append(f"*{arm.name}* ({number} of {wanted} seeds)")
    return ["", f"**Incomplete:** {'; '.join(lacking)}."] if lacking else []


def _table(rows: list[Row]) -> list[str]:
    """Write rows as a table, without the columns that are empty in all of them."""
    heads = [
        head
        for head in dict.fromkeys(head for row in rows for head in row)
        if any(row.get(head) for row in rows)
    ]
    lines = [
        f"| {' | '.join(cells)} |"
        for cells in (heads, *([row.get(head, "") for head in heads] for row in rows))
    ]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]]


def _rows(
    outcome: Outcome, figures: Sequence[Figure], names: Sequence[str], is_full: bool = False
) -> list[Row]:
    """Make a row for each of the arms that has results, and for each interaction of two of them.

    Args:
        outcome: the study with its results.
        figures: figures to show.
        names: names of the arms to show.
        is_full: show standard errors, seeds, and interactions that no finding is about.
    """
    size = outcome.size
    arms = [arm for arm in outcome.arms() if arm.name in names]
    baselines = {size.baseline_of(arm.name) for arm in arms}
    to = f"difference from {min(baselines)}" if len(baselines) == 1 else "difference"
    to += ", one seed" if all(len(outcome.seeds(arm.name)) == 1 for arm in arms) else ""
    heads = {figure: to if len(figures) == 1 else f"{figure.title}: {to}" for figure in figures}
    shares = {arm.name: routed_share(arm, size) for arm in arms}
    routes = any(share is not None for share in shares.values())
    rows = []
    for arm in arms:
        baseline, number = size.baseline_of(arm.name), len(outcome.seeds(arm.name))
        is_plain = len(baselines) == 1 or baseline == arm.name
        row = {"": arm.name, "compared with": "" if is_plain else baseline}
        for figure in figures:
            row[figure.title] = _mean(outcome, arm, figure, is_full)
            row[heads[figure]] = _judged(outcome, (arm.name, baseline), figure)
        row["seeds"] = str(number) if is_full or number != len(size.seeds) else ""
        row["primary"] = "primary" if outcome.study.primary == (arm.name, baseline) else ""
        row["operations"] = ""
        if routes and baseline != arm.name:
            relative = operations(arm, size) / operations(size.arm(baseline), size)
            row["operations"] = f"{relative:.2f}"
        share = shares[arm.name]
        row["routed"] = "" if share is None else f"{share:.0%}"
        row["the paper"] = arm.paper
        rows.append(row)
    compared = outcome.size.compared()
    for first, second in outcome.study.interactions:
        found = {figure: outcome.interaction(first, second, figure) for figure in figures}
        cells = {heads[figure]: _interval(pair, figure) for figure, pair in found.items() if pair}
        if cells and (is_full or not compared or (first, second) in compared):
            rows.append(
                {
                    "": f"*{second}* to *{first}*",
                    "compared with": "change of the difference",
                    **cells,
                }
            )
    return rows


def _pair(outcome: Outcome, first: str, second: str) -> Row:
    figures = [figure for figure in outcome.study.measure.figures if figure.sign]
    cells = {figure.title: _judged(outcome, (first, second), figure) for figure in figures}
    return {
        "": first,
        "compared with": second,
        **{title: cell for title, cell in cells.items() if cell},
    }


def _mean(outcome: Outcome, arm: Arm, figure: Figure, with_error: bool) -> str:
    known = list(outcome.values(arm.name, figure).values())
    if not known:
        return ""
    spread = f" ± {sem(known):.{figure.decimals}f}" if with_error and len(known) > 1 else ""
    return f"{mean(known):.{figure.decimals}f}{spread}"


def _judged(outcome: Outcome, pair: tuple[str, str], figure: Figure) -> str:
    """Write the difference of two arms, its interval and a corrected p-value.

    If it is so, the text says "better" or "worse".
    """
    first, second = pair
    found = None if first == second else outcome.difference(first, second, figure)
    if found is None:
        return ""
    text = _interval(found, figure)
    corrected = outcome.corrected(first, second, figure)
    if corrected is not None and found.pairs > 2:
        text += f", Holm's p {'< 0.001' if corrected < 0.001 else f'= {corrected:.3f}'}"
    verdict = outcome.verdict(first, second, figure) if figure.sign else ""
    return f"{text}, {verdict}" if verdict in (BETTER, WORSE) else text


def _interval(found: Difference, figure: Figure) -> str:
    low, middle, high = (
        f"{value:+.{figure.decimals}f}" for value in (found.low, found.mean, found.high)
    )
    return f"{middle} ({low} to {high})" if found.pairs > 1 else middle


def _trained_by(arm: Arm, size: Size) -> str:
    commands = []
    for training in arm.trainings():
        kwargs = ["--model-kwargs", *training.kwargs] if training.kwargs else []
        options = " ".join(["--model", size.models[training.model], *kwargs, *training.options])
        callback = f", callback `{training.callback}`" if training.callback else ""
        commands.append(f"`{options}`{callback}{', another draw' if training.draw else ''}")
    return "; ".join(commands)


def _half_width(outcome: Outcome) -> list[str]:
    """Say how wide the interval of the primary comparison is, else those of all arms."""
    figure, primary = outcome.study.measure.figures[0], outcome.study.primary
    if primary is not None:
        found = outcome.difference(*primary, figure)
        pairs, which = [found] if found else [], "of the primary comparison"
    else:
        pairs, which = list(differences(outcome).values()), "in the median"
    halves = [pair.high - pair.mean for pair in pairs if pair.pairs > 1]
    if not halves:
        return []
    half = f"{median(halves):.{figure.decimals}f}"
    return [f"Half the width of an interval of {figure.title}, {which}: {half}."]


def _circumstances(outcome: Outcome) -> Iterator[str]:
    """Report seeds, widths of the intervals, hardware, versions, resumed trainings and time."""
    seeds = {seed for arm in outcome.size.arms for seed in outcome.seeds(arm.name)}
    yield f"Seeds {', '.join(sorted(seeds, key=int))}."
    yield from _half_width(outcome)
    costs = costs_of_studies([outcome])
    for versions in sorted({tuple(cost["versions"].items()) for cost in costs}):
        yield (
            "; ".join(name if key == "device" else f"{key} {name}" for key, name in versions) + "."
        )
    resumed = sum(not cost["whole"] for cost in costs)
    uncounted = ", not counting what came before the break" if resumed else ""
    yield (
        f"{len(costs)} trainings, {resumed} of them resumed after a break; {hours(costs):.1f} "
        f"hours{uncounted}."
    )
    if len({cost["versions"]["device"] for cost in costs}) > 1:
        yield (
            "Arms that are compared ran in part on different devices, or with other numbers of "
            "threads."
        )
