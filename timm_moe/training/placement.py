"""Expert models that outgrow one device: which part of the experts each process holds under FSDP2."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..convert.blocks import expert_parameters


def expert_placement(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    """Let FSDP2 give each process a part of every expert, so that averaging stays local.

    Without it ``fully_shard`` cuts all parameters along their first dimension, which for experts is the expert. The
    largest of the other dimensions is taken; torch demands that the number of processes divides it.

    Args:
        model: before ``fully_shard`` has seen it.

    Returns:
        A ``shard_placement_fn`` for ``torch.distributed.fsdp.fully_shard`` of the model or of parts of it.
    """
    from torch.distributed.tensor import Shard

    # Weak references: once sharded, the whole parameters must not stay in memory.
    experts = WeakIdKeyDictionary(dict.fromkeys(expert_parameters(model).values()))

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter not in experts or parameter.ndim < 2:
            return None
        return Shard(max(range(1, parameter.ndim), key=lambda dim: parameter.shape[dim]))

    return place


def local_part(stacked: Tensor) -> Tensor:
    """Return the part of a stacked parameter, (E, ...), that this process holds; it shares the memory.

    Raises:
        ValueError: if the experts are spread over the processes.
    """
    parameter: Any = stacked  # a DTensor, or no such thing
    placements = getattr(stacked, "placements", ())
    if any(placement.is_shard(0) for placement in placements):
        raise ValueError(
            "Experts that are sharded along their first dimension lie in different processes, where they cannot be "
            "averaged: give fully_shard the shard_placement_fn=timm_moe.expert_placement(model)."
        )
    return parameter.to_local() if placements else stacked
