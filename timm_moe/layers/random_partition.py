"""The router of EWA. Shape suffixes: T rows, D width, E experts."""

import math

import torch
from torch import Tensor

from .functional import Mode, current_mode
from .queues import partition
from .router import Router, generator_device
from .routing import Routing


class RandomPartition(Router):
    """Random uniform partition of all rows over the experts (EWA, section 3.1, eqs. 4-5).

    Each call draws a new partition. If E does not divide T, the first ``T % E`` experts get one row
    more. Gradient checkpointing has to restore the state of torch's generator
    (``preserve_rng_state=True``, its default), or the gradients are wrong.
    """

    depends_on_input = False

    def forward(self, x: Tensor) -> Routing:
        """Partition the rows of x of shape (..., D)."""
        rows, mode = math.prod(x.shape[:-1]), current_mode()
        row_T = torch.randperm(rows, device=generator_device(x.device)).to(x.device)
        # Before torch 2.14 inductor fails where a permutation picks rows (#158457).
        if mode is Mode.COMPILED:
            row_T = row_T.clamp(min=0)
        return partition(row_T, self.num_experts, mode)
