"""Averaging with optimizers that work by others, or keep weights beside the parameters."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .weight_average import Rate, average_

#: Sequences of weights that optimizers keep in a parameter's state, by the entry that shows that an
#: optimizer is of this kind.
_SEQUENCES = {
    "z": ("x", "y", "z"),  # schedule-free optimizers
    "lookahead_slow_buff": ("lookahead_slow_buff",),  # timm's Lookahead
    # Lookahead, Ranger and Ranger21 of pytorch_optimizer
    "slow_params": ("slow_params",),
    "slow_buffer": ("slow_buffer",),
    "lookahead_params": ("lookahead_params",),
}
#: All such entries, and that of MADGRAD.
_ENTRIES = {*_SEQUENCES, "x0"}
#: Entries of MADGRAD's states. D-Adaptation has an "x0" too.
_OF_MADGRAD = {"x0", "s", "grad_sum_sq"}


def with_hooks(optimizer: Any) -> Optimizer:
    """Return the optimizer that really steps, with torch's step hooks.

    Raises:
        TypeError: if it is not a torch.optim.Optimizer.
        ValueError: if its step was replaced before it had hooks.
    """
    # Accelerate's and Lightning's wrappers pass for an optimizer, and may skip its step.
    while _is_wrapper(optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"A {type(optimizer).__name__} is no torch.optim.Optimizer, so its steps cannot be "
            "followed. If it works by one, give that; else call timm_moe.average_experts_(model, "
            "rate) after each of its steps."
        )
    was_hooked = _is_hooked(optimizer)
    _install_hooks(optimizer)
    if not was_hooked and not hasattr(optimizer.step, "hooked"):
        raise ValueError(
            f"The steps of this {type(optimizer).__name__} cannot be followed, as its step was "
            "replaced before: make the averaging right after the optimizer."
        )
    return optimizer


def _is_wrapper(optimizer: Any) -> bool:
    """Tell if an object stands for an optimizer, of which it is no part."""
    has_own_groups = "param_groups" in getattr(optimizer, "__dict__", {})
    return not has_own_groups and isinstance(getattr(optimizer, "optimizer", None), Optimizer)


def _is_hooked(optimizer: Optimizer) -> bool:
    """Tell if an optimizer has torch's step hooks."""
    has_hooks = hasattr(optimizer, "_optimizer_step_post_hooks")
    return has_hooks and hasattr(type(optimizer).step, "hooked")


def _install_hooks(optimizer: Optimizer) -> None:
    """Give step hooks to an optimizer, and to those that it works by."""
    if not _is_hooked(optimizer):
        # Wrappers such as timm's Lookahead skip Optimizer.__init__, which installs the hooks.
        # __setstate__ installs them too.
        optimizer.__setstate__({"defaults": getattr(optimizer, "defaults", {})})
    for inner in _parts(optimizer):
        if not _is_hooked(inner):
            _install_hooks(inner)


