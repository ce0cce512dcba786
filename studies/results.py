"""What is kept of a study: one JSON file, from which the page is written."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

import timm_moe

from .runs import Run


def write(path: Path, runs: Sequence[Run]) -> None:
    """Write what is known of all runs; what an earlier file has of other seeds stays, if it is of the same study."""
    stated = {run.training.name: run.stated() for run in runs}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if results.get("stated") != stated:
        results = {"stated": stated, "arms": {}, "cost": {}}
    for run in runs:
        known = run.results()
        if known["cost"] is not None:
            results["cost"].setdefault(run.training.name, {})[str(run.seed)] = known["cost"]
        for arm, validation in known["arms"].items():
            results["arms"].setdefault(arm, {})[str(run.seed)] = validation["top1"]
    results["versions"] = versions(runs[0].place.device)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def versions(device: str) -> dict[str, str]:
    """Hardware and versions, for the results."""
    from benchmarks.protocol import cpu_name

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, one thread a run",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "timm_moe": timm_moe.__version__,
    }
