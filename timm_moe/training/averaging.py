"""Averaging of the experts after each optimizer step (EWA, section 3.2)."""

import logging
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.expert_layers import moe_layers, numbers_of_experts, whole_experts
from ..layers import MoeMlp
from ..layers.living import living, register, unregister
from ..schedules import Schedule, check_share_rate, get_schedule
from .optimizers import (
    are_frozen,
    has_stepped,
    is_first_time,
    is_primary,
    is_skipped,
    layers_of_trained_experts,
    parameter_ids,
    require_parameters,
)
from .weight_average import Rate, average_
from .wrapped_optimizers import Steps, average_kept_, share_groups, with_hooks

_logger = logging.getLogger(__name__)

#: Key of the count of updates in each of an optimizer's groups. There the count is part of every
#: checkpoint of the optimizer.
UPDATES = "ewa_updates"


# --- once


def average_experts_(model: nn.Module, beta: float) -> None:
    """Average the experts of every expert layer of a model once, in place (EWA, eq. 6).

    Frozen experts are averaged too.

    Args:
        model: the model.
        beta: share rate, from 0 to (E - 1) / E; 0 for experts of a part of the hidden width.

    Raises:
        ValueError: if ``beta`` is out of range; if there are no expert layers; if experts are of
            narrower types than float32, held in flat pieces (FSDP1), computed from other parameters
            (pruned, weight-normed) or have adapters (PEFT). Nothing is averaged then.
    """
    layers = moe_layers(model).values()
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no expert layers to average: convert it first, by "
            "timm_moe.convert_to_moe."
        )
    for layer in layers:
        check_share_rate(beta, layer.num_experts, "beta", layer.parts)
    once = {id(stacked): stacked for layer in layers for stacked in _averageable(layer)}
    average_((stacked, beta) for stacked in once.values())
    for layer in layers:
        layer.is_averaged_by_hand = True


def _averageable(layer: MoeMlp) -> list[Tensor]:
    """Return the stacked parameters of a layer, (E, ...).

    Raises:
        ValueError: if one of them cannot be averaged in place.
    """
    experts = list(whole_experts(layer).values())
    layer.require_plain("cannot be averaged (share_rate=0 trains without averaging)")
    for stacked in experts:
        if stacked.itemsize < 4:  # Rounding would undo the small steps of small rates.
            raise ValueError(
                f"Experts are averaged in float32 at least, and those in {layer.path} are "
                f"{stacked.dtype}: keep the weights in float32 and compute under autocast "
                "(train.py's --amp), or train with share_rate=0."
            )
    return experts


# --- the count of updates in an optimizer's groups


def stated_updates(optimizer: Optimizer) -> int:
    """Return the count of updates that an optimizer's groups hold; 0 if they hold none."""
    return max((int(group.get(UPDATES, 0)) for group in optimizer.param_groups), default=0)


def forget_updates(optimizer: Optimizer) -> None:
    """Take the count of updates out of an optimizer's groups."""
    for group in optimizer.param_groups:
        group.pop(UPDATES, None)


# --- the class


