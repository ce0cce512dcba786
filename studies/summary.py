"""The table at the head of docs/results.md: a row for each question."""

from collections.abc import Sequence
from dataclasses import dataclass

from timm_moe.analysis.paired import BETTER, WORSE, Difference

from .catalogue.adamw import DENSE_STRONG
from .catalogue.ensembles import PBE, RIVALS
from .catalogue.recipe import RECIPES, to_dense
from .catalogue.routers import BELOW, EQUAL
from .catalogue.students import DISTILLED, LONG
from .catalogue.vimoe import IN_BLOCKS
from .measure import Figure
from .outcome import Outcome, by_seed, holm, published
from .study import Compared, compare


@dataclass(frozen=True)
class Row:
    """A question, and the comparisons that answer it.

    Attributes:
        question: its text in the table.
        compared: comparisons of one figure, by study. Their verdicts are not read.
        is_pooled: the pairs of all comparisons are taken together.
    """

    question: str
    compared: tuple[tuple[str, tuple[Compared, ...]], ...]
    is_pooled: bool = False


def _of(study: str, *compared: Compared) -> tuple[tuple[str, tuple[Compared, ...]], ...]:
    return ((study, compared),)


EWA = compare(("EWA, linear",), "", ("dense",))
ROWS = (
    Row("EWA, 120 epochs, strong recipe (primary)", _of("twenty", *EWA)),
    Row(
        "the same with the five earlier pairs",
        (("twenty", EWA), ("recipe", to_dense("EWA, linear", "", "strong"))),
        is_pooled=True,
    ),
    Row(
        "EWA whose experts differ more, strong recipe",
        _of("twenty", *compare(("EWA, 0.1 every ten steps",), "", ("dense",))),
    ),
    Row("EWA, fine-tuning by AdamW (primary)", _of("adamw", *EWA)),
    Row(
        "EWA, six other trainings",
        (
            ("scratch", EWA),
            ("confirmation", compare(("linear",), "", ("dense",))),
            ("finetuning", EWA),
            ("recipe", to_dense("EWA, linear", "", *RECIPES)),
        ),
    ),
    Row(
        "EWA's NLL, 120 epochs, strong recipe",
        _of("twenty", *compare(("EWA, linear",), "", ("dense",), "nll")),
    ),
    Row(
        "EWA's NLL, three recipes",
        _of("recipe", *to_dense("EWA, linear", "", *RECIPES, figure="nll")),
    ),
    Row("V-MoE, top-2 of 8, three recipes", _of("recipe", *to_dense("V-MoE, top-2", "", *RECIPES))),
    Row(
        "V-MoE's NLL, three recipes",
        _of("recipe", *to_dense("V-MoE, top-2", "", *RECIPES, figure="nll")),
    ),
    Row("six routers", _of("routers", *compare((*EQUAL, *BELOW), "", ("dense",)))),
    Row(
        "Switch, with and without averaging",
        _of("routing", *compare(("naive MoE", "MoE, Early EWA"), "", ("dense",))),
    ),
    Row("ViMoE, six forms", _of("vimoe", *compare(IN_BLOCKS, "", ("dense, trained on",)))),
    Row("pBE", _of("ensembles", *compare((PBE,), "", ("ViT",)))),
    Row(
        "pBE's NLL, compared with five other uses of one V-MoE",
        _of("ensembles", *compare((PBE,), "", RIVALS, "nll")),
    ),
    Row(
        "OneS, five students, compared with longer training alone",
        _of("students", *compare(DISTILLED.values(), "", (LONG,))),
    ),
    Row(
        "the strong recipe, compared with the weak and the medium one",
        _of("recipe", *compare(("dense, strong",), "", ("dense, weak", "dense, medium"))),
    ),
    Row(
        "the same in fine-tuning by AdamW, compared with the plain one",
        _of("adamw", *compare((DENSE_STRONG,), "", ("dense",))),
    ),
    Row(
        "its NLL there",
        _of("adamw", *compare((DENSE_STRONG,), "", ("dense",), "nll")),
    ),
    Row(
        "a third more epochs, strong recipe",
        _of("twenty", *compare(("dense, 160 epochs",), "", ("dense",))),
    ),
    Row(
        "dropout and half the initial weights, few images",
        _of("confirmation", *compare(("dense, initial weights / 2, dropout 0.1",), "", ("dense",))),
    ),
)


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """Make the rows of the table, but those that lack a comparison, or pairs of a primary one."""
    known = published(outcomes)
    return [_cells(row, known) for row in ROWS if _is_whole(row, known)]


