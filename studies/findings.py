"""Checks that the sentences about results still agree with the results."""

import re

from timm_moe.analysis.paired import BETTER, WORSE

from .outcome import Outcome
from .study import Finding

NUMBER = re.compile(r"(?<![\d.])[+-]?\d+\.\d+")
RANGE = re.compile(r"(\d+\.\d+) to (\d+\.\d+)")


def problems(finding: Finding, outcome: Outcome) -> list[str]:
    """List where a finding disagrees with the results.

    A comparison must have the verdict that the finding states. If it is better or worse, its mean
    difference must be in the text, or lie in a range there ("0.58 to 0.79"). Every number with
    decimals in the text must be a mean or an end of an interval of these comparisons, or be quoted.
    """
    wrong: list[str] = []
    known = set(finding.quoted)
    numbers = NUMBER.findall(finding.text)
    ranges = [(float(low), float(high)) for low, high in RANGE.findall(finding.text)]
    for compared in finding.compared:
        pair, figure = (
            (compared.first, compared.second),
            outcome.study.measure.figure(compared.figure),
        )
        is_interaction = pair in outcome.study.interactions
        found = (outcome.interaction if is_interaction else outcome.difference)(*pair, figure)
        if found is None:
            verdict = "not measured"
        else:
            verdict = (
                found.verdict(figure.sign) if is_interaction else outcome.verdict(*pair, figure)
            )
        names = f"{' / '.join(pair)}, {figure.title}"
        if found is None or verdict != compared.verdict:
            wrong.append(f"{names}: {verdict}, not {compared.verdict}")
            continue
        ends = (found.mean, found.low, found.high)
        known |= {f"{end:+.{figure.decimals}f}" for end in ends} | {
            f"{abs(end):.{figure.decimals}f}" for end in ends
        }
        middle = f"{abs(found.mean):.{figure.decimals}f}"
        is_written = middle in [number.lstrip("+-") for number in numbers]
        if verdict in (BETTER, WORSE) and not (
            is_written or any(low <= float(middle) <= high for low, high in ranges)
        ):
            wrong.append(f"{names}: {middle} is not in the text")
    return wrong + [
        f"{number} is not a figure of these comparisons"
        for number in numbers
        if number not in known
    ]
