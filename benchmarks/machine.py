"""Hardware and versions that figures were measured with, for benchmarks and studies."""

import platform
import re
import subprocess
from pathlib import Path

import timm
import torch

import timm_moe


def versions(device: str, threads: str = "one thread") -> dict[str, str]:
    """List device and versions by name, for the results."""
    is_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_gpu else f"{cpu_name()}, {threads}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "timm_moe": timm_moe.__version__,
        "commit": commit(Path(timm_moe.__file__).parents[1]),
    }


def cpu_name() -> str:
    """Name the CPU, with its widest instructions for matrix products."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    stated = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    name = stated.get("model name", platform.processor() or platform.machine())
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", "", name)
    if stated.get("vendor_id") == "AuthenticAMD":  # virtual machines may hide the model
        name += f" family {stated.get('cpu family')}"
    flags = stated.get("flags", "").split()
    widest = next(
        (flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), ""
    )
    return " ".join([*name.split(), *([f"({widest})"] if widest else [])])


def commit(folder: Path) -> str:
    """Read the commit of the running package; empty without git.

    If the code has changed since the commit, it ends in ``+``.
    """
    git = ["git", "-C", str(folder)]
    measuring = ["benchmarks", ":!benchmarks/results", "studies", ":!studies/results"]
    code = ["--", "timm_moe", *measuring]
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
