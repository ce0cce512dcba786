"""What importing costs, in processes of their own."""

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .protocol import Row, Setting

PACKAGE = """
import time, timm
start = time.process_time()
import timm_moe
print(time.process_time() - start)
"""
TORCH = """
import time
start = time.process_time()
import torch
print(time.process_time() - start)
"""


def measure(setting: Setting) -> Iterator[Row]:
    """CPU time of ``import timm_moe`` after timm, and of ``import torch`` beside one that looks for no plugins."""
    for _ in range(2):  # the first writes the byte code
        seconds = _samples(setting, PACKAGE, TIMM_MOE_AUTOLOAD="0")
    low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    yield Row("import", "timm_moe, after timm", 1, low / median, high / median, median, "ms")
    without, again, with_plugins = (
        _samples(setting, TORCH, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) for autoload in ("0", "0", "1")
    )
    gauge = statistics.median(again) / statistics.median(without)
    for entry, seconds in (("torch, plugins switched off", without), ("torch, this package found", with_plugins)):
        low, ratio, high = statistics.quantiles([value / statistics.median(without) for value in seconds], n=4)
        yield Row("import", entry, ratio, low, high, 1e3 * statistics.median(seconds), "ms", gauge)


def _samples(setting: Setting, code: str, **environment: str) -> list[float]:
    command = [sys.executable, "-c", code]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | environment
    runs = (
        subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        for _ in range(setting.rounds)
    )
    return [float(run.stdout) for run in runs]
