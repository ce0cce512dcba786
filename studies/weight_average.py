"""Mean of the weights of checkpoints of train.py.

The command is ``python -m studies.weight_average OUTPUT CHECKPOINT ...``.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch


def average(paths: Sequence[str]) -> dict[str, Any]:
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


def main(output: str, *paths: str) -> None:
    """Write the average of checkpoints."""
    torch.save(average(paths), output)


if __name__ == "__main__":
    main(*sys.argv[1:])
