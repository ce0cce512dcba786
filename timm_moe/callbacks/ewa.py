"""During training: averaging the experts after each optimizer step (EWA, section 3.2)."""

import logging
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert import moe_layers
from ..distributed import local_part
from ..layers import MoeMlp
from ..schedules import check_share_rate, get_schedule

_logger = logging.getLogger(__name__)

#: Key of ``optimizer.param_groups[0]`` that counts the updates; there it travels with every optimizer checkpoint.
UPDATES = "ewa_updates"

#: Entries of each expert that are averaged at a time on CPUs.
_BLOCK = 2**17


@torch.no_grad()
def average_(stacked: Tensor, beta: float) -> Tensor:
    """Move E stacked tensors towards their mean, in place: ``W_i <- (1 - beta) W_i + beta / (E - 1) sum_{j != i} W_j``.

    The mean stays and every deviation from it is multiplied by ``1 - beta E / (E - 1)`` (EWA, eq. 6). Types narrower
    than float32 are computed in float32 and rounded so that the mean does not drift away over many steps.

    Args:
        stacked: shape (E, ...); of a sharded one (FSDP2) each process averages its part.
        beta: share rate of this step.

    Raises:
        ValueError: if it is sharded along its first dimension.
    """
    part, num_experts = local_part(stacked), stacked.shape[0]
    if beta == 0 or num_experts == 1:
        return stacked
    wide = part.to(torch.promote_types(part.dtype, torch.float32))
    _lerp_to_mean_(wide, beta * num_experts / (num_experts - 1))
    if wide is not part:
        _round_keeping_mean_(part, wide)
    return stacked


def _lerp_to_mean_(stacked: Tensor, weight: float) -> None:
    if stacked.device.type != "cpu" or not stacked.is_contiguous() or stacked.numel() < _BLOCK:
        stacked.lerp_(stacked.mean(0, keepdim=True), weight)
        return
    # Large ones on CPUs by blocks that stay in the cache, and expert by expert: broadcasting would cost vectorisation.
    for experts in zip(*(expert.view(-1).split(_BLOCK) for expert in stacked.unbind(0)), strict=True):
        mean = experts[0] + experts[1]
        for expert in experts[2:]:
            mean += expert
        mean /= len(experts)
        for expert in experts:
            expert.lerp_(mean, weight)


def _round_keeping_mean_(rounded: Tensor, exact: Tensor) -> None:
    """Write ``exact`` into the narrower ``rounded`` so that the sum over the first dimension stays.

    From the largest entry to the smallest, what rounding takes from one is given to the next; the last is the finest
    grained, so next to nothing is lost. Plain rounding lets the mean drift over the steps of a run.
    """
    order = exact.abs().argsort(0, descending=True)
    carry = torch.zeros_like(exact[0])
    for index in order.unbind(0):
        carry += exact.gather(0, index[None])[0]
        entry = carry.to(rounded.dtype)
        rounded.scatter_(0, index[None], entry[None])
        carry -= entry


def average_experts_(model: nn.Module, beta: float) -> None:
    """Average the experts of every expert layer of a model by one step of rate ``beta``, in place (EWA, eq. 6).

    Raises:
        ValueError: unless 0 <= beta <= (E - 1) / E, if there are no expert layers, or if they are sharded along the
            dimension of the experts; nothing is averaged then.
    """
    layers = moe_layers(model).values()
    if not layers:
        raise ValueError(f"{type(model).__name__} has no expert layers to average.")
    for layer in layers:
        check_share_rate(beta, layer.num_experts, "beta")
    parameters = [stacked for layer in layers for _, stacked in layer.named_expert_parameters()]
    for stacked in parameters:
        local_part(stacked)  # raises, before anything is averaged
    for stacked in parameters:
        average_(stacked, beta)


