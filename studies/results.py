"""What is kept of a study: one JSON file, from which the page is written."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .runs import Run


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write what is known of all runs beside what the file has of other seeds.

    Raises:
        FileExistsError: if the file has results of other options, images or deployments.
    """
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"arms": {}, "cost": {}}
    for run in runs:
        _add(run, results, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


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
