"""Placement of the experts under FSDP2: which part of them each process holds."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..convert.expert_layers import expert_parameters


def expert_placement(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    """Let FSDP2 give each process a part of every expert, so that averaging stays local.

    Without it ``fully_shard`` cuts all parameters along their first dimension, which for experts is
    the expert, so that averaging sends weights. The largest of the other dimensions is taken; torch
    demands that the number of processes divides it.

    Args:
        model: the model, before ``fully_shard`` has seen it.

    Returns:
        A ``shard_placement_fn`` for ``torch.distributed.fsdp.fully_shard`` of the model or of parts
        of it.
    """
    from torch.distributed.tensor import Shard

    # References are weak, since the whole parameters must not stay in memory once they are sharded.
    experts = WeakIdKeyDictionary(dict.fromkeys(expert_parameters(model).values()))

    def place(parameter: nn.Parameter) -> Shard | None:
        if parameter not in experts or parameter.ndim < 2:
            return None
        return Shard(max(range(1, parameter.ndim), key=lambda dim: parameter.shape[dim]))

    return place