def _parts(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer holds itself, alone or in lists."""
    parts: list[Optimizer] = []
    for value in vars(optimizer).values():
        several = value if isinstance(value, (list, tuple)) else (value,)
        parts += [each for each in several if isinstance(each, Optimizer)]
    return parts


def _works_by(outer: Optimizer, inner: Optimizer) -> bool:
    """Tell if an optimizer holds another one, be it within a third one."""
    found = [outer]
    for optimizer in found:
        found += [part for part in _parts(optimizer) if part not in found]
    return inner in found[1:]


def share_groups(one: Optimizer, other: Optimizer) -> bool:
    """Tell if two optimizers have a parameter group in common."""
    groups = {id(group) for group in one.param_groups}
    return not groups.isdisjoint(map(id, other.param_groups))


class Steps:
    """Steps of optimizers, which may work by one another, as timm's Lookahead and SAM do.

    Optimizers that have nothing to do with each other may step at the same time, in threads. A step
    that was interrupted concerns its own optimizers alone.

    Args:
        after_step: post-hook of the step of each optimizer.

    Attributes:
        optimizers: the optimizers that were followed so far, held weakly.
    """

    def __init__(self, after_step: Callable[[Optimizer, Any, Any], None]):
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._after_step = after_step
        # An optimizer comes before those that it works by.
        self._begun: list[weakref.ref[Optimizer]] = []

    def follow(self, optimizer: Optimizer) -> None:
        """Call the hook after each step of an optimizer."""
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = optimizer.register_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self.optimizers.values():
            handle.remove()

    def begin(self, optimizer: Optimizer) -> bool:
        """Note that a step begins; tell if it is no part of another optimizer's step."""
        self.follow(optimizer)
        around = self._around(optimizer)
        # No optimizer steps twice within a step, so an earlier step has raised an error.
        if optimizer in around:
            self._forget(around)
            around = []
        self._begun.append(weakref.ref(optimizer))
        return not around

    def end(self, optimizer: Optimizer) -> bool:
        """Note that a step ends; tell if it is the outermost step."""
        begun = self._around(optimizer)
        is_outermost = begun[:1] == [optimizer]
        if is_outermost:
            self._forget(begun)
        return is_outermost

    def include(self, optimizer: Optimizer) -> bool:
        """Tell if an optimizer is in a step that has not ended, its own or that of an outer one."""
        return bool(self._around(optimizer))

    def _around(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return the optimizers in steps to which a step of this optimizer belongs, in order."""
        begun = [each for reference in self._begun if (each := reference()) is not None]
        return [
            each
            for each in begun
            if each is optimizer
            or share_groups(each, optimizer)
            or _works_by(each, optimizer)
            or _works_by(optimizer, each)
        ]

    def _forget(self, ended: list[Optimizer]) -> None:
        """Forget optimizers whose steps have ended, and those that are no more."""
        self._begun = [
            reference
            for reference in self._begun
            if (each := reference()) is not None and each not in ended
        ]


def average_kept_(
    optimizers: Iterable[Optimizer],
    due: list[tuple[Tensor, Rate]],
) -> None:
    """Average the weights that optimizers keep beside the parameters.

    Otherwise they would undo the averaging of the parameters.

    Args:
        optimizers: optimizers that may hold such weights in their states.
        due: parameters (E, ...) with their share rates.

    Raises:
        ValueError: if an optimizer would undo the averaging in a way that is not known.
    """
    kept = {}
    for optimizer in optimizers:
        for stacked, rate in due:
            # ZeroRedundancyOptimizer has None for parameters of other processes.
            state = optimizer.state.get(stacked) or {}
            if _ENTRIES.isdisjoint(state):
                continue
            names = {name for key, names in _SEQUENCES.items() if key in state for name in names}
            for weights in (state.get(name) for name in names):
                if isinstance(weights, Tensor) and weights.shape == stacked.shape:
                    kept[id(weights)] = (weights, rate)
            if "x0" in state:
                if not state.keys() >= _OF_MADGRAD:
                    raise ValueError(
                        f"{type(optimizer).__name__} computes experts from their first values "
                        "(x0), which undoes their averaging: take another optimizer, or "
                        "share_rate=0."
                    )
                target = _target_of_madgrad(state, _eps_of(optimizer, stacked))
                averaged = target.clone()
                average_([(averaged, rate)])
                state["x0"] += averaged - target
    average_(kept.values())


def _eps_of(optimizer: Optimizer, stacked: Tensor) -> float:
    """Return the eps of the group of an optimizer that holds a parameter."""
    return next(
        group["eps"]
        for group in optimizer.param_groups
        if any(parameter is stacked for parameter in group["params"])
    )


def _target_of_madgrad(state: dict[str, Tensor], eps: float) -> Tensor:
    """Compute z, to which MADGRAD pulls a parameter.

    z is the start x0 minus a sum of gradients over their size. The size is each expert's own, so
    the mean of z stays only if z itself is averaged. For that the start moves by as much as z.
    Without momentum the start follows from the parameter.
    """
    return state["x0"] - state["s"] / (state["grad_sum_sq"].pow(1 / 3) + eps)
