"""Share of a training step in which the GPU is busy: the sum of its kernels against wall time.

``python -m benchmarks.busy [--device cpu]`` prints a line for each model. A share well below 1 says
that the GPU waits for the host. On a CPU the operators take the place of kernels, which only tries
the command.
"""

import argparse
import time

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .modes import models
from .protocol import Setting, Work, synchronize
from .steps import step

TIMED, PROFILED = 20, 5  # steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    torch.set_num_threads(1)
    setting = Setting(device=parser.parse_args().device, dtype="bfloat16")
    name, makes, batch = models(setting)[0]
    print(f"{name}, batch {batch}, bfloat16, eager, torch {torch.__version__}", flush=True)
    for entry, make in makes.items():
        print(_line(entry, step(make, batch, True, setting), setting), flush=True)
    print(f"{len(makes)} of {len(makes)} models")


def _line(entry: str, work: Work, setting: Setting) -> str:
    for _ in range(5):
        work()
    synchronize(setting)
    start = time.perf_counter()
    for _ in range(TIMED):
        work()
    synchronize(setting)
    wall = (time.perf_counter() - start) / TIMED
    busy, number = _kernels(work, setting)
    kernels = f"{number} kernels of {busy * 1e3:.2f} ms"
    return f"{entry}: {wall * 1e3:.2f} ms a step, {kernels}, busy {busy / wall:.3f}"


def _kernels(work: Work, setting: Setting) -> tuple[float, int]:
    """Return the seconds and the number of the kernels of a step."""
    on_gpu = setting.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            work()
        synchronize(setting)
    # An optimizer's step is also noted on the GPU, as a range over its kernels.
    events = [event for event in profiler.events() or [] if not event.is_user_annotation]
    if on_gpu:
        times = [
            event.time_range.elapsed_us()
            for event in events
            if event.device_type == DeviceType.CUDA
        ]
    else:
        times = [event.self_cpu_time_total for event in events]
    return sum(times) / PROFILED / 1e6, len(times) // PROFILED


if __name__ == "__main__":
    main()
