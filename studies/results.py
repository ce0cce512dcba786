"""What is kept of a study: one JSON file, from which the page is written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runs import Run, write_json
from .study import Arm


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write what is known of all runs beside what the file has of other seeds.

    Raises:
        FileExistsError: if the file has results of other options, images or deployments.
    """
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"arms": {}, "cost": {}}
    for run in runs:
        _add(run, results, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, results)


def missing(path: Path, runs: Sequence[Run]) -> list[Run]:
    """The runs whose figures the file lacks, and those that they need."""
    known = json.loads(path.read_text())["arms"] if path.exists() else {}
    lacking = [(arm, run.seed) for run in runs for arm in run.arms() if not _has(known, arm, run.seed)]
    needed = {(training.name, seed) for arm, seed in lacking for training in arm.trainings()}
    return [run for run in runs if (run.training.name, run.seed) in needed]


def _has(known: dict[str, Any], arm: Arm, seed: int) -> bool:
    return str(seed) in known.get(arm.name, {}).get("figures", {})


def _add(run: Run, results: dict[str, Any], path: Path) -> None:
    known, seed = run.results(), str(run.seed)
    if known["cost"] is not None:
        results["cost"].setdefault(run.training.name, {})[seed] = known["cost"]
    for arm in run.arms():
        kept = results["arms"].setdefault(arm.name, {"stated": run.statement(arm), "figures": {}})
        if kept["stated"] != run.statement(arm):
            raise FileExistsError(f"{path} has results of {arm.name} that were made otherwise: move it away.")
        if arm.name in known["arms"]:
            kept["figures"][seed] = known["arms"][arm.name]
