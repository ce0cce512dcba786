"""Differences of two methods over runs that are paired by seed, with Student's intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scipy.stats import sem, t, ttest_1samp

CONFIDENCE = 0.95
#: Fewest pairs of runs that a verdict is given from. Student's interval of two is 13 times their
#: standard error to each side.
LEAST_PAIRS = 3

BETTER, WORSE = "better", "worse"
UNCLEAR = "no clear difference"
TOO_FEW = "no verdict from fewer than three pairs"


@dataclass(frozen=True)
class Difference:
    """Mean difference of two methods over pairs of runs, with Student's 95 % interval.

    Attributes:
        mean: of first minus second.
        low: lower end of the interval; minus infinity for one pair.
        high: upper end.
        pairs: their number.
        p: two-sided p-value of Student's paired test; NaN for one pair.
    """

    mean: float
    low: float
    high: float
    pairs: int
    p: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        """Average the differences of at least one pair."""
        middle, half = mean(differences), half_width(differences)
        return cls(middle, middle - half, middle + half, len(differences), _p_value(differences))

    def verdict(self, sign: int, p: float | None = None) -> str:
        """Judge the first method: BETTER, WORSE, UNCLEAR or TOO_FEW.

        Args:
            sign: 1 if more is better, -1 if less is.
            p: a p-value that is corrected for the number of comparisons; by default the interval
                decides.
        """
        # Figures are rounded, so two may differ by the same and leave no interval.
        if self.pairs < LEAST_PAIRS:
            return TOO_FEW
        if self.low <= 0 <= self.high or (p is not None and p > 1 - CONFIDENCE):
            return UNCLEAR
        return BETTER if self.mean * sign > 0 else WORSE


def half_width(values: Sequence[float]) -> float:
    """Compute half the 95 % interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * sem(values))


def _p_value(differences: Sequence[float]) -> float:
    if len(differences) < 2:
        return math.nan
    if len(set(differences)) == 1:  # the test divides by their spread
        return 0.0 if differences[0] else 1.0
    return float(ttest_1samp(differences, 0).pvalue)
