"""Timing of several pieces of work in one process, in shuffled rounds.

A second copy of the baseline shows the noise.
"""

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

Work = Callable[[], object]

#: Ratios of the two copies of the baseline between which a measurement counts.
GAUGE = (0.98, 1.02)
ATTEMPTS = 3
#: Seconds of a sample, by device.
SHORTEST_SAMPLE = {"cpu": 0.05, "cuda": 0.2}
#: Runs before anything is timed, by device. A CUDA graph is recorded in the second, or later if its
#: code is compiled once more.
WARM_UPS = {"cpu": 2, "cuda": 4}


@dataclass(frozen=True)
class Setting:
    """Device, precision and mode of a suite.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        mode: ``"eager"``, ``"compiled"``, or ``"reduce-overhead"``, compiled into CUDA graphs on a
            GPU.
        allocator: ``"default"``, or ``"neutral"``, in which glibc's malloc keeps large blocks.
        rounds: rounds of each contest.
    """

    device: str = "cpu"
    dtype: str = "float32"
    mode: str = "eager"
    allocator: str = "default"
    rounds: int = 15

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bfloat16")

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move a module to the device, and compile it unless the mode is eager."""
        module = module.to(self.device)
        if self.mode == "eager":
            return module
        return torch.compile(module, mode=None if self.mode == "compiled" else self.mode)

    def pick(self, cpu: int, cuda: int) -> int:
        """Pick a size for the device."""
        return cpu if self.device == "cpu" else cuda


@dataclass(frozen=True)
class Contest:
    """Pieces of work to compare.

    Attributes:
        name: name in the tables.
        entries: functions that prepare the work and return it; the first is the baseline.
        notes: notes on entries.
        seconds: how long it may take. If less is left, it does not begin.
    """

    name: str
    entries: Mapping[str, Callable[[], Work]]
    notes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0


@dataclass(frozen=True)
class Row:
    """A figure.

    Attributes:
        contest: name of the contest.
        entry: name of the entry.
        ratio: median over the rounds of the ratio to the baseline of the same round.
        low: lower quartile.
        high: upper quartile.
        value: median time, or another value in ``unit``.
        unit: unit of ``value``.
        gauge: ratio of the baseline's second copy; None if nothing is timed.
        note: note on the entry.
    """

    contest: str
    entry: str
    ratio: float
    low: float
    high: float
    value: float
    unit: str
    gauge: float | None = None
    note: str = ""

    @property
    def counts(self) -> bool:
        return self.gauge is None or GAUGE[0] <= self.gauge <= GAUGE[1]


def run(contest: Contest, setting: Setting) -> list[Row]:
    """Time a contest, and repeat it if the gauge shows too much noise.

    The quietest attempt is kept.
    """
    torch.compiler.reset()
    # Entries of a contest may share code of torch, of which it compiles eight variants and runs
    # others in eager mode.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    baseline = next(iter(contest.entries))
    works = {name: make() for name, make in contest.entries.items()}
    gauge = f"{baseline} (again)"
    works = {baseline: works.pop(baseline), gauge: contest.entries[baseline](), **works}
    repeats = _warm_up(works, baseline, setting)
    attempts: list[list[Row]] = []
    while len(attempts) < ATTEMPTS and not (attempts and attempts[-1][0].counts):
        seconds = _rounds(contest.name, works, repeats, setting)
        attempts.append(compare(contest, seconds, baseline, gauge))
    return min(attempts, key=lambda rows: abs(rows[0].gauge - 1))


def _warm_up(works: Mapping[str, Work], baseline: str, setting: Setting) -> int:
    """Run everything a few times; returns the number of repetitions for a sample."""
    for work in works.values():
        _seconds(work, WARM_UPS[setting.device], setting)
    shortest = SHORTEST_SAMPLE[setting.device]
    return max(1, math.ceil(shortest / _seconds(works[baseline], 1, setting)))


def _rounds(
    name: str, works: Mapping[str, Work], repeats: int, setting: Setting
) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {entry: [] for entry in works}
    shown = time.monotonic()
    for number in range(setting.rounds):
        for entry in random.sample(list(works), len(works)):
            seconds[entry].append(_seconds(works[entry], repeats, setting))
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"  {name}: round {number + 1} of {setting.rounds}", file=sys.stderr, flush=True)
    return seconds


def _seconds(work: Work, repeats: int, setting: Setting) -> float:
    """Time one repetition, in seconds.

    On CPUs it is CPU time, which other processes disturb less, otherwise wall time.
    """
    clock = time.process_time if setting.device == "cpu" else time.perf_counter
    synchronize(setting)
    start = clock()
    for _ in range(repeats):
        work()
    synchronize(setting)
    return (clock() - start) / repeats


def synchronize(setting: Setting) -> None:
    """Wait for a GPU."""
    if setting.device == "cuda":
        torch.cuda.synchronize()


def compare(
    contest: Contest, seconds: Mapping[str, list[float]], baseline: str, gauge: str
) -> list[Row]:
    """Compute the rows of a contest from the seconds of each round.

    ``gauge`` names the second copy of the baseline.
    """

    def quartiles(entry: str) -> list[float]:
        return statistics.quantiles(
            [a / b for a, b in zip(seconds[entry], seconds[baseline], strict=True)], n=4
        )

    noise = quartiles(gauge)[1]
    rows = []
    for entry in (name for name in seconds if name != gauge):
        low, median, high = quartiles(entry)
        milliseconds = statistics.median(seconds[entry]) * 1e3
        note = contest.notes.get(entry, "")
        rows.append(Row(contest.name, entry, median, low, high, milliseconds, "ms", noise, note))
    return rows
