"""How what counts is made of a finished training: commands, and where their result is."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol


class Deployment(Protocol):
    """Makes what is measured, or what another training needs, of train.py's folder.

    Attributes:
        told: what is deployed, in words or as a command.
    """

    @property
    def told(self) -> str: ...

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        """The command lines to run, one after the other.

        Args:
            training: folder with train.py's checkpoints.
            target: folder for the result.
        """
        ...

    def result(self, training: Path, target: Path) -> Path:
        """Where the result is."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """train.py's last checkpoint, as it is."""

    told: ClassVar[str] = "the last checkpoint"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return []

    def result(self, training: Path, target: Path) -> Path:
        return training / "last.pth.tar"


@dataclass(frozen=True)
class Export:
    """``timm-moe export``: a folder that timm loads by ``local-dir:``, of a dense model unless the options say else.

    Attributes:
        options: of the command.
    """

    options: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        return f"`{' '.join(['timm-moe export', *self.options])}`"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return [_export(training / "last.pth.tar", target, *self.options)]

    def result(self, training: Path, target: Path) -> Path:
        return target


@dataclass(frozen=True)
class LatestAverage:
    """LAWA (arXiv 2209.14981, 2306.03241): the mean of the weights at the ends of the last epochs.

    Attributes:
        epochs: how many.
    """

    epochs: int

    @property
    def told(self) -> str:
        return f"the mean of the last {self.epochs} epochs' checkpoints"

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        averaged = target.parent / f"{target.name}.pth.tar"
        average = [sys.executable, "-m", "studies.latest_average", str(training), str(averaged), str(self.epochs)]
        return [average, _export(averaged, target)]

    def result(self, training: Path, target: Path) -> Path:
        return target


def _export(checkpoint: Path, target: Path, *options: str) -> list[str]:
    command = str(Path(sys.executable).with_name("timm-moe"))
    return [command, "export", str(checkpoint), str(target), "--overwrite", *options]
