"""The programme for a GPU that is lent for minutes.

``python -m benchmarks.programme OUTPUT PART [PART ...]`` runs parts one after the other. The
commands of a part run side by side, until they end or the limit of the part is over.

What is in OUTPUT afterwards:

- <command>.log: what a command printed, and the end of the log of each of its trainings;
- steps.json, large.json, written after each comparison, and near-paper.json of the study;
- summary.txt: a line for each command, with the number of things that it did.

A command has passed if it did all that it should, so not if a test was skipped, or a comparison
left out.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Seconds of each part, in the order of their worth.
LIMITS = {"checks": 240, "steps": 300, "busy": 60, "large": 200, "study": 530}
#: Seconds that commands have to end after each of these signals.
GRACE = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
#: Stands in a command for the end of its part, in seconds since 1970.
UNTIL = "{until}"
#: A command's own count, as "2 of 3 contests", and pytest's last line.
OF_ALL = re.compile(r"(\d+) of (\d+) [a-z].*")
OF_TESTS = re.compile(r"=* ?(\d+ [a-z]+(?:, \d+ [a-z]+)* in [\d.]+s.*?)[ =]*")
#: Bytes of the end of a training's log that are kept.
TAIL = 20_000


@dataclass(frozen=True)
class Command:
    """A command of a part.

    Attributes:
        words: what follows ``python``.
        logs: folder in which it leaves files log.txt, whose ends are kept.
        result: file that it leaves outside of OUTPUT, which is copied.
    """

    words: Sequence[str]
    logs: Path | None = None
    result: Path | None = None


#: Commands by name.
Part = dict[str, Command]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programme", description=__doc__)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder for all output")
    parser.add_argument(
        "parts", nargs="+", choices=LIMITS, metavar="PART", help=f"of {', '.join(LIMITS)}"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal in miniature"
    )
    parser.add_argument(
        "--data-dir",
        default="cifar100",
        metavar="DIR",
        help="images of the study (studies.cifar100)",
    )
    parser.add_argument(
        "--seeds",
        default="1",
        metavar="N",
        help="of the study; those with figures in studies/results are left out",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TRAINING", help="of the study; by default both"
    )
    args = parser.parse_args()
    if not Path(os.environ.get("TIMM_SCRIPTS", ""), "train.py").is_file():
        parser.error("TIMM_SCRIPTS names no folder with timm's train.py and validate.py")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        output = args.output.absolute()
        options = ("--data-dir", args.data_dir, "--seeds", args.seeds)
        options += ("--only", *args.only) if args.only else ()
        every = programme(args.device, output, Path(scratch), options)
        failed = work_off({part: every[part] for part in args.parts}, LIMITS, output)
    if failed:
        sys.exit(f"Not passed, see {args.output}: {', '.join(failed)}.")


def stop(*_: object) -> None:
    """End as by ^C, once: a second signal would disturb what is brought back then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def programme(
    device: str, output: Path, scratch: Path, study_options: Sequence[str] = ()
) -> dict[str, Part]:
    """Make the parts.

    On a CPU they are the same in miniature. The study, which takes hours there, is the smoke test.
    """
    on_device = ("--device", device)
    folder = scratch / "study"
    study = Command(
        (
            "-m",
            "studies",
            "near",
            "--size",
            "paper",
            *on_device,
            "--jobs",
            "2",
            "--missing",
            "--output",
            str(folder),
            *study_options,
        ),
        logs=folder,
        result=ROOT / "studies/results/near-paper.json",
    )
    return {
        "checks": {"smoke": smoke(device, scratch / "smoke"), **tests(device)},
        "steps": {"steps": measured("modes", device, output / "steps.json")},
        "busy": {"busy": Command(("-m", "benchmarks.busy", *on_device))},
        "large": {"large": measured("large", device, output / "large.json")},
        "study": {"study": study if device == "cuda" else smoke(device, folder)},
    }


def smoke(device: str, folder: Path) -> Command:
    """Run the study in a minute, on noise."""
    return Command(("-m", "studies.smoke", str(folder), "--device", device), logs=folder)


def tests(device: str) -> Part:
    """Split ``pytest -m gpu``, so that compiling holds nothing up.

    On a CPU two tests are chosen.
    """
    pytest = ("-m", "pytest", "-p", "no:cacheprovider", "-vv", "--tb=short", "-m")
    compiled = "tests/gpu/test_when_compiled.py"
    if device == "cpu":
        every = {
            "tests": (*pytest, "not gpu", "tests/gpu/test_waits.py", "-k", "counted"),
            "compiled": (*pytest, "not gpu", compiled, "-k", "cpu"),
        }
    else:
        every = {
            "tests": (*pytest, "gpu", "tests/gpu", f"--ignore={compiled}"),
            "compiled": (*pytest, "gpu", compiled, "-k", "not graphs"),
            "graphs": (*pytest, "gpu", compiled, "-k", "graphs"),
        }
    return {name: Command(words) for name, words in every.items()}


