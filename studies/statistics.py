"""Differences of arms, whose figures are by seed, and Holm's correction."""

from collections.abc import Mapping
from typing import TypeVar

from timm_moe.analysis.paired import Difference

Key = TypeVar("Key")


def by_seed(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Subtract two arms, each a figure by seed, for every seed that both have."""
    return {seed: first[seed] - second[seed] for seed in first if seed in second}


def paired(first: Mapping[str, float], second: Mapping[str, float]) -> Difference | None:
    """Compare two arms, each a figure by seed; None if they share no seed."""
    differences = list(by_seed(first, second).values())
    return Difference.of(differences) if differences else None


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
