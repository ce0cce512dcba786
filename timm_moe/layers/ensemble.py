"""An ensemble inside one model: repeated images, and the members' outputs and losses combined.

Shape suffixes: B images, M members, C classes.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Tile:
    """Forward pre-hook of a module: its input holds each image M times in a row (pBE, arXiv 2110.03360, section 4)."""

    def __init__(self, copies: int):
        self.copies = copies

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        return x.repeat_interleave(self.copies, 0), *others


def ensemble_log_probabilities(log_p_BMC: Tensor) -> Tensor:
    """Logarithm of the members' mean probabilities, (B, C)."""
    return log_p_BMC.logsumexp(1) - math.log(log_p_BMC.shape[1])


class MemberLoss(nn.Module):
    """The mean loss of the members: every member's output is compared with its image's target (pBE, section 4.1).

    The criterion is any loss on outputs (B, C) and targets (B,) or (B, C).
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.criterion = criterion

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The criterion of outputs (B, M, C) and the targets of the B images; outputs of other shapes go unchanged."""
        if output.ndim != 3:
            return self.criterion(output, target)
        return self.criterion(output.flatten(0, 1), target.repeat_interleave(output.shape[1], 0))