def measured(suite: str, device: str, file: Path) -> Command:
    """Measure a suite, as far as there is time."""
    setting = json.dumps({"device": device, "rounds": 9 if device == "cuda" else 2})
    return Command(("-m", "benchmarks.worker", suite, setting, str(file), UNTIL))


def work_off(parts: dict[str, Part], limits: dict[str, float], output: Path) -> list[str]:
    """Run parts one after the other.

    Returns:
        The names of the commands that have not passed.
    """
    output.mkdir(parents=True, exist_ok=True)
    jobs = [job for name, part in parts.items() for job in _run(part, limits[name], output)]
    return [job.name for job in jobs if job.outcome != "passed"]


class Job:
    """A command that runs.

    Attributes:
        name: name of the command.
        seconds: how long it ran; None as long as it runs.
        outcome: how it ended.
    """

    def __init__(self, name: str, command: Command, output: Path, until: float) -> None:
        self.name, self.outcome = name, ""
        self.seconds: float | None = None
        self._command, self._output, self._log = command, output, output / f"{name}.log"
        self._begin = time.monotonic()
        words = [word.replace(UNTIL, str(until)) for word in command.words]
        # The package need not be installed.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with self._log.open("w") as log:
            print(*words, file=log, flush=True)
            self._process = subprocess.Popen(
                [sys.executable, *words],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_be_a_group,
            )

    def has_ended(self) -> bool:
        if self.seconds is None and self._process.poll() is not None:
            self.seconds = time.monotonic() - self._begin
        return self.seconds is not None

    def send(self, number: int) -> None:
        """Send a signal to the command and to all that it has left running."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self, was_cut_off: bool, limit: float) -> str:
        """Bring back what it has left, and return its line of the summary."""
        count, is_whole = _count(self._log.read_text(errors="replace"))
        if was_cut_off:
            self.outcome = "cut off"
        elif self._process.returncode:
            self.outcome = f"failed (exit status {self._process.returncode})"
        else:
            self.outcome = "passed" if is_whole else "incomplete"
        if self._command.logs is not None:
            with self._log.open("ab") as log:
                for file in sorted(self._command.logs.glob("**/log.txt")):
                    log.write(f"\n==== {file}\n".encode() + file.read_bytes()[-TAIL:])
        if self._command.result is not None and self._command.result.exists():
            shutil.copy(self._command.result, self._output)
        took = f"{self.seconds or limit:.0f} of {limit:g} s"
        return f"{self.name}: {self.outcome}, {took}, {count}"


def _run(part: Part, limit: float, output: Path) -> list[Job]:
    """Run the commands of a part side by side, and tell how each ended.

    So too if this is interrupted.
    """
    until = time.time() + limit
    jobs = [Job(name, command, output, until) for name, command in part.items()]
    try:
        _wait(jobs, limit)
    finally:
        late = [job for job in jobs if not job.has_ended()]
        for number in SIGNALS:
            for job in jobs:
                job.send(number)
            _wait(jobs, GRACE)
        for job in jobs:
            line = job.end(job in late, limit)
            print(line, flush=True)
            with (output / "summary.txt").open("a") as summary:
                summary.write(f"{line}\n")
    return jobs


def _be_a_group() -> None:
    """Begin a process group, which signals reach as a whole.

    A session of its own would go on if the programme were killed. SIGINT is ignored in what a
    script starts in the background, and Python then leaves it so.
    """
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait(jobs: Sequence[Job], seconds: float) -> None:
    end = time.monotonic() + seconds
    while sum(not job.has_ended() for job in jobs) and time.monotonic() < end:
        time.sleep(0.1)


def _count(log: str) -> tuple[str, bool]:
    """Find the last count of a log, and whether it is of all."""
    for line in reversed(log.splitlines()):
        if found := OF_ALL.fullmatch(line):
            return line, 0 < int(found[1]) == int(found[2])
        if found := OF_TESTS.fullmatch(line):
            counted = dict(reversed(one.split()) for one in re.findall(r"\d+ [a-z]+", found[1]))
            return found[1], "passed" in counted and "skipped" not in counted
    return "nothing counted", False


if __name__ == "__main__":
    main()
