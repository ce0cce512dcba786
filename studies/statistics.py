"""Mean, standard error, and the difference to a baseline, paired by seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from scipy.stats import t

CONFIDENCE = 0.95
NOT_TOLD_APART = "not told apart"
ONE_SEED = "one seed, which tells nothing"


@dataclass(frozen=True)
class Difference:
    """Mean difference of two arms over the seeds that both have, with its interval.

    Attributes:
        mean: first minus second.
        low: lower end of the 95 % interval by Student's t; minus infinity of a single seed.
        high: upper end.
        seeds: how many pairs.
    """

    mean: float
    low: float
    high: float
    seeds: int

    def verdict(self, sign: int) -> str:
        """``"better"``, ``"worse"`` or ``"not told apart"``: what the interval allows to be said, if there is one.

        Args:
            sign: 1 if more is better, -1 if less is.
        """
        if self.seeds == 1:
            return ONE_SEED
        if self.low <= 0 <= self.high:
            return NOT_TOLD_APART
        return "better" if self.mean * sign > 0 else "worse"


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """The difference of two arms, each a figure by seed; None if they share no seed."""
    seeds = first.keys() & second.keys()
    if not seeds:
        return None
    differences = [first[seed] - second[seed] for seed in seeds]
    half = half_width(differences)
    return Difference(mean(differences), mean(differences) - half, mean(differences) + half, len(seeds))


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; infinite of a single value."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of the mean."""
    if len(values) < 2:
        return math.inf
    return float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * standard_error(values)
