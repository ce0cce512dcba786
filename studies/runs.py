"""Trains, deploys and measures, in one process for each run.

A run is a training for one seed with all arms that come from it. Its folder records its state:

    <setting>/<training>/<seed>/
        uses-<name>/     results of other trainings that it needs
        train/           train.py's checkpoints; a killed run continues from last.pth.tar
        stated.json      options of the run, so that no other run is mistaken for it
        trained.json     cost, once train.py has ended
        <arm>/           the deployed model
        <arm>.json       its figures
        log.txt          output of all commands; one that works locks it
"""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.machine import versions
from timm_moe.checkpoints.summary_csv import read_summary

from .deploy import Deployment
from .images import Part, link
from .measure import Measure
from .study import Arm, Size, Study, Training, slug

#: Seeds between two draws.
DRAWS = 1000


class RunFailed(RuntimeError):
    """A command of a run has failed."""


@dataclass(frozen=True)
class Place:
    """Locations of a setting.

    Attributes:
        scripts: folder with timm's train.py and validate.py.
        root: folder of the runs of the setting, with a folder of images for each key.
        images: identity of the images, by their keys.
        device: ``"cpu"`` or ``"cuda"``.
        threads: number of threads of a run on a CPU.
        compiles: whether trainings on a CPU are compiled, though their study does not say so.
    """

    scripts: Path
    root: Path
    images: dict[str, Part]
    device: str = "cpu"
    threads: int = 1
    compiles: bool = False

    @classmethod
    def of(
        cls,
        size: Size,
        folder: Path,
        data: Path,
        device: str = "cpu",
        threads: int = 1,
        compiles: bool = False,
    ) -> "Place":
        """Prepare the folder of a size's setting, with links to its images in ``data``.

        Raises:
            ValueError: if TIMM_SCRIPTS names no folder with timm's scripts.
        """
        scripts = Path(os.environ.get("TIMM_SCRIPTS", ""))
        if not all((scripts / name).is_file() for name in ("train.py", "validate.py")):
            raise ValueError("TIMM_SCRIPTS names no folder with timm's train.py and validate.py.")
        root = (folder / size.setting).resolve()
        root.mkdir(parents=True, exist_ok=True)
        parts = {name: link(part, data, root / name) for name, part in size.images.items()}
        return cls(scripts.resolve(), root, parts, device, threads, compiles)

    def environment(self) -> dict[str, str]:
        """Return the variables of a run's commands."""
        threads = str(self.threads)
        return {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def versions(self) -> dict[str, str]:
        """List hardware and versions for the results, and how a run used the CPU."""
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        compiled = ", compiled" if self.compiles else ""
        return versions(self.device, f"{threads} a run{compiled}")


@dataclass(frozen=True, eq=False)
class Run:
    """A training for one seed, and the arms that come from it."""

    study: Study
    size: Size
    training: Training
    seed: int
    place: Place

    @property
    def name(self) -> str:
        return f"{self.training.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.place.root / self.training.name / str(self.seed)

    def _of(self, training: Training) -> "Run":
        """Make the run of another training for the same seed."""
        return replace(self, training=training)

    def arms(self) -> list[Arm]:
        return [arm for arm in self.size.arms if arm.training.name == self.training.name]

    def stated(self) -> dict[str, Any]:
        """Collect everything that determines the results of the run, except seed and versions."""
        return {
            "model": self.size.models[self.training.model],
            "kwargs": [*self.size.kwargs, *self.training.kwargs],
            "options": [*self.size.options, *self.training.options],
            "images": asdict(self.place.images[self.training.images]),
            "device": self.place.device,
            "uses": {
                use.name: [str(use.deployment), self._of(use.training).stated()]
                for use in self.training.uses
            },
            "callback": self.training.callback,
            "draw": self.training.draw,
        }

    def is_done(self) -> bool:
        """Check that nothing is left to do."""
        return self.is_trained() and all(self._figures(arm) is not None for arm in self.arms())

    def is_trained(self) -> bool:
        """Check that train.py has ended."""
        return (self.folder / "trained.json").exists() and not self._is_another()

    def _is_another(self) -> bool:
        """Check for a run of other options in the folder."""
        path = self.folder / "stated.json"
        return path.exists() and json.loads(path.read_text()) != self.stated()

    def can_start(self) -> bool:
        """Check that the trainings that it needs have ended."""
        needed = [use.training for use in self.training.uses]
        needed += [training for arm in self.arms() for training in arm.others()]
        return all(self._of(training).is_trained() for training in needed)

    def results(self) -> dict[str, Any]:
        """Read the cost and the figures of each arm so far.

        They are empty if the folder holds another run.
        """
        if self._is_another():
            return {"cost": None, "arms": {}}
        cost = self.folder / "trained.json"
        figures = {arm.name: self._figures(arm) for arm in self.arms()}
        return {
            "cost": json.loads(cost.read_text()) if cost.exists() else None,
            "arms": {name: known for name, known in figures.items() if known is not None},
        }

    def statement(self, arm: Arm) -> dict[str, Any]:
        """Collect everything that determines the figures of an arm, except seed and versions."""
        beside = {training.name: self._of(training).stated() for training in arm.others()}
        measure = " ".join([type(self._measure_of(arm)).__name__, *self._measure_of(arm).options])
        deployed = {"deployment": str(arm.deployment), "beside": beside, "measure": measure}
        return {"training": self.stated(), **deployed}

    def _measure_of(self, arm: Arm) -> Measure:
        return arm.measure or self.study.measure

    def _figures(self, arm: Arm) -> dict[str, float] | None:
        """Read the figures of an arm; None if it was not measured, or in another way."""
        path = self._result(arm)
        known = json.loads(path.read_text()) if path.exists() else {}
        return known["figures"] if known.get("stated") == self.statement(arm) else None

    def work(self) -> None:
        """Do the missing steps.

        Raises:
            RunFailed: if a command fails (finished steps are kept), or the folder holds another
                run.
            BlockingIOError: if another process works here.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.txt").open("a") as log:
            # The commands write to it, so they hold the lock too.
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_another():
                raise RunFailed(
                    f"{self.name}: {self.folder} holds a run of other options: move it away."
                )
            write_json(self.folder / "stated.json", self.stated())
            if not self.is_trained():
                self._train(log)
            for arm in self.arms():
                if self._figures(arm) is None:
                    self._measure(arm, log)
            fcntl.flock(log, fcntl.LOCK_UN)  # what a command has left running does not hold it

    def progress(self) -> float:
        """Compute the fraction of its epochs that are over."""
        rows = read_summary(self.folder / "train", ())
        return max((row["epoch"] + 1 for row in rows), default=0) / self._epochs()

    def images_to_see(self) -> int:
        """Multiply epochs by training images, to estimate the length of the run."""
        images = sum(1 for _ in (self.place.root / self.training.images / "train").glob("*/*"))
        return self._epochs() * images

    def _epochs(self) -> int:
        options = [*self.size.options, *self.training.options]
        last = len(options) - 1 - options[::-1].index("--epochs")
        return int(options[last + 1])

    def _saved_epochs(self) -> int:
        """Count the epochs of the last checkpoint; summary.csv may be an epoch ahead."""
        path = self.folder / "train" / "last.pth.tar"
        if not path.exists():
            return 0
        return int(torch.load(path, map_location="cpu", weights_only=False, mmap=True)["epoch"]) + 1

    def _result(self, arm: Arm) -> Path:
        return self.folder / f"{slug(arm.name)}.json"

    def _train(self, log: IO[str]) -> None:
        is_whole = not (self.folder / "train" / "last.pth.tar").exists()
        used = {
            use.name: self._deploy(use.training, use.deployment, f"uses-{use.name}", log)
            for use in self.training.uses
        }
        seconds = self._call(self._train_command(used), log)
        epochs = self._saved_epochs()
        if epochs < self._epochs():  # train.py returns 0 if it is interrupted
            raise RunFailed(
                f"{self.name}: train.py was interrupted after {epochs} of {self._epochs()} epochs."
            )
        trained = {
            "seconds": seconds,
            "whole": is_whole,
            "versions": self.place.versions(),
            "curve": self._curve(),
        }
        write_json(self.folder / "trained.json", trained)

    def _curve(self) -> list[dict[str, float]]:
        """Read losses and top-1 of each epoch that train.py evaluated, from its summary.csv."""
        keys = ("train_loss", "eval_loss", "eval_top1")
        rows = read_summary(self.folder / "train", keys)
        known = {int(row["epoch"]): row for row in rows if "eval_loss" in row}
        return [
            {"epoch": epoch, **{key: known[epoch][key] for key in keys}} for epoch in sorted(known)
        ]

    def _train_command(self, used: dict[str, Path]) -> list[str]:
        callbacks = self.training.callback.split()
        script = ["-m", "studies.script", *callbacks, str(self.place.scripts / "train.py")]
        stated = self.stated()
        options = [
            "--model",
            stated["model"],
            *(["--model-kwargs", *stated["kwargs"]] if stated["kwargs"] else []),
        ]
        # Options of the study come last, so they hold: with --val-split test it has a curve.
        options += ["--val-split", ""]
        if self.place.compiles:
            options += ["--torchcompile", "inductor"]
        options += [option.format_map(used) for option in stated["options"]]
        options += self._data_options()
        options += [
            "--num-classes",
            str(self.place.images[self.training.images].classes),
            "--seed",
            str(self.seed + DRAWS * self.training.draw),
        ]
        options += ["--output", str(self.folder), "--experiment", "train"]
        last = self.folder / "train" / "last.pth.tar"
        if last.exists():
            options += ["--resume", str(last)]
        return [sys.executable, *script, *options]

    def _data_options(self) -> list[str]:
        workers = "0" if self.place.device == "cpu" else "4"
        images = self.place.root / self.training.images
        return ["--data-dir", str(images), "--device", self.place.device, "-j", workers]

    def _deploy(self, training: Training, deployment: Deployment, name: str, log: IO[str]) -> Path:
        """Deploy a training in a folder of this run."""
        source, target = self._of(training).folder / "train", self.folder / name
        for command in deployment.commands(source, target):
            self._call(command, log)
        return deployment.result(source, target)

    def _measure(self, arm: Arm, log: IO[str]) -> None:
        trainings = (self.training, *arm.beside)
        names = [slug(arm.name), *(f"{slug(arm.name)}-{training.name}" for training in arm.beside)]
        models = [
            self._deploy(training, arm.deployment, name, log)
            for training, name in zip(trainings, names, strict=True)
        ]
        measured = self.folder / f"{slug(arm.name)}.measured.json"
        data = [*self._data_options(), "--split", "test"]
        measure = self._measure_of(arm)
        self._call(measure.command(models, data, self.place.scripts, measured), log)
        figures = measure.read(measured)
        if missing := [
            name for name, value in figures.items() if value is None or not math.isfinite(value)
        ]:
            raise RunFailed(
                f"{self.name}: {arm.name} has no {', '.join(missing)}: its outputs are not numbers."
            )
        write_json(self._result(arm), {"stated": self.statement(arm), "figures": figures})

    def _call(self, command: list[str], log: IO[str]) -> float:
        """Run a command, and return its seconds: of CPU time, or of wall time on a GPU."""
        started = time.monotonic()
        print(f"+ {' '.join(command)}", file=log, flush=True)
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=self.place.environment()
        )
        _COMMANDS.add(process.pid)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            _COMMANDS.discard(process.pid)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            last_line = (Path(log.name).read_text().splitlines() or [""])[-1]
            words = (
                word
                for word in command[1:]
                if not word.startswith("-") and word != "studies.script"
            )
            what = Path(next(words)).name
            raise RunFailed(
                f"{self.name}: {what} ended with {process.returncode}: {last_line} ({log.name})"
            )
        is_cpu = self.place.device == "cpu"
        return usage.ru_utime + usage.ru_stime if is_cpu else time.monotonic() - started


#: Ids of the running commands.
_COMMANDS: set[int] = set()


def stop_commands() -> None:
    """End the running commands, so that they do not outlive this process."""
    for process in list(_COMMANDS):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)


def write_json(path: Path, content: Any) -> None:
    """Write a file as a whole, even if two processes write at once or one is killed."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
