"""What a text says of results, as claims that become figures where the intervals bear them out.

    {linear > dense}               better, and by how much: 0.68
    {late; early < dense}          worse: from the least of several to the most, 0.31 to 0.54
    {late; early = dense}          not told apart, in these words
    {late - dense}                 the mean difference, of which nothing is claimed: -0.54
    {interval of linear > dense}   the interval, 0.03 to 1.33, which must be better
    {NLL; ECE: linear = dense}     by other figures than the study's first

Results may be measured anew. A claim that they do not bear out says so in its place, as does one that names
what is not there.
"""

import re
from itertools import product
from typing import Any

from .measure import Figure
from .results import difference
from .statistics import NOT_TOLD_APART, Difference
from .study import Study

CLAIM = re.compile(
    r"\{(?P<interval>interval of )?((?P<figures>[^:{}]+): )?(?P<first>[^{}]+) (?P<sign>[<>=-]) (?P<second>[^{}]+)\}"
)
VERDICTS = {">": "better", "<": "worse", "=": NOT_TOLD_APART}
NOT_BORNE_OUT = "not borne out"


def fill(text: str, study: Study, results: dict[str, Any]) -> str:
    """The text with figures for its claims.

    Args:
        text: says something of the study.
        study: whose arms and figures the claims name.
        results: of the study.
    """
    return CLAIM.sub(lambda claim: _fill(claim, study, results), text)


def _fill(claim: re.Match[str], study: Study, results: dict[str, Any]) -> str:
    try:
        figures = _figures(study, claim)
    except ValueError as error:
        return _marked(str(error))
    known = [(pair, figure, difference(results, *pair, figure.key)) for pair in pairs(claim) for figure in figures]
    wrong = [
        f"*{first}* beside *{second}* in {figure.title}: {told}"
        for (first, second), figure, found in known
        if (told := _contradiction(found, figure, claim))
    ]
    if wrong:
        return _marked("; ".join(wrong))
    return _shown([found for _, _, found in known if found is not None], figures[0], claim)


def _marked(why: str) -> str:
    return f"**[{NOT_BORNE_OUT}: {why}]**"


def pairs(claim: re.Match[str]) -> list[tuple[str, str]]:
    """The arms that a claim compares, each with each."""
    return list(product(claim["first"].split("; "), claim["second"].split("; ")))


def _figures(study: Study, claim: re.Match[str]) -> list[Figure]:
    """By which two arms are compared.

    Raises:
        ValueError: if the study lacks one; if there are several where a number is asked for, as their units differ.
    """
    by_title = {figure.title: figure for figure in study.measure.figures}
    titles = claim["figures"].split("; ") if claim["figures"] else list(by_title)[:1]
    if not set(titles) <= set(by_title):
        raise ValueError(f"{claim[0].strip('{}')}: the figures are {', '.join(by_title)}")
    if len(titles) > 1 and (claim["sign"] != "=" or claim["interval"]):
        raise ValueError(f"{claim[0].strip('{}')}: a number is of one figure")
    return [by_title[title] for title in titles]


def _contradiction(found: Difference | None, figure: Figure, claim: re.Match[str]) -> str:
    """Why a claim is not borne out; nothing where it is."""
    if found is None:
        return "not measured"
    if claim["sign"] == "-" and not (claim["interval"] and found.seeds == 1):
        return ""
    verdict = found.verdict(figure.sign)
    return "" if verdict == VERDICTS.get(claim["sign"]) else verdict


def _shown(known: list[Difference], figure: Figure, claim: re.Match[str]) -> str:
    """From the least to the most; without signs where the verdict says which way."""
    if claim["interval"]:
        ends = [end for found in known for end in (found.low, found.high)]
    elif claim["sign"] == "=":
        return NOT_TOLD_APART
    else:
        ends = [found.mean for found in known]
    signed = claim["sign"] in "=-"
    ends = ends if signed else [abs(end) for end in ends]
    shown = [f"{end:{'+' if signed else ''}.{figure.decimals}f}" for end in (min(ends), max(ends))]
    return " to ".join(dict.fromkeys(shown))
