"""Hardware and versions of a run."""

import platform
import subprocess
from pathlib import Path

import timm
import torch

import timm_moe
from benchmarks.protocol import cpu_name


def versions_here(device: str) -> dict[str, str]:
    """List device and versions by name, for the results."""
    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda"
        else f"{cpu_name()}, one thread a run",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "timm_moe": timm_moe.__version__,
        "commit": commit(Path(timm_moe.__file__).parents[1]),
    }


def commit(folder: Path) -> str:
    """Read the commit of the running package; empty without git.

    If the code has changed since the commit, it ends in ``+``.
    """
    git = ["git", "-C", str(folder)]
    code = ["--", "timm_moe", "studies", ":!studies/results"]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
        changes = subprocess.run(
            [*git, "status", "--porcelain", *code], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changes.stdout else "")
