"""Checks that the sentences about results still agree with the results."""

import re
from typing import Any

from .results import difference, interaction
from .statistics import BETTER, WORSE, Difference
from .study import Compared, Finding, Study

NUMBER = re.compile(r"(?<![\d.])[+-]?\d+\.\d+")
RANGE = re.compile(r"(\d+\.\d+) to (\d+\.\d+)")


def problems(finding: Finding, study: Study, size: str, results: dict[str, Any]) -> list[str]:
    """List where a finding disagrees with the results.

    A comparison must have the verdict that the finding states. If it is better or worse, its mean difference must be
    in the text, or lie in a range there ("0.58 to 0.79"). Every number with decimals in the text must be a mean or an
    end of an interval of these comparisons, or be quoted.
    """
    wrong: list[str] = []
    known = set(finding.quoted)
    numbers = NUMBER.findall(finding.text)
    for compared in finding.compared:
        figure = study.measure.figure(compared.figure)
        found = _find(compared, study, size, results, figure.key)
        verdict = "not measured" if found is None else found.verdict(figure.sign)
        names = f"{compared.first} / {compared.second}, {figure.title}"
        if found is None or verdict != compared.verdict:
            wrong.append(f"{names}: {verdict}, not {compared.verdict}")
            continue
        ends = (found.mean, found.low, found.high)
        known |= {f"{end:+.{figure.decimals}f}" for end in ends} | {f"{abs(end):.{figure.decimals}f}" for end in ends}
        middle = f"{abs(found.mean):.{figure.decimals}f}"
        ranges = [(float(low), float(high)) for low, high in RANGE.findall(finding.text)]
        is_written = middle in [number.lstrip("+-") for number in numbers]
        if verdict in (BETTER, WORSE) and not (is_written or any(low <= float(middle) <= high for low, high in ranges)):
            wrong.append(f"{names}: {middle} is not in the text")
    return wrong + [f"{number} is not a figure of these comparisons" for number in numbers if number not in known]


def _find(compared: Compared, study: Study, size: str, results: dict[str, Any], key: str) -> Difference | None:
    if (compared.first, compared.second) in study.interactions:
        return interaction(study.sizes[size], results, compared.first, compared.second, key)
    return difference(results, compared.first, compared.second, key)
