"""Checks that the sentences about results still agree with the results."""

import math
import re

from timm_moe.analysis.paired import BETTER, CONFIDENCE, WORSE, Difference

from .outcome import Outcome, holm
from .study import Compared, Finding

NUMBER = re.compile(r"(?<![\d.])[+-]?\d+\.\d+")
RANGE = re.compile(r"(\d+\.\d+) to (\d+\.\d+)")
#: What a text says of a difference whose interval excludes zero, but whose corrected p does not.
AFTER_HOLM = "Holm"


def problems(finding: Finding, outcome: Outcome) -> list[str]:
    """List where a finding disagrees with the results.

    A comparison must have the verdict that the finding states. If it is better or worse, its mean
    difference must be in the text, or lie in a range there ("0.58 to 0.79"). If it is not clear
    after Holm's correction, over the study's secondary comparisons or else over those of the
    finding, the text must speak of this correction. Every number with decimals in the text must be
    a mean, an end of an interval or a corrected p-value of these comparisons, or be quoted.
    """
    wrong: list[str] = []
    known = set(finding.quoted)
    numbers = NUMBER.findall(finding.text)
    ranges = [(float(low), float(high)) for low, high in RANGE.findall(finding.text)]
    corrected = corrected_within(finding, outcome)
    for compared in finding.compared:
        pair, figure = (
            (compared.first, compared.second),
            outcome.study.measure.figure(compared.figure),
        )
        found = _difference(compared, outcome)
        if found is None:
            verdict = "not measured"
        else:
            verdict = (
                found.verdict(figure.sign)
                if pair in outcome.study.interactions
                else outcome.verdict(*pair, figure)
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
        p = corrected.get(compared)
        if p is not None:
            known |= {f"{p:.2f}", f"{p:.3f}"}
            if verdict in (BETTER, WORSE) and p > 1 - CONFIDENCE and AFTER_HOLM not in finding.text:
                wrong.append(f"{names}: not clear after Holm's correction, p = {p:.3f}")
    return wrong + [
        f"{number} is not a figure of these comparisons"
        for number in numbers
        if number not in known
    ]


def corrected_within(finding: Finding, outcome: Outcome) -> dict[Compared, float]:
    """Correct the p-values of a finding's comparisons for their number by Holm's method.

    In a study with a primary comparison nothing is left to correct: its verdicts are.
    """
    if outcome.study.primary is not None:
        return {}
    found = {compared: _difference(compared, outcome) for compared in finding.compared}
    return holm(
        {
            compared: pair.p
            for compared, pair in found.items()
            if pair is not None and not math.isnan(pair.p)
        }
    )


def _difference(compared: Compared, outcome: Outcome) -> Difference | None:
    """Compare two arms, or two differences to baselines where the study has the interaction."""
    pair, figure = (compared.first, compared.second), outcome.study.measure.figure(compared.figure)
    is_interaction = pair in outcome.study.interactions
    return (outcome.interaction if is_interaction else outcome.difference)(*pair, figure)
