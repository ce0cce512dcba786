"""Import times, each in a process of its own."""

import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator

from .protocol import Contest, Row, Setting, compare

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
    """Measure CPU time of ``import timm_moe`` and of ``import torch``.

    The former is timed after timm, the latter with and without plugins.
    """
    _seconds(PACKAGE)  # writes the byte code
    seconds = [_seconds(PACKAGE, TIMM_MOE_AUTOLOAD="0") for _ in range(setting.rounds)]
    low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    yield Row("import of this package", "after timm", 1, low / median, high / median, median, "ms")
    baseline, gauge, found = "torch, plugins switched off", "again", "torch, this package found"
    samples: dict[str, list[float]] = {baseline: [], gauge: [], found: []}
    for _ in range(setting.rounds):
        for entry in random.sample(list(samples), len(samples)):
            samples[entry].append(
                _seconds(TORCH, TORCH_DEVICE_BACKEND_AUTOLOAD="1" if entry == found else "0")
            )
    yield from compare(Contest("import of torch", {}), samples, baseline, gauge)


def _seconds(code: str, **environment: str) -> float:
    variables = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | environment
    run = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    return float(run.stdout)
