"""Who decides which rows go to which expert."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Routing(NamedTuple):
    """Which rows each expert gets.

    Attributes:
        order: (T,) row indices sorted by expert: first the rows of expert 0, then those of expert 1, ...
        sizes: number of rows of each expert, E integers.
    """

    order: Tensor
    sizes: list[int]


class RandomPartition(nn.Module):
    """Random uniform partition of all rows over the experts, drawn anew at each call (EWA, section 3.1, eqs. 4-5).

    The parts have equal size; where T is not divisible by E the first ``T % E`` experts get one row more. The
    permutation comes from torch's global generator of the rows' device.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int):
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x_TD: Tensor) -> Routing:
        """Partition the T rows of ``x_TD``."""
        rows = x_TD.shape[0]
        quotient, remainder = divmod(rows, self.num_experts)
        sizes = [quotient + (expert < remainder) for expert in range(self.num_experts)]
        return Routing(torch.randperm(rows, device=x_TD.device), sizes)
