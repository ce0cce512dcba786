"""CPU time and memory of trainings."""

from statistics import mean
from typing import Any

from .study import Arm, Study

#: CPU seconds, MiB at the peak and the device, by seed.
Costs = dict[str, dict[str, Any]]


def cost_of(results: dict[str, Any], arm: Arm) -> Costs:
    """Add up all trainings that an arm needs.

    Seeds are left out if a training is missing, was resumed, or ran on another device than the others.
    """
    of_trainings = [results["cost"].get(training.name, {}) for training in arm.trainings()]
    known: Costs = {}
    for seed in set.intersection(*map(set, of_trainings)):
        costs = [of_training[seed] for of_training in of_trainings]
        devices = {cost["versions"]["device"] for cost in costs}
        if all(cost["whole"] for cost in costs) and len(devices) == 1:
            known[seed] = {
                "seconds": sum(cost["seconds"] for cost in costs),
                "peak_mib": max(cost["peak_mib"] for cost in costs),
                "device": devices.pop(),
            }
    return known


def ratio(own: Costs, base: Costs, key: str) -> str:
    """Divide the means over the seeds that ran on the same device; empty if there is no such seed."""
    seeds = [seed for seed in own if seed in base and own[seed]["device"] == base[seed]["device"]]
    return f"{mean(own[seed][key] for seed in seeds) / mean(base[seed][key] for seed in seeds):.2f}" if seeds else ""


def all_costs(results: dict[str, Any]) -> list[dict[str, Any]]:
    """List the costs of all trainings of a study."""
    return [cost for of_training in results["cost"].values() for cost in of_training.values()]


def costs_of_studies(known: list[tuple[Study, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """List the costs of the trainings of all studies; a training that studies share counts once."""
    each = {
        (study.sizes[size].setting, name, seed): cost
        for study, size, results in known
        for name, of_training in results["cost"].items()
        for seed, cost in of_training.items()
    }
    return list(each.values())


def hours(costs: list[dict[str, Any]]) -> float:
    """Add up the hours of trainings."""
    return sum(cost["seconds"] for cost in costs) / 3600
