"""Student's interval of the mean of some values, and what it says of a difference."""

import math
from collections.abc import Sequence

from scipy.stats import sem, t

CONFIDENCE = 0.95
#: Fewest pairs of runs that a verdict is given from. Student's interval of two is 13 times their
#: standard error to each side.
LEAST_PAIRS = 3

BETTER, WORSE = "better", "worse"
UNCLEAR = "no clear difference"
TOO_FEW = "no verdict from fewer than three pairs"


def half_width(values: Sequence[float]) -> float:
    """Compute half the 95 % interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * sem(values))


def verdict(mean: float, low: float, high: float, pairs: int, sign: int) -> str:
    """Judge a mean difference by its interval: BETTER, WORSE, UNCLEAR or TOO_FEW.

    Args:
        mean: of the differences.
        low: lower end of their interval.
        high: upper end.
        pairs: their number.
        sign: 1 if more is better, -1 if less is.
    """
    # Figures are rounded, so two may differ by the same and leave no interval.
    if pairs < LEAST_PAIRS:
        return TOO_FEW
    if low <= 0 <= high:
        return UNCLEAR
    return BETTER if mean * sign > 0 else WORSE
