"""Optimizers: the expert layers that one trains, and what is known of its steps."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from ..layers import MoeMlp


def trained_layers(
    optimizer: Optimizer, layers: Iterable[MoeMlp], trained: set[int] | None = None
) -> list[MoeMlp]:
    """Select the layers that have a parameter among the optimizer's, be it their router's.

    ``trained`` are the ids of its parameters, for those who have them.
    """
    ids = parameter_ids(optimizer) if trained is None else trained
    return [
        layer for layer in layers if any(id(parameter) in ids for parameter in layer.parameters())
    ]


def layers_of_trained_experts(
    optimizer: Optimizer, layers: Iterable[MoeMlp], trained: set[int] | None = None
) -> list[MoeMlp]:
    """Select the layers whose experts are among the optimizer's parameters, or are computed from some of them."""
    ids = parameter_ids(optimizer) if trained is None else trained

    def are_trained(layer: MoeMlp) -> bool:
        others = ("router", "shared")
        return any(
            id(p) in ids
            for name, p in layer.named_parameters()
            if name.partition(".")[0] not in others
        )

    return list(filter(are_trained, layers))


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def require_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ValueError if an optimizer holds no parameter of the model."""
    if parameter_ids(optimizer).isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"The optimizer holds no parameter of this {type(model).__name__}. If it holds copies "
            "of them, they would undo the averaging: call timm_moe.average_experts_(model, rate) "
            "after each step and copy the averaged weights back into them."
        )


def is_skipped(optimizer: Optimizer) -> bool:
    """Return True while a GradScaler steps a fused optimizer that leaves its parameters, as a gradient overflowed."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def is_first_time(optimizer: Optimizer, warning: str) -> bool:
    """Return True the first time a warning is due for an optimizer; noted on the optimizer, not in its state."""
    given = vars(optimizer).setdefault("_timm_moe_warnings", set())
    is_first = warning not in given
    given.add(warning)
    return is_first


def is_distributed() -> bool:
    """Return True if several processes train."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_primary() -> bool:
    """Return True in the process that logs."""
    return not is_distributed() or torch.distributed.get_rank() == 0
