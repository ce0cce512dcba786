"""Commands that make a model to measure from a finished training."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from .study import Training


class Deployment(Protocol):
    """Makes a model to measure, or the input of another training, from train.py's folder.

    Attributes:
        description: the result in words, or the command.
    """

    @property
    def description(self) -> str: ...

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        """List the command lines to run, one after the other.

        Args:
            training: folder with train.py's checkpoints.
            target: folder for the result.
        """
        ...

    def result(self, training: Path, target: Path) -> Path:
        """Locate the result."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """train.py's last checkpoint, unchanged."""

    description: ClassVar[str] = "the last checkpoint"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return []

    def result(self, training: Path, target: Path) -> Path:
        return training / "last.pth.tar"


@dataclass(frozen=True)
class Export:
    """``timm-moe export``: a folder that timm loads by ``local-dir:``, of a dense model by default.

    Attributes:
        options: options of the command.
    """

    options: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"`{' '.join(['timm-moe export', *self.options])}`"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return [_export(training / "last.pth.tar", target, *self.options)]

    def result(self, training: Path, target: Path) -> Path:
        return target


@dataclass(frozen=True)
class ExportOfCandidate(Export):
    """The same deployment, of a model with a router of :mod:`studies.candidates`.

    Results are stated with this name.
    """


@dataclass(frozen=True)
class LatestAverage:
    """LAWA (arXiv 2209.14981, 2306.03241): the mean of the weights at the ends of the last epochs.

    Attributes:
        epochs: number of epochs.
    """

    epochs: int

    @property
    def description(self) -> str:
        return f"the mean of the last {self.epochs} epochs' checkpoints"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return _export_mean(latest(training, self.epochs), target)

    def result(self, training: Path, target: Path) -> Path:
        return target


@dataclass(frozen=True)
class Soup:
    """Uniform soup (arXiv 2203.05482): the mean of the weights of several trainings from one start.

    Attributes:
        others: the trainings beside the arm's own.
    """

    others: tuple["Training", ...]

    def __str__(self) -> str:
        return f"Soup({', '.join(training.name for training in self.others)})"

    @property
    def description(self) -> str:
        return f"the mean of {len(self.others) + 1} trainings' weights"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        own = training.parent  # <setting>/<training>/<seed>
        folders = [
            *(own.parents[1] / other.name / own.name / training.name for other in self.others),
            training,
        ]
        return _export_mean([folder / "last.pth.tar" for folder in folders], target)

    def result(self, training: Path, target: Path) -> Path:
        return target


def latest(folder: Path, number: int) -> list[Path]:
    """List the checkpoints of the last ``number`` epochs in a folder of train.py, in their order.

    Raises:
        FileNotFoundError: if there are fewer checkpoints.
    """
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)\.pth\.tar", path.name))
    }
    epochs = sorted(found)[-number:]
    if len(epochs) < number:
        raise FileNotFoundError(
            f"{folder} holds {len(epochs)} checkpoints of epochs, {number} are asked for."
        )
    return [found[epoch] for epoch in epochs]


def _export_mean(checkpoints: list[Path], target: Path) -> list[list[str]]:
    averaged = target.parent / f"{target.name}.pth.tar"
    words = map(str, (averaged, *checkpoints))
    average = [sys.executable, "-m", "studies.weight_average", *words]
    return [average, _export(averaged, target)]


def _export(checkpoint: Path, target: Path, *options: str) -> list[str]:
    script = [sys.executable, "-m", "studies.script", "timm-moe"]
    return [*script, "export", str(checkpoint), str(target), "--overwrite", *options]
