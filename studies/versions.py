"""Hardware and versions of a run."""

import platform
from pathlib import Path

import timm
import torch

import timm_moe
from benchmarks.protocol import commit, cpu_name


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
