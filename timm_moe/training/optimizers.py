"""Optimizers: the expert layers that one trains, and what is known of its steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..layers import MoeMlp
from .weight_average import local_part


def trained_layers(held: set[int], layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Select the layers of which an optimizer holds a parameter, be it their router's.

    Args:
        held: ids of the optimizer's parameters (:func:`parameter_ids`).
        layers: the layers.
    """
    return [
        layer for layer in layers if any(id(parameter) in held for parameter in layer.parameters())
    ]


def layers_of_trained_experts(held: set[int], layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Select the layers whose experts are parameters of an optimizer, or are computed from some.

    Args:
        held: ids of the optimizer's parameters (:func:`parameter_ids`).
        layers: the layers.
    """

    def are_trained(layer: MoeMlp) -> bool:
        for name, parameter in layer.named_parameters():
            is_of_experts = name.partition(".")[0] not in ("router", "shared")
            if is_of_experts and id(parameter) in held:
                return True
        return False

    return [layer for layer in layers if are_trained(layer)]


def are_frozen(layers: Iterable[MoeMlp]) -> bool:
    """Tell if layers have experts, and all of them are frozen."""
    experts = [stacked for layer in layers for _, stacked in layer.named_expert_parameters()]
    return bool(experts) and not any(stacked.requires_grad for stacked in experts)


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def require_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ValueError if an optimizer holds no parameter of the model."""
    if parameter_ids(optimizer).isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"The optimizer holds no parameter of this {type(model).__name__}. If it holds copies "
            "of them, they would undo the averaging: call timm_moe.average_experts_(model, rate) "
            "after each step and copy the averaged weights back into them."
        )


def has_stepped(optimizer: Optimizer) -> bool:
    """Tell if an optimizer's state counts a step.

    torch makes a state by a first step, which does not count here. Not all optimizers count steps.
    """
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    steps: list[Any] = [state.get("step") for state in states]
    for step in steps:
        is_scalar = isinstance(step, Tensor) and step.numel() == 1
        if (is_scalar or isinstance(step, (int, float))) and float(step) > 1:
            return True
    return False


def is_skipped(optimizer: Optimizer) -> bool:
    """Tell if the optimizer's step leaves the parameters as they are, since a gradient overflowed.

    A GradScaler calls the step of a fused optimizer in this case too.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def only_makes_state(optimizer: Optimizer, args: Any, kwargs: Any) -> bool:
    """Tell if a step has rates and gradients of zero, and so trains nothing.

    torch makes an optimizer's state by such a step as it saves or loads
    (``get_optimizer_state_dict``, ``set_optimizer_state_dict``).

    Args:
        optimizer: the optimizer.
        args: positional arguments of its step, the optimizer first.
        kwargs: keyword arguments of its step.
    """
    # Gradients may make a device wait, so they are read only where all rates are 0, as in the first
    # step of a warm-up.
    if not all(_is_zero(group.get("lr")) for group in optimizer.param_groups):
        return False
    if any(each is not None for each in (*args[1:], *kwargs.values())):
        return False  # A closure computes the gradients.
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    ]
    return all(gradient is not None and not local_part(gradient).any() for gradient in gradients)


def _is_zero(rate: Any) -> bool:
    """Tell if a learning rate is 0. One on a GPU is not read: torch sets its zero on the CPU."""
    is_elsewhere = isinstance(rate, Tensor) and not rate.is_cpu
    return not is_elsewhere and bool(rate == 0)


def is_first_time(optimizer: Optimizer, warning: str) -> bool:
    """Return True the first time that a warning is due for an optimizer.

    This is noted on the optimizer, not in its state.
    """
    given = vars(optimizer).setdefault("_timm_moe_warnings", set())
    is_first = warning not in given
    given.add(warning)
    return is_first


def forget_warnings(optimizer: Optimizer) -> None:
    """Let the run that begins be told of everything again."""
    vars(optimizer).pop("_timm_moe_warnings", None)


def is_distributed() -> bool:
    """Return True if several processes train."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_primary() -> bool:
    """Return True in the process that logs."""
    return not is_distributed() or torch.distributed.get_rank() == 0
