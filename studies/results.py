"""The results of a study: one JSON file, from which both pages are written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runs import Run, write_json
from .study import Arm


def read(path: Path) -> dict[str, Any]:
    """Read a file of results; empty results if there is no file.

    Raises:
        ValueError: if the file is damaged.
    """
    if not path.exists():
        return {"arms": {}, "cost": {}}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it is not JSON: {error}") from None


def write(path: Path, runs: Sequence[Run], keep: bool = False) -> None:
    """Add the results of runs to a file.

    Args:
        path: the file.
        runs: runs of one study, done or not.
        keep: keep the figures of the file where a run has figures for the same seed.

    Raises:
        FileExistsError: if the file has results of other options, images or deployments.
        ValueError: if the file is damaged.
    """
    results = read(path)
    for run in runs:
        _add(run, results, path, keep)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def missing(path: Path, runs: Sequence[Run]) -> list[Run]:
    """Select the runs whose figures the file lacks, and the runs that these need."""
    known = read(path)["arms"]
    lacking = [
        (arm, run.seed) for run in runs for arm in run.arms() if not _has(known, arm, run.seed)
    ]
    needed = {(training.name, seed) for arm, seed in lacking for training in arm.trainings()}
    return [run for run in runs if (run.training.name, run.seed) in needed]


def from_elsewhere(path: Path, runs: Sequence[Run]) -> int:
    """Count the figures of the file that these runs do not have.

    Another machine measured them.
    """
    known = read(path)["arms"]
    arms = [(run, arm) for run in runs for arm in run.arms() if _has(known, arm, run.seed)]
    return sum(arm.name not in run.results()["arms"] for run, arm in arms)


def _has(known: dict[str, Any], arm: Arm, seed: int) -> bool:
    return str(seed) in known.get(arm.name, {}).get("figures", {})


def _add(run: Run, results: dict[str, Any], path: Path, keep: bool) -> None:
    known, seed = run.results(), str(run.seed)
    if known["cost"] is not None and not (
        keep and seed in results["cost"].get(run.training.name, {})
    ):
        results["cost"].setdefault(run.training.name, {})[seed] = known["cost"]
    for arm in run.arms():
        kept = results["arms"].setdefault(arm.name, {"stated": run.statement(arm), "figures": {}})
        if kept["stated"] != run.statement(arm):
            raise FileExistsError(
                f"{path} has results of {arm.name} that were made otherwise: move it away."
            )
        if arm.name in known["arms"] and not (keep and seed in kept["figures"]):
            kept["figures"][seed] = known["arms"][arm.name]
