"""What is measured of deployed models, and by which command."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Figure:
    """A number that is measured.

    Attributes:
        key: in the results.
        title: in the tables, with the unit.
        decimals: shown.
        sign: 1 if more is better, -1 if less is, 0 if neither.
    """

    key: str
    title: str
    decimals: int
    sign: int


class Measure(Protocol):
    """Measures models by a command that writes a file.

    Attributes:
        figures: the first is that of the papers.
        options: of the command, beside what is measured.
    """

    figures: ClassVar[tuple[Figure, ...]]

    @property
    def options(self) -> tuple[str, ...]: ...

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        """The command line.

        Args:
            models: to measure, several together as an ensemble.
            data: options that say which images and device.
            scripts: folder of timm's scripts.
            file: to write.
        """
        ...

    def read(self, file: Path) -> dict[str, float]:
        """The figures by their keys."""
        ...


TOP1 = Figure("top1", "top-1 %", 2, 1)


class Validation:
    """timm's validate.py, of a single model."""

    figures: ClassVar[tuple[Figure, ...]] = (TOP1,)
    options: ClassVar[tuple[str, ...]] = ()

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        (model,) = models
        options = ["--model", f"local-dir:{model}", "--pretrained", "--results-file", str(file)]
        return [sys.executable, str(scripts / "validate.py"), *options, "--results-format", "json", *data]

    def read(self, file: Path) -> dict[str, float]:
        return {"top1": json.loads(file.read_text())["top1"]}


@dataclass(frozen=True)
class Evaluation:
    """``timm-moe evaluate``, which knows the members of an ensemble.

    Attributes:
        options: of the command.
    """

    options: tuple[str, ...] = ()
    figures: ClassVar[tuple[Figure, ...]] = (
        TOP1,
        Figure("nll", "NLL", 4, -1),
        Figure("ece", "ECE", 4, -1),
        Figure("pairwise_kl", "KL of the members", 4, 0),
    )

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        command = [str(Path(sys.executable).with_name("timm-moe")), "evaluate", *map(str, models), *self.options]
        return [*command, "--json", str(file), "--overwrite", *data]

    def read(self, file: Path) -> dict[str, float]:
        metrics = json.loads(file.read_text())["metrics"]
        known = {figure.key: metrics[figure.key] for figure in self.figures if figure.key in metrics}
        return {"top1": 100 * (1 - metrics["error"]), **known}


class Corruptions:
    """:mod:`studies.corruptions`: clean test images, and corrupted ones, of a single model."""

    figures: ClassVar[tuple[Figure, ...]] = (
        TOP1,
        Figure("nll", "NLL", 4, -1),
        Figure("ece", "ECE", 4, -1),
        Figure("corrupted_top1", "top-1 %, corrupted", 2, 1),
        Figure("corrupted_nll", "NLL, corrupted", 4, -1),
        Figure("corrupted_ece", "ECE, corrupted", 4, -1),
    )
    options: ClassVar[tuple[str, ...]] = ()

    def command(self, models: list[Path], data: list[str], scripts: Path, file: Path) -> list[str]:
        (model,) = models
        return [sys.executable, "-m", "studies.corruptions", str(model), str(file), *data]

    def read(self, file: Path) -> dict[str, float]:
        measured = json.loads(file.read_text())
        figures = {"top1": 100 * (1 - measured["clean"]["error"])}
        figures["corrupted_top1"] = 100 * (1 - measured["corrupted"]["error"])
        for key in ("nll", "ece"):
            figures |= {key: measured["clean"][key], f"corrupted_{key}": measured["corrupted"][key]}
        corrupted = {name: of_one for name, of_one in measured.items() if name not in ("clean", "corrupted")}
        return figures | {f"top1, {name}": 100 * (1 - of_one["error"]) for name, of_one in corrupted.items()}
