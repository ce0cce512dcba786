"""Means, standard errors and differences paired by seed, with Student's 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from scipy.stats import sem, t

CONFIDENCE = 0.95
BETTER, WORSE = "better", "worse"
UNCLEAR = "no clear difference"
TOO_FEW = "one seed or two, no verdict"


@dataclass(frozen=True)
class Difference:
    """Mean difference of two arms over the seeds that both have, with its interval.

    Attributes:
        mean: first minus second.
        low: lower end of the 95 % interval; minus infinity for a single seed.
        high: upper end.
        seeds: number of pairs.
    """

    mean: float
    low: float
    high: float
    seeds: int

    def verdict(self, sign: int) -> str:
        """Judge the first arm by the interval: BETTER, WORSE, UNCLEAR or TOO_FEW.

        Args:
            sign: 1 if more is better, -1 if less is.
        """
        if self.seeds < 3:  # figures are rounded, so two may differ by the same and leave no interval
            return TOO_FEW
        if self.low <= 0 <= self.high:
            return UNCLEAR
        return BETTER if self.mean * sign > 0 else WORSE


def by_seed(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Subtract two arms, each a figure by seed, for every seed that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Compare two arms, each a figure by seed; None if they share no seed."""
    differences = list(by_seed(first, second).values())
    if not differences:
        return None
    middle, half = mean(differences), half_width(differences)
    return Difference(middle, middle - half, middle + half, len(differences))


def half_width(values: Sequence[float]) -> float:
    """Compute half the 95 % interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * sem(values))