class ExpertWeightAveraging:
    """Averages the experts of a model after every step of its optimizer, at a rate that follows a schedule.

    It hooks itself into the optimizer: once made, it needs no further call. Steps that a GradScaler skips are neither
    counted nor followed by an averaging. The number of updates done is kept in the optimizer's first parameter group,
    so it is saved and resumed with the optimizer's state. The optimizer's moments are left as they are.

    Under timm's train.py none of this has to be written: see :mod:`timm_moe.callbacks.timm_hooks`.

    Args:
        model: holds the expert layers; those whose parameters the optimizer trains are averaged.
        optimizer: any torch or timm optimizer.
        share_rate: in [0, (E - 1) / E]; by default the rate that each layer was created with.
        schedule: ``"linear"``, ``"constant"``, ``"early"``, ``"late"``, or a function that returns the rate of a step
            for its progress, the completed fraction of all updates in (0, 1]; by default the schedule that each layer
            was created with.
        total_updates: optimizer steps in the whole run (an accumulation of gradients ends in one step).

    Raises:
        ValueError: on a rate or schedule that does not exist, a share rate beside a function, ``total_updates`` below
            1, an optimizer that trains none of the model's expert layers or has its averaging already, or experts that
            are sharded along their first dimension.

    Attributes:
        share_rate: the rate of the last averaging, 0 before the first.
        total_updates: as given.
    """

    _alive: ClassVar["weakref.WeakSet[ExpertWeightAveraging]"] = weakref.WeakSet()

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        share_rate: float | None = None,
        schedule: str | Callable[[float], float] | None = None,
        *,
        total_updates: int,
    ):
        if total_updates < 1:
            raise ValueError(f"total_updates must be at least 1, got {total_updates}.")
        if self.of(optimizer) is not None:
            raise ValueError(
                "This optimizer already has its expert weight averaging (timm's create_scheduler_v2 gives it one): "
                "take that off first with ExpertWeightAveraging.of(optimizer).remove()."
            )
        layers = trained_layers(optimizer, moe_layers(model).values())
        if not layers:
            raise ValueError(f"The optimizer trains no expert layer of this {type(model).__name__}.")
        self.total_updates = total_updates
        self.share_rate = 0.0  # of the last averaging, in the first layer
        self._averaged = _rates_and_parameters(optimizer, layers, share_rate, schedule)
        self._optimizer = weakref.ref(optimizer)
        self._started = False
        optimizer.param_groups[0].setdefault(UPDATES, 0)
        if not (hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer.step, "hooked")):
            # timm's Lookahead skips Optimizer.__init__, which installs torch's step hooks; this does it as well.
            optimizer.__setstate__({})
        self._handle = optimizer.register_step_post_hook(self._after_step)
        self._alive.add(self)
        if is_primary():
            _logger.info(self._describe(layers, share_rate, schedule))

    @classmethod
    def of(cls, optimizer: Optimizer) -> "ExpertWeightAveraging | None":
        """The averaging that an optimizer (or the one inside a Lookahead) has, or None."""
        for averaging in cls._alive:
            owner = averaging._optimizer()
            if owner is not None and owner.param_groups[0] is optimizer.param_groups[0]:
                return averaging
        return None

    @property
    def updates(self) -> int:
        """Optimizer steps done so far."""
        optimizer = self._optimizer()
        return 0 if optimizer is None else optimizer.param_groups[0].get(UPDATES, 0)

    @property
    def started(self) -> bool:
        """Whether a step has been taken since this averaging was made."""
        return self._started

    def seek(self, updates: int) -> None:
        """Continue as after this many updates, if no step has been taken and no count came with the optimizer."""
        optimizer = self._optimizer()
        if optimizer is None or self._started or self.updates or not updates:
            return
        optimizer.param_groups[0][UPDATES] = updates
        if is_primary():
            _logger.info(f"EWA: the share rate continues after update {updates} of {self.total_updates}.")

    def remove(self) -> None:
        """Stop averaging."""
        self._handle.remove()
        self._alive.discard(self)

    @torch.compiler.disable
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)  # set while a GradScaler steps a fused optimizer
        if found_inf is not None and found_inf.item():
            return
        self._started = True
        optimizer.param_groups[0][UPDATES] = self.updates + 1
        progress = min(self.updates / self.total_updates, 1.0)
        rates = [rate(progress) for rate, _ in self._averaged]
        self.share_rate = rates[0]
        for beta, (_, parameters) in zip(rates, self._averaged, strict=True):
            for stacked in parameters:
                average_(stacked, beta)

    def _describe(
        self, layers: list[MoeMlp], share_rate: float | None, schedule: str | Callable[[float], float] | None
    ) -> str:
        experts = "/".join(str(number) for number in sorted({layer.num_experts for layer in layers}))
        if callable(schedule):
            course = f"share rate by {getattr(schedule, '__name__', 'a function')}"
        else:
            rate = layers[0].share_rate if share_rate is None else share_rate
            course = f"share rate {rate:g}, schedule {schedule or layers[0].share_schedule}"
        after = f", continuing after update {self.updates}" if self.updates else ""
        return (
            f"EWA: averaging the {experts} experts of {len(layers)} layers after every optimizer step, {course}, "
            f"over {self.total_updates} updates{after}."
        )


def trained_layers(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Those of the layers that have a parameter among the optimizer's."""
    trained = _parameter_ids(optimizer)
    return [layer for layer in layers if any(id(parameter) in trained for parameter in layer.parameters())]


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _rates_and_parameters(
    optimizer: Optimizer,
    layers: list[MoeMlp],
    share_rate: float | None,
    schedule: str | Callable[[float], float] | None,
) -> list[tuple[Callable[[float], float], list[nn.Parameter]]]:
    """The functions from progress to rate, each with the stacked parameters that follow it."""
    trained = _parameter_ids(optimizer)
    parameters = {
        layer: [stacked for _, stacked in layer.named_expert_parameters() if id(stacked) in trained] for layer in layers
    }
    for layer in layers:
        for stacked in parameters[layer]:
            local_part(stacked)  # raises
    if callable(schedule):
        if share_rate is not None:
            raise ValueError("A schedule given as a function returns the rate itself: leave share_rate out.")
        fewest = min(layer.num_experts for layer in layers)
        return [(partial(_checked_rate, schedule, fewest), [p for layer in layers for p in parameters[layer]])]
    return [(_named_rate(layer, share_rate, schedule), parameters[layer]) for layer in layers]


def _named_rate(layer: MoeMlp, share_rate: float | None, schedule: str | None) -> Callable[[float], float]:
    rate = layer.share_rate if share_rate is None else share_rate
    check_share_rate(rate, layer.num_experts)
    named = get_schedule(layer.share_schedule if schedule is None else schedule)
    return lambda progress: named(progress, rate)


def _checked_rate(schedule: Callable[[float], float], num_experts: int, progress: float) -> float:
    rate = schedule(progress)
    check_share_rate(rate, num_experts)
    return rate


def is_primary() -> bool:
    """Whether this process is the one that logs."""
    return (
        not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
        or torch.distributed.get_rank() == 0
    )
