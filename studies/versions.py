"""Hardware and versions that a run was made with."""

import platform

import timm
import torch

import timm_moe
from benchmarks.protocol import cpu_name


def versions_here(device: str) -> dict[str, str]:
    """By name, for the results."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, one thread a run",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "timm_moe": timm_moe.__version__,
    }
