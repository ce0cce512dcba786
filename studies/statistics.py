"""Means, standard errors and differences paired by seed, with Student's 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import TypeVar

from scipy.stats import ttest_1samp

from timm_moe.analysis.intervals import (
    BETTER,
    CONFIDENCE,
    UNCLEAR,
    WORSE,
    half_width,
    verdict,
)

Key = TypeVar("Key")


@dataclass(frozen=True)
class Difference:
    """Mean difference of two arms over the seeds that both have, with its interval.

    Attributes:
        mean: first minus second.
        low: lower end of the 95 % interval; minus infinity for a single seed.
        high: upper end.
        seeds: number of pairs.
        p: two-sided p-value of Student's paired test; NaN for a single seed.
    """

    mean: float
    low: float
    high: float
    seeds: int
    p: float

    def verdict(self, sign: int, p: float | None = None) -> str:
        """Judge the first arm: BETTER, WORSE, UNCLEAR or TOO_FEW.

        Args:
            sign: 1 if more is better, -1 if less is.
            p: a p-value that is corrected for the number of comparisons; by default the interval
                decides.
        """
        by_interval = verdict(self.mean, self.low, self.high, self.seeds, sign)
        if by_interval in (BETTER, WORSE) and p is not None and p > 1 - CONFIDENCE:
            return UNCLEAR
        return by_interval


def by_seed(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Subtract two arms, each a figure by seed, for every seed that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Compare two arms, each a figure by seed; None if they share no seed."""
    differences = list(by_seed(first, second).values())
    if not differences:
        return None
    middle, half = mean(differences), half_width(differences)
    return Difference(middle, middle - half, middle + half, len(differences), _p_value(differences))


def _p_value(differences: Sequence[float]) -> float:
    if len(differences) < 2:
        return math.nan
    if len(set(differences)) == 1:  # the test divides by their spread
        return 0.0 if differences[0] else 1.0
    return float(ttest_1samp(differences, 0).pvalue)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """Correct p-values for their number by Holm's method (1979).

    It limits the chance of any false verdict.

    The smallest of n is multiplied by n, the next by n - 1, and so on; none gets below a smaller
    one's.
    """
    corrected: dict[Key, float] = {}
    largest = 0.0
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        corrected[key] = largest
    return corrected
