"""Runs what is missing of a study: trains, deploys and validates, one process and one thread for each run.

A run is a training for one seed with all arms that are deployed of it. Its folder says what is done:

    <study>-<size>/<training>/<seed>/
        train/           train.py's checkpoints; last.pth.tar is what a killed run goes on from
        stated.json      what the run is about, so that another one is never taken for it
        trained.json     cost, once train.py has ended
        <arm>/           the deployed model
        <arm>.json       what validate.py says of it
        log.txt          all that was printed
        lock             held by whoever works here, also if the process that started it was killed
"""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .study import Arm, Size, Study, Training

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RunFailed(RuntimeError):
    """A command of a run has failed."""


@dataclass(frozen=True)
class Place:
    """Where things are.

    Attributes:
        scripts: folder with timm's train.py and validate.py.
        images: folder of the study's images.
        root: of the study's runs.
        classes: number of classes of the images.
        device: ``"cpu"`` or ``"cuda"``.
    """

    scripts: Path
    images: Path
    root: Path
    classes: int
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Run:
    """A training for one seed, and the arms that are deployed of it."""

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
        return self._folder_of(self.training)

    def _folder_of(self, training: Training) -> Path:
        return self.place.root / training.name / str(self.seed)

    def arms(self) -> list[Arm]:
        return [arm for arm in self.study.arms if arm.training.name == self.training.name]

    def stated(self) -> dict[str, Any]:
        """What decides the results of the run, beside seed and versions."""
        starts = [training.name for training in (self.training.start,) if training is not None]
        return {
            "model": self.size.models[self.training.model],
            "kwargs": [*self.size.kwargs, *self.training.kwargs],
            "options": [*self.size.options, *self.training.options],
            "images": [list(self.size.images.classes), list(self.size.images.train)],
            "starts": starts,
            "callback": self.training.callback,
        }

    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        done = (self.folder / "trained.json").exists() and all(self._result(arm).exists() for arm in self.arms())
        return done and not self._is_another()

    def _is_another(self) -> bool:
        """Whether the folder holds a run that was stated otherwise."""
        path = self.folder / "stated.json"
        return path.exists() and json.loads(path.read_text()) != self.stated()

    def can_start(self) -> bool:
        """Whether the training that it begins from has ended."""
        start = self.training.start
        return start is None or (self._folder_of(start) / "trained.json").exists()

    def results(self) -> dict[str, Any]:
        """What is known so far: the training's cost, and what validate.py says of each arm; nothing of another run."""
        if self._is_another():
            return {"cost": None, "arms": {}}
        cost = self.folder / "trained.json"
        return {
            "cost": json.loads(cost.read_text()) if cost.exists() else None,
            "arms": {
                arm.name: json.loads(self._result(arm).read_text()) for arm in self.arms() if self._result(arm).exists()
            },
        }

    def work(self) -> None:
        """Do what is missing.

        Raises:
            RunFailed: if a command fails, what was done before stays; if the folder holds another run.
            BlockingIOError: if another process works here.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / "lock") as lock, (self.folder / "log.txt").open("a") as log:
            if self._is_another():
                raise RunFailed(f"{self.name}: {self.folder} holds a run of other options: move it away.")
            _write(self.folder / "stated.json", self.stated())
            if not (self.folder / "trained.json").exists():
                is_whole = not (self.folder / "train" / "last.pth.tar").exists()
                cost = self._call(self._train_command(), log, lock)
                _write(self.folder / "trained.json", {**cost, "whole": is_whole})
            for arm in self.arms():
                if not self._result(arm).exists():
                    self._deploy(arm, log, lock)

    def progress(self) -> float:
        """The fraction of its epochs that are over."""
        summary = self.folder / "train" / "summary.csv"
        lines = summary.read_text().splitlines() if summary.exists() else []
        epochs = [
            int(line.partition(",")[0]) + 1 for line in lines if line[:1].isdigit()
        ]  # a resumed run has two heads
        options = [*self.training.options, *self.size.options]
        return max(epochs, default=0) / int(options[options.index("--epochs") + 1])

    def _result(self, arm: Arm) -> Path:
        return self.folder / f"{slug(arm.name)}.json"

    def _train_command(self) -> list[str]:
        script = [str(self.place.scripts / "train.py")]
        if self.training.callback:
            script = ["-m", "studies.callbacks", self.training.callback, *script]
        stated = self.stated()
        options = ["--model", stated["model"], *(["--model-kwargs", *stated["kwargs"]] if stated["kwargs"] else [])]
        options += [*stated["options"], *self._data_options(), "--val-split", "test"]
        options += ["--num-classes", str(self.place.classes), "--seed", str(self.seed)]
        options += ["--output", str(self.folder), "--experiment", "train"]
        last = self.folder / "train" / "last.pth.tar"
        if last.exists():
            options += ["--resume", str(last)]
        elif self.training.start is not None:
            options += ["--initial-checkpoint", str(self._folder_of(self.training.start) / "train" / "last.pth.tar")]
        return [sys.executable, *script, *options]

    def _data_options(self) -> list[str]:
        workers = "0" if self.place.device == "cpu" else "4"
        return ["--data-dir", str(self.place.images), "--device", self.place.device, "-j", workers]

    def _deploy(self, arm: Arm, log: IO[str], lock: int) -> None:
        target = self.folder / slug(arm.name)
        for command in arm.deployment.commands(self.folder / "train", target):
            self._call(command, log, lock)
        validation = self.folder / f"{slug(arm.name)}.validation.json"
        options = ["--model", f"local-dir:{target}", "--pretrained", *self._data_options(), "--split", "test"]
        options += ["--results-file", str(validation), "--results-format", "json"]
        self._call([sys.executable, str(self.place.scripts / "validate.py"), *options], log, lock)
        _write(self._result(arm), json.loads(validation.read_text()))

    def _call(self, command: list[str], log: IO[str], lock: int) -> dict[str, float]:
        """Run a command, whose process holds the lock too; its cost, in seconds of CPU time and MiB at the peak."""
        print(f"+ {' '.join(command)}", file=log, flush=True)
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ONE_THREAD}, pass_fds=[lock]
        )
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            last_line = (Path(log.name).read_text().splitlines() or [""])[-1]
            what = next(Path(word).name for word in command if not word.startswith("-") and word != sys.executable)
            raise RunFailed(f"{self.name}: {what} ended with {process.returncode}: {last_line} ({log.name})")
        return {"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_mib": usage.ru_maxrss / 1024}


def slug(name: str) -> str:
    """A name as that of a file."""
    return "-".join(re.findall(r"[a-z0-9.]+", name.lower()))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file.fileno()


def _write(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)
