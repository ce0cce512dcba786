"""Runs several runs at a time, and reports progress and the time left."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from .runs import Run, RunFailed, stop_commands

#: Seconds between two lines.
INTERVAL = 60.0


def work_off(
    runs: Sequence[Run], jobs: int, keep: Callable[[Run], object], interval: float = INTERVAL
) -> list[str]:
    """Do the runs that are missing.

    A run that others need comes first. No two runs work in one folder at a time.

    Args:
        runs: runs of one study or several, done or not.
        jobs: number of runs at a time.
        keep: called with each run that has ended, to write its results.
        interval: seconds between two lines about progress.

    Returns:
        A line for each run that failed, is in another process's hands, or lacks a run that it
        needs. A failure is also printed at once.
    """
    waiting = [run for run in runs if not run.is_done()]
    clock = _Clock(runs)
    failed: list[str] = []
    running: dict[Future[None], Run] = {}
    with ThreadPoolExecutor(jobs) as pool, _nothing_left_running():
        while waiting or running:
            ready = _ready(waiting, running.values())[: jobs - len(running)]
            waiting = [run for run in waiting if run not in ready]
            for run in ready:
                running[pool.submit(run.work)] = run
            if not running:
                failed += [
                    f"{run.name}: not begun, since what it needs is not done." for run in waiting
                ]
                break
            ended, _ = wait(running, timeout=interval, return_when=FIRST_COMPLETED)
            for future in ended:
                run = running.pop(future)
                lines = _outcome(future, run)
                failed += lines
                for line in lines:
                    print(line, file=sys.stderr, flush=True)
                keep(run)
            clock.tell(list(running.values()))
    return failed


@contextmanager
def _nothing_left_running() -> Iterator[None]:
    """End the commands of the runs if work is interrupted, as by ^C."""
    try:
        yield
    except BaseException:
        stop_commands()
        raise


def _ready(waiting: Sequence[Run], running: Iterable[Run]) -> list[Run]:
    """Select the runs that can start now, one for each folder.

    Studies of one setting share trainings.
    """
    taken = {run.folder for run in running}
    ready: dict[Path, Run] = {}
    for run in waiting:
        if run.folder not in taken and run.can_start():
            ready.setdefault(run.folder, run)
    return list(ready.values())


def _outcome(future: Future[None], run: Run) -> list[str]:
    try:
        future.result()
    except RunFailed as error:
        return [str(error)]
    except BlockingIOError:
        return [f"{run.name}: another process works on it."]
    except OSError as error:
        return [f"{run.name}: {error}"]
    return []


class _Clock:
    """Reports progress and estimates the time left.

    Both are measured by the number of images that trainings have seen.
    """

    def __init__(self, runs: Sequence[Run]):
        self._runs = runs
        trainings = {run.folder: run for run in runs}.values()  # studies may share one
        self._images = {run: run.images_to_see() for run in trainings}
        self._start, self._before = time.monotonic(), self._seen()

    def tell(self, running: Sequence[Run]) -> None:
        seen, done = self._seen(), sum(run.is_done() for run in self._runs)
        worked, left = seen - self._before, sum(self._images.values()) - seen
        rest = (
            f", about {_hours((time.monotonic() - self._start) / worked * left)} left"
            if worked > 0
            else ""
        )
        now = (
            "; now " + ", ".join(f"{run.name} ({run.progress():.0%})" for run in running)
            if running
            else ""
        )
        print(f"{done} of {len(self._runs)} runs done{rest}{now}", file=sys.stderr, flush=True)

    def _seen(self) -> float:
        return sum(run.progress() * images for run, images in self._images.items())


def _hours(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
