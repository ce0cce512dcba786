"""The equation of expert weight averaging (EWA, eq. 6), on stacked tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..convert.wrappers import is_sharded

#: A share rate: a number, or a tensor () on the experts' device if the optimizer's step can be
#: captured by a CUDA graph.
Rate = float | Tensor


@torch.no_grad()
def average_(due: Iterable[tuple[Tensor, Rate]]) -> None:
    """Move the experts of each stacked tensor towards their mean, in place (EWA, eq. 6).

    ``W_i <- (1 - beta) W_i + beta / (E - 1) sum_{j != i} W_j``. The mean stays, and every deviation
    from it is multiplied by ``1 - beta E / (E - 1)``.

    Args:
        due: tensors (E, ...), each with its share rate beta of this step. Of a sharded tensor
            (FSDP2) each process averages its part. If the processes hold different experts, they
            call this together.
    """
    for stacked, beta in due:
        part = local_part(stacked)
        num_experts = stacked.shape[0]
        if num_experts == 1 or (not isinstance(beta, Tensor) and beta == 0):
            continue
        weight = beta * num_experts / (num_experts - 1)
        if _spread_over(stacked):
            mean = _sum_over_experts(stacked) / num_experts
        else:
            mean = part.mean(0, keepdim=True)
        part.lerp_(mean, weight.to(part) if isinstance(weight, Tensor) else weight)


def local_part(stacked: Any) -> Tensor:
    """Return the part of a stacked parameter, (E, ...), that this process holds.

    It shares the parameter's memory.
    """
    return stacked.to_local() if is_sharded(stacked) else stacked


def _sum_over_experts(stacked: Any) -> Tensor:
    """Sum a stacked parameter, (E, ...), over all experts of all processes, to (1, ...)."""
    total = local_part(stacked).sum(0, keepdim=True)
    for dim in _spread_over(stacked):
        torch.distributed.all_reduce(total, group=stacked.device_mesh.get_group(dim))
    return total


def _spread_over(stacked: Any) -> list[int]:
    """Return the dimensions of the mesh over which different experts are spread.

    FSDP2 cuts experts that are spread already by a placement of its own, which answers no to
    ``is_shard(0)`` though it has a dimension.
    """
    placements = getattr(stacked, "placements", ())
    return [dim for dim, placement in enumerate(placements) if getattr(placement, "dim", None) == 0]
