"""The programme for twelve minutes of one GPU: ``python -m benchmarks.programme FOLDER``.

Four parts run one after the other, each within a limit of its own, and none stops another. Each
writes FOLDER/<part>.log, the steps also write steps.json. FOLDER/summary.txt says how each part
ended and how long it took.

- ``busy``, 60 s: the share of a step in which the GPU is busy. If it is well below 1, the host is
  the limit.
- ``tests``, 180 s: ``pytest -m gpu``.
- ``steps``, 240 s: steps of ViT-S and ViT-B, eager, compiled and as CUDA graphs. A second copy of
  the dense model is the gauge.
- ``study``, 240 s and what the others left: EWA near its paper.

``--parts`` chooses some of them, as where one command may not take so long. ``--device cpu``
rehearses all of it in miniature.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Seconds of each part.
LIMITS = {"busy": 60, "tests": 180, "steps": 240, "study": 240}
#: Seconds in which a part that was told to end may do so.
GRACE = 5

#: Maps the seconds that a part has to its command.
MakeCommand = Callable[[float], Sequence[str]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programme", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for all output")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=LIMITS,
        default=list(LIMITS),
        metavar="PART",
        help="some parts",
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
    args = parser.parse_args()
    every = commands(args.folder.absolute(), args.device, args.data_dir)
    failed = work_off({part: every[part] for part in args.parts}, LIMITS, args.folder)
    if failed:
        sys.exit(f"Not done, see {args.folder}: {', '.join(failed)}.")


def commands(folder: Path, device: str, data_dir: str) -> dict[str, MakeCommand]:
    """The command of each part."""
    python, is_gpu = [sys.executable, "-m"], device == "cuda"
    tests = ["-m", "gpu", "tests/gpu"] if is_gpu else ["tests/gpu/test_waits.py", "-k", "counted"]
    steps = json.dumps({"device": device, "rounds": 5 if is_gpu else 2})
    study = [
        "studies",
        "near",
        "--size",
        "paper",
        "--device",
        "cuda",
        "--jobs",
        "6",
        "--data-dir",
        data_dir,
    ]

    def measured(seconds: float) -> list[str]:
        # A contest that begins later would not end.
        until = str(time.time() + seconds - (30 if is_gpu else 0))
        return [*python, "benchmarks.worker", "modes", steps, str(folder / "steps.json"), until]

    def trained(seconds: float) -> list[str]:
        ending = ["--minutes", f"{seconds / 60 - 0.5:.2f}"]  # after an epoch
        return [*python, *study, *(ending if is_gpu else ["--help"])]

    return {
        "busy": lambda seconds: [*python, "benchmarks.busy", "--device", device],
        "tests": lambda seconds: [*python, "pytest", "-v", "-p", "no:cacheprovider", *tests],
        "steps": measured,
        "study": trained,
    }


def work_off(
    parts: Mapping[str, MakeCommand], limits: Mapping[str, float], folder: Path
) -> list[str]:
    """Run the parts; return those that failed.

    The last part also has the time that the others leave.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + sum(limits[part] for part in parts)
    failed = []
    for part, make in parts.items():
        begin = time.monotonic()
        limit = end - begin if part == list(parts)[-1] else limits[part]
        status = _run(make(limit), limit, folder / f"{part}.log")
        line = f"{part}: {status}, {time.monotonic() - begin:.0f} of {limit:.0f} s"
        print(line, flush=True)
        with open(folder / "summary.txt", "a") as summary:
            summary.write(f"{line}\n")
        if status != "passed":
            failed.append(part)
    return failed


def _run(command: Sequence[str], limit: float, log: Path) -> str:
    """Run a command with all that it starts, and say how it ended."""
    with open(log, "w") as output:
        print(*command, file=output, flush=True)
        streams = dict(stdout=output, stderr=subprocess.STDOUT)
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)  # type: ignore[call-overload]
        try:
            status = process.wait(limit)
            return "passed" if status == 0 else f"failed (exit status {status})"
        except subprocess.TimeoutExpired:
            return "over its limit"
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                    _wait(process)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        return


if __name__ == "__main__":
    main()
