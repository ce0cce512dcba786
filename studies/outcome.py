"""A study with its results: figures by seed, comparisons of arms, and costs."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from timm_moe.analysis.paired import Difference

from .measure import Figure
from .study import Arm, Size, Study

Key = TypeVar("Key")


@dataclass(frozen=True)
class Outcome:
    """A study at one size, with its results.

    Attributes:
        study: the study.
        size_name: ``"small"`` or ``"paper"``.
        results: content of the JSON file.
    """

    study: Study
    size_name: str
    results: dict[str, Any]

    @property
    def size(self) -> Size:
        return self.study.sizes[self.size_name]

    def further_pairs(self) -> list[tuple[str, str]]:
        """List the study's pairs, and those of all its findings.

        An arm and its baseline are left out, as are interactions.
        """
        shown = {frozenset((arm.name, self.size.baseline_of(arm.name))) for arm in self.size.arms}
        shown |= {frozenset(pair) for pair in self.study.interactions}
        compared = [pair for size in self.study.sizes.values() for pair in size.compared()]
        pairs = {frozenset(pair): pair for pair in compared if frozenset(pair) not in shown}
        return list((pairs | {frozenset(pair): pair for pair in self.study.pairs}).values())

    def seeds(self, arm: str) -> list[str]:
        """List the seeds that an arm has results for."""
        return list(self.results["arms"].get(arm, {}).get("figures", {}))

    def arms(self) -> list[Arm]:
        """List the arms that have results."""
        return [arm for arm in self.size.arms if self.seeds(arm.name)]

    def values(self, arm: str, figure: Figure) -> dict[str, float]:
        """Get one figure of an arm, by seed."""
        figures = self.results["arms"].get(arm, {}).get("figures", {})
        return {
            seed: of_seed[figure.key] for seed, of_seed in figures.items() if figure.key in of_seed
        }

    def difference(self, first: str, second: str, figure: Figure) -> Difference | None:
        """Compare two arms; None if they share no seed."""
        return paired(self.values(first, figure), self.values(second, figure))

    def to_baseline(self, arm: str, figure: Figure) -> Difference | None:
        """Compare an arm with its baseline; None for a baseline, or if they share no seed."""
        baseline = self.size.baseline_of(arm)
        return None if baseline == arm else self.difference(arm, baseline, figure)

    def primary_pairs(self) -> tuple[int, int]:
        """Count the pairs of the primary comparison that have results, and those that were stated.

        Both are zero if the study has no primary comparison.
        """
        if self.study.primary is None:
            return 0, 0
        first, second = self.study.primary
        known = {*self.seeds(first)} & {*self.seeds(second)}
        return len(known), len(self.size.seeds_of(self.size.arm(first).training))

    def is_primary_pending(self) -> bool:
        """Tell if a primary comparison was stated and some of its pairs are missing."""
        known, stated = self.primary_pairs()
        return known < stated

    @cached_property
    def _corrected(self) -> dict[tuple[frozenset[str], str], float]:
        """The p-values of all secondary comparisons, corrected by Holm's method.

        They are by the pair of arms and the figure's key, and empty if the study has no primary
        comparison. A comparison that was stated counts as 1 until all its seeds are measured.
        Verdicts on the others thus do not change with the number of those seeds.
        """
        if self.study.primary is None:
            return {}
        baselines = [(arm.name, self.size.baseline_of(arm.name)) for arm in self.size.arms]
        pairs = [pair for pair in (*baselines, *self.further_pairs()) if pair[0] != pair[1]]
        figures = [figure for figure in self.study.measure.figures if figure.sign]
        p_values = {
            (frozenset(pair), figure.key): self._p_when_complete(*pair, figure)
            for pair in pairs
            for figure in figures
        }
        p_values.pop((frozenset(self.study.primary), figures[0].key), None)
        return holm(p_values)

    def _p_when_complete(self, first: str, second: str, figure: Figure) -> float:
        """Return the p-value of a comparison; 1 while seeds of it are missing."""
        found = self.difference(first, second, figure)
        stated = min(
            len(self.size.seeds_of(self.size.arm(name).training)) for name in (first, second)
        )
        if found is None or found.pairs < stated or math.isnan(found.p):
            return 1.0
        return found.p

    def corrected(self, first: str, second: str, figure: Figure) -> float | None:
        """Return the corrected p-value of a secondary comparison; None for others."""
        return self._corrected.get((frozenset((first, second)), figure.key))

    def verdict(self, first: str, second: str, figure: Figure) -> str:
        """Judge an arm beside another one; a secondary comparison by its corrected p-value.

        Raises:
            ValueError: if the arms share no seed.
        """
        found = self.difference(first, second, figure)
        if found is None:
            raise ValueError(f"{first} and {second} share no seed.")
        return found.verdict(figure.sign, self.corrected(first, second, figure))

    def interaction(self, first: str, second: str, figure: Figure) -> Difference | None:
        """Compare two arms by their differences to their baselines, paired by seed.

        Returns:
            (first - its baseline) - (second - its baseline); None if the four share no seed.
        """
        one, other = (
            by_seed(self.values(arm, figure), self.values(self.size.baseline_of(arm), figure))
            for arm in (first, second)
        )
        return paired(one, other)


def published(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    """Map studies to their small outcomes, but those whose primary comparison lacks pairs."""
    return {
        outcome.study.name: outcome
        for outcome in outcomes
        if outcome.size_name == "small" and not outcome.is_primary_pending()
    }


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


def costs_of_studies(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """List the costs of the trainings of all studies; a training that studies share counts once."""
    each = {
        (outcome.size.setting, name, seed): cost
        for outcome in outcomes
        for name, of_training in outcome.results["cost"].items()
        for seed, cost in of_training.items()
    }
    return list(each.values())


def hours(costs: list[dict[str, Any]]) -> float:
    """Add up the hours of trainings."""
    return sum(cost["seconds"] for cost in costs) / 3600
