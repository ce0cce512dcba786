"""Optimizers: the expert layers that one trains, and hooks on its steps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..layers import MoeMlp


def trained_layers(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Select the layers that have a parameter among the optimizer's, be it their router's."""
    trained = parameter_ids(optimizer)
    return [layer for layer in layers if any(id(parameter) in trained for parameter in layer.parameters())]


def layers_of_trained_experts(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Select the layers whose experts are among the optimizer's parameters, or are computed from some of them."""
    trained = parameter_ids(optimizer)

    def are_trained(layer: MoeMlp) -> bool:
        others = ("router", "shared")
        return any(id(p) in trained for name, p in layer.named_parameters() if name.partition(".")[0] not in others)

    return list(filter(are_trained, layers))


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def require_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise ValueError if an optimizer holds no parameter of the model."""
    if parameter_ids(optimizer).isdisjoint(map(id, model.parameters())):
        raise ValueError(
            f"The optimizer holds no parameter of this {type(model).__name__}. If it holds copies of them, they would "
            "undo the averaging: call timm_moe.average_experts_(model, rate) after each step and copy the averaged "
            "weights back into them."
        )


def refuse_dense(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> None:
    """Raise ValueError if an optimizer, or the state that it loaded, belongs to the dense model."""
    held, trained = parameter_ids(optimizer), layers_of_trained_experts(optimizer, layers)
    for layer in layers:
        is_frozen = not any(stacked.requires_grad for _, stacked in layer.named_expert_parameters())
        replaced = any(id(parameter) in held for reference in layer.replaced if (parameter := reference()) is not None)
        if replaced and not is_frozen and layer not in trained:
            raise ValueError(
                f"This optimizer is older than the experts in {layer.path}: it holds the weights whose place they "
                "took, and would leave them untrained. Create it from the model's parameters after convert_to_moe and "
                "parallelize_experts."
            )
    for stacked in (stacked for layer in trained for _, stacked in layer.named_expert_parameters()):
        state = optimizer.state.get(stacked) or {}  # ZeroRedundancyOptimizer has None for other processes' parts
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        if moment is not None and moment.shape == stacked.shape[1:]:  # fused steps would write beyond its end
            raise ValueError(
                "The optimizer's state that was loaded is that of a dense model, not of its experts: begin with a new "
                "one (train.py --no-resume-opt)."
            )


def with_hooks(optimizer: Any) -> Optimizer:
    """The optimizer that really steps, with torch's step hooks.

    Raises:
        TypeError: if it is not a torch.optim.Optimizer.
        ValueError: if its step was replaced before it had hooks.
    """
    while hasattr(optimizer, "step_was_skipped"):  # Accelerate's, whose step may be skipped: the one inside counts
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"A {type(optimizer).__name__} is no torch.optim.Optimizer, so its steps cannot be followed. If it works "
            "by one, give that; else call timm_moe.average_experts_(model, rate) after each of its steps."
        )
    was_hooked = _is_hooked(optimizer)
    _install_hooks(optimizer)
    if not was_hooked and not hasattr(optimizer.step, "hooked"):
        raise ValueError(
            f"The steps of this {type(optimizer).__name__} cannot be followed, as its step was replaced before: make "
            "the averaging right after the optimizer."
        )
    return optimizer


def _is_hooked(optimizer: Optimizer) -> bool:
    return hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(type(optimizer).step, "hooked")


def _install_hooks(optimizer: Optimizer) -> None:
    """Give step hooks to an optimizer, and to those that it works by."""
    if not _is_hooked(optimizer):
        # Wrappers such as timm's Lookahead skip Optimizer.__init__, which installs the hooks; this does, too.
        optimizer.__setstate__({"defaults": getattr(optimizer, "defaults", {})})
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer) and not _is_hooked(inner):
            _install_hooks(inner)


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
