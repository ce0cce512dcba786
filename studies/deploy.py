"""How the model that counts is made of a finished training: commands that write it to a folder."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Deployment(Protocol):
    """Makes a folder that timm loads by ``local-dir:`` of what train.py has left."""

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        """The command lines to run, one after the other.

        Args:
            training: folder with train.py's checkpoints.
            target: folder of the model.
        """
        ...


@dataclass(frozen=True)
class Export:
    """``timm-moe export``: a dense model.

    Attributes:
        options: of the command.
    """

    options: tuple[str, ...] = ()

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        return [_export(training / "last.pth.tar", target, *self.options)]


@dataclass(frozen=True)
class LatestAverage:
    """LAWA (arXiv 2209.14981, 2306.03241): the mean of the weights at the ends of the last epochs.

    Attributes:
        epochs: how many.
    """

    epochs: int

    def commands(self, training: Path, target: Path) -> list[list[str]]:
        averaged = target.parent / f"{target.name}.pth.tar"
        average = [sys.executable, "-m", "studies.latest_average", str(training), str(averaged), str(self.epochs)]
        return [average, _export(averaged, target)]


def _export(checkpoint: Path, target: Path, *options: str) -> list[str]:
    return [
        str(Path(sys.executable).with_name("timm-moe")),
        "export",
        str(checkpoint),
        str(target),
        "--overwrite",
        *options,
    ]
