"""The command ``python -m benchmarks [SUITE ...]``.

It measures, and writes results, report and charts.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from . import distributed, report
from .machine import cpu_name
from .protocol import Setting
from .worker import begin

FOLDER = Path(__file__).parent
#: glibc returns large blocks to the system and maps them again, page by page, at each use; this
#: keeps them.
NEUTRAL_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

#: Settings of each suite where they differ from the defaults. The allocator matters only on CPUs.
PLAN = {
    "layers": [
        dict(dtype=dtype, mode=mode, allocator=allocator, rounds=7)
        for mode in ("eager", "compiled")
        for dtype in ("float32", "bfloat16")
        for allocator in ("neutral", "default")
        if mode == "eager" or allocator == "neutral"
    ],
    "steps": [
        dict(dtype=dtype, allocator="neutral", rounds=7) for dtype in ("float32", "bfloat16")
    ],
    "modes": [{}],
    "large": [{}],
    "host": [dict(dtype=dtype) for dtype in ("float32", "bfloat16")],
    "averaging": [dict(allocator=allocator) for allocator in ("neutral", "default")],
    "evaluation": [
        dict(dtype=dtype, mode=mode, allocator="neutral", rounds=9)
        for dtype in ("float32", "bfloat16")
        for mode in ("eager", "compiled")
    ],
    "peers": [
        dict(dtype=dtype, mode=mode, allocator="neutral", rounds=7)
        for mode in ("eager", "compiled")
        for dtype in ("float32", "bfloat16")
    ],
    "papers": [
        dict(dtype=dtype, allocator="neutral", rounds=7) for dtype in ("float32", "bfloat16")
    ],
    "scaling": [dict(mode=mode, allocator="neutral", rounds=5) for mode in ("eager", "compiled")],
    "imports": [{}],
    "exporting": [dict(rounds=5)],
}
#: Suites of one device: three use no GPU, and three are too large for a CPU.
DEVICES = {
    "host": "cpu",
    "modes": "cuda",
    "large": "cuda",
    "imports": "cpu",
    "exporting": "cpu",
    "papers": "cuda",
}

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Setting)}
CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "mode": ("eager", "compiled"),
    "allocator": ("neutral", "default"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE",
        help=f"of {', '.join(PLAN)}; by default all; or distributed",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, values in CHOICES.items():
        parser.add_argument(
            f"--{name}", choices=values, help="only these settings of the suites; by default all"
        )
    parser.add_argument(
        "--rounds", type=int, help="of each contest, instead of each suite's own number"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="N",
        help=(
            "begin no contest after N minutes; the same command goes on, without the contests that "
            "it has timed"
        ),
    )
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, write the report of earlier results"
    )
    parser.add_argument(
        "--add",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="measure nothing, add the results that another machine has written",
    )
    args = parser.parse_args()
    if args.suites == ["distributed"]:  # counted, not timed
        distributed.write()
        return
    unknown = set(args.suites) - set(PLAN)
    if unknown:
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(PLAN)}")
    for file in args.add:
        _add(file)
    suites = [] if args.report or args.add else args.suites or PLAN
    pieces = [(suite, setting) for suite in suites for setting in _settings(suite, args)]
    if suites and not pieces:
        parser.error("no suite has these settings on this device")
    failed = _measure_all(pieces, args.minutes)
    report.write(FOLDER / "results")
    if failed:
        sys.exit(f"Not measured, see above: {', '.join(failed)}.")


def _measure_all(pieces: list[tuple[str, dict[str, Any]]], minutes: float | None) -> list[str]:
    """Measure suites in their settings.

    With a limit of time only what is missing is measured.

    Returns:
        The suites that failed.
    """
    until = time.time() + 60 * minutes if minutes else None
    failed = []
    # Compiled settings come last, as compiling takes minutes.
    for suite, setting in sorted(pieces, key=lambda piece: piece[1].get("mode") == "compiled"):
        path = FOLDER / "results" / f"{_machine(setting['device'])}.json"
        if minutes and begin(suite, setting, path)["whole"]:
            continue
        if not _measure(suite, setting, path, until):
            failed.append(suite)
        if until and time.time() > until:
            print("The time is over. The same command goes on from here.", file=sys.stderr)
            break
    return failed


def _settings(suite: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    if DEVICES.get(suite, args.device) != args.device:
        return []
    chosen = {"device": args.device, **({"rounds": args.rounds} if args.rounds else {})}
    settings = [{**setting, **chosen} for setting in PLAN[suite]]
    if args.device == "cuda":
        settings = [setting for setting in settings if setting.get("allocator") != "default"]
    wanted = {name: getattr(args, name) for name in CHOICES if getattr(args, name)}
    return [
        setting
        for setting in settings
        if all(setting.get(name, DEFAULTS[name]) == value for name, value in wanted.items())
    ]


def _measure(suite: str, setting: dict[str, Any], path: Path, until: float | None) -> bool:
    """Measure in a process of its own, which stores the result; False if it fails."""
    print(f"{suite} ({' '.join(map(str, setting.values()))})", file=sys.stderr, flush=True)
    allocator = NEUTRAL_ALLOCATOR if setting.get("allocator") == "neutral" else {}
    command = [sys.executable, "-m", "benchmarks.worker", suite, json.dumps(setting), str(path)]
    command += [str(until)] if until else []
    return not subprocess.run(
        command, env={**os.environ, **ONE_THREAD, **allocator}, cwd=FOLDER.parent
    ).returncode


def _add(file: Path) -> None:
    """Add results to those of their machine."""
    for key, result in json.loads(file.read_text()).items():
        device, name = result["setting"]["device"], result["environment"]["device"]
        path = FOLDER / "results" / f"{_file_name(device, name.removesuffix(', one thread'))}.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, key: result}, indent=1))


def _machine(device: str) -> str:
    """Name the machine: ratios differ between kinds of device, so each kind has its own results."""
    return _file_name(device, cpu_name() if device == "cpu" else torch.cuda.get_device_name())


def _file_name(device: str, name: str) -> str:
    return "-".join([device, *re.findall(r"[a-z0-9]+", name.lower())])


if __name__ == "__main__":
    main()
