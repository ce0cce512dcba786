"""Mean of a run's latest checkpoints (LAWA): ``python -m studies.latest_average FOLDER CHECKPOINT NUMBER``."""

import re
import sys
from pathlib import Path
from typing import Any

import torch


def average(folder: Path, number: int) -> dict[str, Any]:
    """Load train.py's last checkpoint with the mean of the weights of the last ``number`` checkpoints.

    Raises:
        ValueError: if there are fewer checkpoints.
    """
    found = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := re.fullmatch(r"checkpoint-(\d+)\.pth\.tar", path.name))
    }
    latest = [found[epoch] for epoch in sorted(found)[-number:]]
    if len(latest) < number:
        raise ValueError(f"{folder} holds {len(latest)} checkpoints of epochs, {number} are asked for.")
    checkpoints = [torch.load(path, map_location="cpu", weights_only=False) for path in latest]
    weights = [checkpoint["state_dict"] for checkpoint in checkpoints]
    mean = {
        name: torch.stack([w[name].double() for w in weights]).mean(0).to(tensor.dtype)
        for name, tensor in weights[-1].items()
    }
    kept = {name: value for name, value in checkpoints[-1].items() if name not in ("optimizer", "state_dict_ema")}
    return {**kept, "state_dict": mean}


if __name__ == "__main__":
    torch.save(average(Path(sys.argv[1]), int(sys.argv[3])), sys.argv[2])
