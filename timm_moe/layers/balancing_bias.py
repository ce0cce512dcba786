"""Balance of the experts without a loss (arXiv 2408.15664), by a bias on their scores.

The bias is for the choice of experts alone, not for their gates.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class BalancingBias(nn.Module):
    """A bias on the scores of the experts, which moves at each optimizer step.

    It rises by ``rate`` for experts with less than the mean load, and falls by it for those with
    more. ``steps`` are whole numbers in float32, whatever the model is cast to. The bias is
    ``rate`` times ``steps`` minus their mean.

    Args:
        num_experts: E.
        rate: change at one step; 0.001 in the paper.

    Attributes:
        steps: (E,) buffer, steps up minus steps down of each expert.
        load: (E,) number of choices of each expert since the last optimizer step, in this process;
            None for no choice.
        process_groups: groups of ``torch.distributed`` whose processes train the layer as one, so
            that the choices of all of them count. It is None until the first step finds those of
            the DistributedDataParallel or the mesh around the layer. Name them where there is
            neither.
    """

    steps: Tensor

    def __init__(self, num_experts: int, rate: float):
        super().__init__()
        self.rate = rate
        self.register_buffer("steps", torch.zeros(num_experts, dtype=torch.float32))
        self.load: Tensor | None = None
        self.process_groups: tuple[Any, ...] | None = None

    def reset_parameters(self) -> None:
        """Set the bias to zero, as in a new router."""
        self.steps.zero_()

    def forward(self, score: Tensor) -> Tensor:
        """Add the bias to scores (..., E)."""
        steps = self.steps.to(score.dtype)
        return score + self.rate * (steps - steps.mean())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "BalancingBias":
        before = self.steps
        super()._apply(fn, recurse)
        if self.steps.dtype != before.dtype:
            self.steps = before.to(self.steps.device)
        return self

    def count(self, load_E: Tensor) -> None:
        """Add the choices of one training forward."""
        self.load = load_E if self.load is None else self.load + load_E

    def update(self, load_E: Tensor) -> None:
        """Make a step by the choices of all processes, and start to count again."""
        self.steps = self.steps.float()  # FSDP1 may have cast the buffer.
        self.steps += (load_E.sum() - load_E * load_E.shape[0]).sign()
        self.load = None

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.load = None  # The choices so far were made by other weights.

    # A copy counts its own choices, and may belong to other processes.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "load": None, "process_groups": None}
