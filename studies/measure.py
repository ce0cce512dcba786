"""The figures that are measured, and the commands that measure them."""

import json
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Figure:
    """A number that is measured.

    Attributes:
        key: key in the results.
        title: title in the tables, with the unit.
        decimals: number of decimals shown.
        sign: 1 if more is better, -1 if less is, 0 if neither.
        is_main: show it in docs/results.md, and not only in docs/generated/studies.md.
    """

    key: str
    title: str
    decimals: int
    sign: int
    is_main: bool = True


class Measure(ABC):
    """Measures models by a command that writes a file.

    Attributes:
        figures: all figures; the papers report the first.
        options: further options of the command.
    """

    figures: ClassVar[tuple[Figure, ...]]
    options: tuple[str, ...] = ()

    def figure(self, key: str) -> Figure:
        """Look up a figure; the first one for an empty key."""
        return next(figure for figure in self.figures if key in ("", figure.key))

    @abstractmethod
    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        """Build the command line.

        Args:
            models: models to measure; several form an ensemble.
            data: options for images and device.
            scripts: folder of timm's scripts.
            file: file that the command writes.
        """

    @abstractmethod
    def read(self, file: Path) -> dict[str, float]:
        """Read the figures, by their keys."""


TOP1 = Figure("top1", "top-1 %", 2, 1)


class Validation(Measure):
    """Top-1 of a single model, by timm's validate.py."""

    figures: ClassVar[tuple[Figure, ...]] = (TOP1,)

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        (model,) = models
        options = ["--model", f"local-dir:{model}", "--pretrained", "--results-file", str(file)]
        return [
            sys.executable,
            str(scripts / "validate.py"),
            *options,
            "--results-format",
            "json",
            *data,
        ]

    def read(self, file: Path) -> dict[str, float]:
        return {"top1": json.loads(file.read_text())["top1"]}


@dataclass(frozen=True)
class Evaluation(Measure):
    """Metrics of a model or an ensemble, by :mod:`studies.evaluation`.

    Attributes:
        options: further options of the command.
    """

    options: tuple[str, ...] = ()
    figures: ClassVar[tuple[Figure, ...]] = (
        TOP1,
        Figure("nll", "NLL", 4, -1),
        Figure("ece", "ECE", 4, -1),
        Figure("pairwise_kl", "KL of the members", 4, 0, is_main=False),
    )

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        command = [sys.executable, "-m", "studies.evaluation", *map(str, models), *self.options]
        return [*command, "--json", str(file), *data]

    def read(self, file: Path) -> dict[str, float]:
        metrics = json.loads(file.read_text())["metrics"]
        known = {
            figure.key: metrics[figure.key] for figure in self.figures if figure.key in metrics
        }
        return {"top1": 100 * (1 - metrics["error"]), **known}


class Corruptions(Measure):
    """Metrics of a single model on clean and on corrupted images, by :mod:`studies.corruptions`."""

    figures: ClassVar[tuple[Figure, ...]] = (
        TOP1,
        Figure("nll", "NLL", 4, -1, is_main=False),
        Figure("ece", "ECE", 4, -1, is_main=False),
        Figure("corrupted_top1", "top-1 %, corrupted", 2, 1),
        Figure("corrupted_nll", "NLL, corrupted", 4, -1, is_main=False),
        Figure("corrupted_ece", "ECE, corrupted", 4, -1, is_main=False),
    )

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        (model,) = models
        return [sys.executable, "-m", "studies.corruptions", str(model), str(file), *data]

    def read(self, file: Path) -> dict[str, float]:
        measured = json.loads(file.read_text())
        figures = {"top1": 100 * (1 - measured["clean"]["error"])}
        figures["corrupted_top1"] = 100 * (1 - measured["corrupted"]["error"])
        for key in ("nll", "ece"):
            figures |= {key: measured["clean"][key], f"corrupted_{key}": measured["corrupted"][key]}
        corrupted = {
            name: of_one for name, of_one in measured.items() if name not in ("clean", "corrupted")
        }
        return figures | {
            f"top1, {name}": 100 * (1 - of_one["error"]) for name, of_one in corrupted.items()
        }