def _is_whole(row: Row, known: dict[str, Outcome]) -> bool:
    """Tell if each comparison of a row has results."""
    return all(
        study in known and _is_compared(known[study], pair)
        for study, pairs in row.compared
        for pair in pairs
    )


def _is_compared(outcome: Outcome, pair: Compared) -> bool:
    """Tell if the two arms of a comparison share two seeds: one pair has no interval and no p."""
    figure = outcome.study.measure.figure(pair.figure)
    difference = outcome.difference(pair.first, pair.second, figure)
    return difference is not None and difference.pairs > 1


def _cells(row: Row, known: dict[str, Outcome]) -> dict[str, str]:
    each = [(known[study], pair) for study, pairs in row.compared for pair in pairs]
    figure = each[0][0].study.measure.figure(each[0][1].figure)
    found = _found(row, each, figure)
    return {
        "compared with dense training": row.question,
        "difference": _difference(found, figure),
        "seeds": "/".join(map(str, sorted({difference.pairs for difference in found}))),
        "clear after correction": _clear(row, each, found, figure),
    }


def _found(row: Row, each: list[tuple[Outcome, Compared]], figure: Figure) -> list[Difference]:
    if row.is_pooled:
        values = [
            by_seed(outcome.values(pair.first, figure), outcome.values(pair.second, figure))
            for outcome, pair in each
        ]
        return [Difference.of([value for of_one in values for value in of_one.values()])]
    return [
        difference
        for outcome, pair in each
        if (difference := outcome.difference(pair.first, pair.second, figure)) is not None
    ]


def _difference(found: list[Difference], figure: Figure) -> str:
    """Write a difference with its interval; of several, the ranges of both."""
    low, high = min(pair.low for pair in found), max(pair.high for pair in found)
    first, last = min(pair.mean for pair in found), max(pair.mean for pair in found)
    means = [first] if len(found) == 1 else [first, last]
    middle = " to ".join(f"{value:+.{figure.decimals}f}" for value in means)
    return f"{middle} ({_end(low, figure)} to {_end(high, figure)})"


def _end(value: float, figure: Figure) -> str:
    """Write an end of an interval, with one more decimal where it would look like 0."""
    decimals = figure.decimals + (round(value, figure.decimals) == 0)
    return f"{value:+.{decimals}f}"


def _clear(
    row: Row, each: list[tuple[Outcome, Compared]], found: list[Difference], figure: Figure
) -> str:
    """Say how many differences are clear after Holm's correction over those of the row.

    In a study with a primary comparison the correction is the study's.
    """
    within = holm(dict(enumerate(pair.p for pair in found)))
    verdicts = []
    for place, pair in enumerate(found):
        outcome, compared = each[place]
        is_corrected = outcome.study.primary is not None and not row.is_pooled
        p = (
            outcome.corrected(compared.first, compared.second, figure)
            if is_corrected
            else within[place]
        )
        verdicts.append(pair.verdict(figure.sign, p))
    clear = [verdict for verdict in verdicts if verdict in (BETTER, WORSE)]
    if len(found) == 1:
        return (clear or ["no"])[0]
    return (
        f"{len(clear)} of {len(found)}, {' and '.join(sorted({*clear}))}"
        if clear
        else f"none of {len(found)}"
    )
