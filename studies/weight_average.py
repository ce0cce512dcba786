"""Mean of the weights of checkpoints of train.py.

The command is ``python -m studies.weight_average OUTPUT CHECKPOINT ...``.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def latest(folder: Path, number: int) -> list[Path]:
    """List the checkpoints of the last ``number`` epochs in a folder of train.py, in their order.

    Raises:
        ValueError: if there are fewer checkpoints.
    """
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)\.pth\.tar", path.name))
    }
    epochs = sorted(found)[-number:]
    if len(epochs) < number:
        raise ValueError(
            f"{folder} holds {len(epochs)} checkpoints of epochs, {number} are asked for."
        )
    return [found[epoch] for epoch in epochs]


def average(paths: Sequence[Path]) -> dict[str, Any]:
    """Load the last of several checkpoints, with the mean of the weights of all of them."""
    checkpoints = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    weights = [checkpoint["state_dict"] for checkpoint in checkpoints]
    mean = {
        name: torch.stack([w[name].double() for w in weights]).mean(0).to(tensor.dtype)
        for name, tensor in weights[-1].items()
    }
    kept = {
        name: value
        for name, value in checkpoints[-1].items()
        if name not in ("optimizer", "state_dict_ema")
    }
    return {**kept, "state_dict": mean}


def main(output: str, *sources: str) -> None:
    """Write the average of checkpoints; ``FOLDER:N`` names the last N epochs of a folder."""
    paths: list[Path] = []
    for source in sources:
        folder, _, number = source.rpartition(":")
        paths += (
            latest(Path(folder), int(number)) if number.isdecimal() and folder else [Path(source)]
        )
    torch.save(average(paths), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