class ExpertWeightAveraging:
    """Averaging of a model's experts after every step of its optimizer, by a schedule.

    It hooks itself into the optimizer and needs no further call. Steps that a GradScaler skips are
    not counted. The count is a tensor in each parameter group of the optimizer, ``"ewa_updates"``,
    so the schedule goes on once the optimizer's state is loaded. After a distributed checkpoint
    (DCP), make the averaging and call :meth:`seek`.

    Each step averages the experts that are among the optimizer's parameters at that time, require
    gradients, and had one in this step or an earlier one. A parameter that layers share is averaged
    once, at the first layer's rate. Where all experts are frozen at first, their averaging begins
    once the optimizer gets them (``add_param_group``), at the rate of that step.

    An optimizer may work by another one (timm's Lookahead, SAM) and share its parameter groups.
    Either may be given: the experts are averaged once the outermost step ends. Weights that an
    optimizer keeps beside the parameters are averaged too (schedule-free optimizers, MADGRAD,
    Lookahead). timm's train.py needs no call of this class, see
    :mod:`timm_moe.integrations.timm`.

    Args:
        model: holds the expert layers; those whose experts the optimizer trains are averaged.
        optimizer: any torch or timm optimizer. With ``capturable=True`` the count and the rate stay
            on the device, so that a CUDA graph of the optimizer's step counts and averages, too.
        share_rate: in [0, (E - 1) / E]; by default the rate of each layer.
        schedule: ``"linear"``, ``"constant"``, ``"early"``, ``"late"``, or a function as in
            :mod:`timm_moe.schedules`, from progress and share rate to the rate of a step; by
            default the schedule of each layer.
        total_updates: optimizer steps in the whole run (an accumulation of gradients ends in one
            step).

    Raises:
        TypeError: if the optimizer is not a torch optimizer, so that its steps cannot be followed.
        ValueError: if an argument is out of range; if the optimizer's steps cannot be followed, or
            it trains none of the experts, which are not all frozen, or has its averaging already;
            if experts cannot be averaged in place, see :func:`average_experts_`. If they change so
            later, or a schedule returns a number that is out of range, the next step raises before
            it moves a weight. Rates on a device are not looked at.

    Attributes:
        started: whether a step has been taken since this averaging was made.
        has_experts: whether the optimizer trains experts that are not frozen, or did since this
            averaging was made.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        share_rate: float | None = None,
        schedule: str | Schedule | None = None,
        *,
        total_updates: int,
    ):
        # Lightning gives inf for a run without an end.
        if not 1 <= total_updates < math.inf:
            raise ValueError(
                f"total_updates must be at least 1, and no infinity, got {total_updates}."
            )
        optimizer = with_hooks(optimizer)
        if self.of(optimizer) is not None:
            raise ValueError(
                "This optimizer already has its expert weight averaging (timm's "
                "create_scheduler_v2 gives it one): take that off first with "
                "ExpertWeightAveraging.of(optimizer).remove()."
            )
        self.total_updates = total_updates
        self.started = False
        self._is_sought = self._is_written = False
        self._layers = [weakref.ref(layer) for layer in moe_layers(model).values()]
        self._share_rate = share_rate
        self._schedule = schedule
        self._optimizer: Any = weakref.ref(optimizer)
        # What is averaged at the end of the step that runs.
        self._due: list[tuple[Tensor, Rate]] = []
        # The ids of experts that had a gradient.
        self._trained: set[int] = set()
        self._last_rate: Rate = 0.0

        layers = layers_of_trained_experts(parameter_ids(optimizer), self.layers())
        self._validate(model, optimizer, layers)
        self.has_experts = bool(layers) and not are_frozen(layers)

        self._is_on_device = any(group.get("capturable") for group in optimizer.param_groups)
        first = (layers or self.layers())[0]
        device = next(first.parameters()).device if self._is_on_device else "cpu"
        self._count = torch.tensor(stated_updates(optimizer), device=device)
        self._write_count()
        self._steps = Steps(self._end_step)
        self._steps.follow(optimizer)
        register(self)
        if self.has_experts:
            self._log_plan(layers)

    def _validate(self, model: nn.Module, optimizer: Optimizer, layers: list[MoeMlp]) -> None:
        """Raise ValueError if the trained layers, or the arguments for them, do not do.

        Frozen experts are looked at once they are trained.
        """
        if not layers:
            require_parameters(optimizer, model)
        if layers or not are_frozen(self.layers()):
            for layer in layers or self.layers():
                if self._stated(layer)[0]:
                    _averageable(layer)  # raises
            if not layers:
                raise ValueError(
                    f"The optimizer trains no expert layer of this {type(model).__name__}."
                )
        for layer in layers or self.layers():
            check_share_rate(self._stated(layer)[0], layer.num_experts, parts=layer.parts)
        self._rates(layers or self.layers(), 1.0)  # raises

    def _log_plan(self, layers: list[MoeMlp]) -> None:
        """Log how many experts are averaged, at which rate and for how long."""
        if not is_primary():
            return
        rate, schedule = self._stated(layers[0])
        name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "of yours")
        after = f", continuing after update {self.updates}" if self.updates else ""
        _logger.info(
            f"EWA: averaging the {numbers_of_experts(layers)} experts of {len(layers)} layers "
            f"after every optimizer step, share rate {rate:g}, schedule {name}, over "
            f"{self.total_updates} updates{after}."
        )

    @classmethod
    def of(cls, optimizer: Optimizer) -> "ExpertWeightAveraging | None":
        """Return the averaging of an optimizer, or of one that shares its parameter groups."""
        for averaging in living(ExpertWeightAveraging):
            owner = averaging._optimizer()  # noqa: SLF001  (of this class)
            if owner is not None and (owner is optimizer or share_groups(owner, optimizer)):
                return averaging
        return None

    def layers(self) -> list[MoeMlp]:
        """Return the expert layers whose experts are averaged if the optimizer trains them."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    @property
    def share_rate(self) -> float:
        """The rate of the last averaging in the first layer; 0 before the first averaging."""
        return float(self._last_rate)

    @property
    def updates(self) -> int:
        """Number of optimizer steps of the run so far, those before it was resumed included."""
        return int(self._counted())

    def _counted(self) -> Tensor:
        """Return the count, a tensor () that all groups of the optimizer hold.

        If no group holds this averaging's tensor, a state was loaded, and its count is taken.
        """
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        counts = [group.get(UPDATES) for group in groups]
        loaded = [count for count in counts if count is not None]
        if loaded and not any(count is self._count for count in loaded):
            self._set_count(max(map(int, loaded)))
        is_lost = groups and not loaded and self.started and self._is_written
        if is_lost and is_first_time(optimizer, "no count"):
            _logger.warning(
                "EWA: the state that the optimizer loaded has no count of updates, so the share "
                f"rate goes on after update {int(self._count)}: averaging.seek(0) begins anew."
            )
        if any(count is not self._count for count in counts):
            self._write_count()
        return self._count

    def _set_count(self, count: int | Tensor) -> None:
        """Set the count.

        On a device it stays the tensor that a CUDA graph adds to. On the host it is a new one,
        since a state of the optimizer that was taken holds the old.
        """
        if self._is_on_device:
            self._count.copy_(torch.as_tensor(count))
        else:
            self._count = torch.tensor(int(count), device="cpu")
            self._write_count()

    def _write_count(self) -> None:
        """Put the count into every group, since any of them may be taken out."""
        self._is_written = True
        for group in self._optimizer().param_groups:
            group[UPDATES] = self._count

    def seek(self, updates: int) -> None:
        """Continue after this many updates."""
        self._is_sought = True
        is_new = updates != self.updates
        self._set_count(updates)
        if is_new and self.has_experts and is_primary():
            _logger.info(
                f"EWA: the share rate continues after update {updates} of {self.total_updates}."
            )

    def remove(self) -> None:
        """Stop averaging, for good."""
        self._steps.remove()
        unregister(self)

    def follows(self, optimizer: Optimizer) -> bool:
        """Tell if an optimizer's step is one that this averages, or a part of it."""
        return self._steps.include(optimizer)

    def begin_step(self, optimizer: Optimizer, held: set[int]) -> None:
        """Find what to average after a step; the hook before every step calls this.

        A step within another optimizer's step changes nothing.

        Args:
            optimizer: the optimizer that steps.
            held: the ids of its parameters.

        Raises:
            ValueError: if the experts cannot be averaged, or the share rate is out of range.
            RuntimeError: if a CUDA graph captures the step, and its count is on the host.
        """
        if not self._steps.begin(optimizer):
            return
        self._due = []
        self._due = self._experts_due(held)
        self._note_trained()
        is_known = self.started or self._is_sought or self.updates
        if not is_known and has_stepped(optimizer) and is_first_time(optimizer, "seek"):
            _logger.warning(
                "EWA: this optimizer took steps that nobody counted, and the share rate's schedule "
                "begins. To resume, call averaging.seek(updates) with the steps that were averaged "
                "before; seek(0) begins."
            )

    def _experts_due(self, held: set[int]) -> list[tuple[Tensor, Rate]]:
        """Return the parameters to average at the end of the step that begins, with their rates."""
        layers = layers_of_trained_experts(held, self.layers())
        if layers and not self.has_experts and not are_frozen(layers):  # They were frozen before.
            self.has_experts = True
            self._log_plan(layers)
        rates = self._rates(layers, self._progress())
        due: dict[int, tuple[Tensor, Rate]] = {}
        for layer, rate in zip(layers, rates, strict=True):
            if isinstance(rate, Tensor) or rate != 0:
                experts = _averageable(layer)
            else:
                experts = [stacked for _, stacked in layer.named_expert_parameters()]
            for stacked in experts:
                if id(stacked) in held and stacked.requires_grad:
                    due.setdefault(id(stacked), (stacked, rate))
        return list(due.values())

    def _note_trained(self) -> None:
        """Note which experts have a gradient; those of a teacher under no_grad never have one."""
        self._trained.update(id(stacked) for stacked, _ in self._due if stacked.grad is not None)

    def _progress(self) -> Rate:
        """Return the completed fraction of all updates after the step that begins, at most 1.

        Raises:
            RuntimeError: if a CUDA graph captures a step whose count is on the host.
        """
        count = self._counted()
        if self._is_on_device:
            return ((count + 1) / self.total_updates).clamp(max=1)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "A CUDA graph of this step would repeat its share rate: make the averaging for an "
                "optimizer with capturable=True (where it has no such option, set "
                "optimizer.param_groups[0]['capturable'] = True)."
            )
        return min((int(count) + 1) / self.total_updates, 1.0)

    def _rates(self, layers: list[MoeMlp], progress: Any) -> list[Any]:
        """Return the rate of each layer at a fraction of all updates.

        Raises:
            ValueError: if a rate is out of range.
        """
        rates: list[Any] = []
        for layer in layers:
            share_rate, stated = self._stated(layer)
            schedule = stated if callable(stated) else get_schedule(stated)
            rate = schedule(progress, share_rate)
            if not isinstance(progress, Tensor):
                rate = float(rate)
            # A rate on a device is not waited for.
            known = share_rate if isinstance(rate, Tensor) else rate
            check_share_rate(known, layer.num_experts, parts=layer.parts)
            is_constant = isinstance(progress, Tensor) and not isinstance(rate, Tensor)
            rates.append(torch.full_like(progress, rate) if is_constant else rate)
        return rates

    def _stated(self, layer: MoeMlp) -> tuple[float, str | Schedule]:
        """Return share rate and schedule of a layer: this averaging's, or else the layer's own."""
        rate = layer.share_rate if self._share_rate is None else self._share_rate
        schedule = layer.share_schedule if self._schedule is None else self._schedule
        return rate, schedule

    @torch.compiler.disable  # The step of an optimizer may be compiled.
    @torch.no_grad()
    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count the step and average; a hook after the step of each optimizer that is followed."""
        if not self._steps.end(optimizer):
            return
        self._note_trained()  # A closure computes gradients within the step.
        due = [each for each in self._due if id(each[0]) in self._trained]
        # The first step may have none, as where a trainer leaves out the first batch.
        lacks_gradients = bool(self._due) and not self._trained and self.started
        if lacks_gradients and is_first_time(optimizer, "no gradients"):
            _logger.warning(
                "EWA: the experts that this optimizer holds have no gradients, so they are not "
                "averaged."
            )
        self._due = []
        if is_skipped(optimizer):
            return
        self.started = True
        self._set_count(self._counted() + 1)
        self._last_rate = due[0][1] if due else 0.0
        average_(due)
        average_kept_(self._steps.optimizers, due)
        can_tell = self.has_experts and not self._is_on_device
        is_beyond = can_tell and int(self._count) > 1.1 * self.total_updates
        if is_beyond and is_first_time(optimizer, "beyond the end"):
            _logger.warning(
                f"EWA: training goes on after update {self.updates}, but the share rate's schedule "
                f"ended at total_updates={self.total_updates}: state the number of optimizer steps "
                "in the whole run."
            )
