"""Averaging of the experts after each optimizer step (EWA, section 3.2)."""

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.blocks import moe_layers, whole_experts
from ..layers import MoeMlp
from ..layers.living import living, register, unregister
from ..schedules import check_share_rate, get_schedule
from .optimizers import (
    is_first_time,
    is_primary,
    is_skipped,
    layers_of_trained_experts,
    parameter_ids,
    refuse_dense,
    require_parameters,
    trained_layers,
    with_hooks,
)
from .placement import is_spread, local_part, sum_over_experts

_logger = logging.getLogger(__name__)

#: Key of each of an optimizer's groups that counts the updates; there it travels with every optimizer checkpoint.
UPDATES = "ewa_updates"

#: Weights that optimizers keep in a parameter's state, by an entry that tells the optimizer: schedule-free ones,
#: MADGRAD (a start, and the sum of the steps from there), Lookahead.
OWN_WEIGHTS = {"z": ("x", "y", "z"), "x0": ("x0", "s"), "lookahead_slow_buff": ("lookahead_slow_buff",)}
#: Entries of each expert that are averaged at a time on CPUs.
_BLOCK = 2**17


@torch.no_grad()
def average_(stacked: Tensor, beta: float) -> Tensor:
    """Move E stacked tensors towards their mean, in place: ``W_i <- (1 - beta) W_i + beta / (E - 1) sum_{j != i} W_j``.

    The mean stays and every deviation from it is multiplied by ``1 - beta E / (E - 1)`` (EWA, eq. 6).

    Args:
        stacked: shape (E, ...); of a sharded one (FSDP2) each process averages its part. If they hold different
            experts, they call this together.
        beta: share rate of this step.
    """
    part, num_experts = local_part(stacked), stacked.shape[0]
    if beta == 0 or num_experts == 1:
        return stacked
    if is_spread(stacked):
        part.lerp_(sum_over_experts(stacked) / num_experts, beta * num_experts / (num_experts - 1))
        return stacked
    _lerp_to_mean_(part, beta * num_experts / (num_experts - 1))
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


def average_experts_(model: nn.Module, beta: float) -> None:
    """Average the experts of every expert layer of a model by one step of rate ``beta``, in place (EWA, eq. 6).

    Frozen experts are averaged too.

    Raises:
        ValueError: unless 0 <= beta <= (E - 1) / E, and 0 for experts of a part of the hidden width; if there are no
            expert layers, or if experts are of narrower types than float32, held in flat pieces (FSDP1), computed from
            other parameters (pruned, weight-normed) or have adapters (PEFT); nothing is averaged then.
    """
    layers = moe_layers(model).values()
    if not layers:
        raise ValueError(f"{type(model).__name__} has no expert layers to average.")
    for layer in layers:
        check_share_rate(beta, layer.num_experts, "beta", layer.parts)
    once = {id(stacked): stacked for layer in layers for stacked in _averageable(layer)}
    for stacked in once.values():
        average_(stacked, beta)
    for layer in layers:
        layer.is_averaged_by_hand = True


def stated_updates(optimizer: Optimizer) -> int:
    """Return the count of updates that an optimizer's groups hold, 0 without one."""
    return max((group.get(UPDATES, 0) for group in optimizer.param_groups), default=0)


def state_updates(optimizer: Optimizer, updates: int) -> None:
    """Write the count of updates to all groups of an optimizer: any of them may be taken out."""
    for group in optimizer.param_groups:
        group[UPDATES] = updates


def _averageable(layer: MoeMlp) -> list[Tensor]:
    """The stacked parameters of a layer, (E, ...); ValueError if one cannot be averaged in place."""
    experts = whole_experts(layer)
    layer.require_plain("cannot be averaged (share_rate=0 trains without averaging)")
    for stacked in experts.values():
        if stacked.itemsize < 4:  # rounding would undo the small steps of small rates
            raise ValueError(
                f"Experts are averaged in float32 at least, and those in {layer.path} are {stacked.dtype}: keep the "
                "weights in float32 and compute under autocast (train.py's --amp), or train with share_rate=0."
            )
    return list(experts.values())


class ExpertWeightAveraging:
    """Averages the experts of a model after every step of its optimizer, at a rate that follows a schedule.

    It hooks itself into the optimizer and needs no further call. Steps that a GradScaler skips are not counted. The
    count is kept as ``"ewa_updates"`` in each parameter group of the optimizer, so the schedule goes on once its state
    is loaded. After a distributed checkpoint (DCP), make the averaging and call :meth:`seek`.

    Each step averages the experts that the optimizer then has among its parameters and that require gradients. A
    parameter that layers share is averaged once, at the first layer's rate.

    If an optimizer works by another one (timm's Lookahead, SAM) and shares its parameter groups, either may be given:
    the experts are averaged once the outermost step ends. Weights that an optimizer keeps of its own are averaged too
    (schedule-free ones, MADGRAD, Lookahead). timm's train.py needs no call of this class, see
    :mod:`timm_moe.integrations.timm`.

    Args:
        model: holds the expert layers; those whose experts the optimizer trains are averaged.
        optimizer: any torch or timm optimizer.
        share_rate: in [0, (E - 1) / E]; by default the rate of each layer.
        schedule: ``"linear"``, ``"constant"``, ``"early"``, ``"late"``, or a function that returns the rate of a step
            for its progress, the completed fraction of all updates in (0, 1]; by default the schedule of each layer.
        total_updates: optimizer steps in the whole run (an accumulation of gradients ends in one step).

    Raises:
        TypeError: if the optimizer is not a torch optimizer, so that its steps cannot be followed.
        ValueError: on arguments out of range, a share rate beside a function, an optimizer whose steps cannot be
            followed, that trains none of the model's experts or has its averaging already, or experts that cannot be
            averaged in place, see :func:`average_experts_`. If they change so later, the next step raises before it
            moves a weight.

    Attributes:
        share_rate: the rate of the last averaging in the first layer, 0 before the first.
        started: whether a step has been taken since this averaging was made.
    """

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
        optimizer = with_hooks(optimizer)
        if self.of(optimizer) is not None:
            raise ValueError(
                "This optimizer already has its expert weight averaging (timm's create_scheduler_v2 gives it one): "
                "take that off first with ExpertWeightAveraging.of(optimizer).remove()."
            )
        self.total_updates = total_updates
        self.share_rate = 0.0
        self.started = self._is_sought = False
        self._layers = [weakref.ref(layer) for layer in moe_layers(model).values()]
        self._share_rate, self._schedule = share_rate, schedule
        self._optimizer: Any = weakref.ref(optimizer)
        self._handles: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._steps: list[Optimizer] = []  # that have begun since the outermost one, which is the first
        self._due: list[tuple[float, Tensor]] = []  # at the end of that step
        layers = layers_of_trained_experts(optimizer, self.layers())
        for layer in layers or self.layers():
            if callable(schedule) or self._stated(layer)[0]:
                _averageable(layer)  # raises
        if not layers:
            require_parameters(optimizer, model)
            raise ValueError(f"The optimizer trains no expert layer of this {type(model).__name__}.")
        if callable(schedule) and share_rate is not None:
            raise ValueError("A schedule given as a function returns the rate itself: leave share_rate out.")
        if not callable(schedule):
            self._rates(layers, 1.0)  # raises
        self._count(stated_updates(optimizer))
        self._follow(optimizer)
        register(self)
        if is_primary():
            experts = "/".join(str(number) for number in sorted({layer.num_experts for layer in layers}))
            course = "by a function" if callable(schedule) else "{:g}, schedule {}".format(*self._stated(layers[0]))
            after = f", continuing after update {self.updates}" if self.updates else ""
            _logger.info(
                f"EWA: averaging the {experts} experts of {len(layers)} layers after every optimizer step, share rate "
                f"{course}, over {total_updates} updates{after}."
            )

    @classmethod
    def of(cls, optimizer: Optimizer) -> "ExpertWeightAveraging | None":
        """The averaging of an optimizer, or of one that shares its parameter groups, or None."""
        groups = {id(group) for group in optimizer.param_groups}
        for averaging in living(ExpertWeightAveraging):
            owner = averaging._optimizer()
            if owner is not None and (owner is optimizer or not groups.isdisjoint(map(id, owner.param_groups))):
                return averaging
        return None

    def layers(self) -> list[MoeMlp]:
        """The expert layers that are averaged as long as the optimizer trains their experts."""
        return [layer for reference in self._layers if (layer := reference()) is not None]

    @property
    def updates(self) -> int:
        """Optimizer steps done so far: the count of this averaging, unless a state with another one was loaded."""
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        counts = {group[UPDATES] for group in groups if UPDATES in group}
        return self._updates if self._updates in counts else max(counts, default=self._updates)

    def _count(self, updates: int) -> None:
        self._updates = updates
        state_updates(self._optimizer(), updates)

    def seek(self, updates: int) -> None:
        """Continue after this many updates, if no step has been taken and no count came with the optimizer."""
        if self.started or self.updates:
            return
        self._is_sought = True
        self._count(updates)
        if updates and is_primary():
            _logger.info(f"EWA: the share rate continues after update {updates} of {self.total_updates}.")

    def remove(self) -> None:
        """Stop averaging."""
        for handle in self._handles.values():
            handle.remove()
        unregister(self)

    def _follow(self, optimizer: Optimizer) -> None:
        if optimizer not in self._handles:
            self._handles[optimizer] = optimizer.register_step_post_hook(self._end_step)

    def _begin_step(self, optimizer: Optimizer) -> None:
        """Follow a step, perhaps within another one's; raise at once if the experts cannot be averaged."""
        if not self._steps or optimizer in self._steps:  # none steps twice within a step: an earlier one has raised
            self._steps, self._due = [], self._experts_due(optimizer)
            if not (self.updates or self._is_sought) and _has_stepped(optimizer) and is_first_time(optimizer, "seek"):
                _logger.warning(
                    "EWA: this optimizer took steps that nobody counted, and the share rate's schedule begins. To "
                    "resume, call averaging.seek(updates) with the steps that were averaged before; seek(0) begins."
                )
        self._follow(optimizer)
        self._steps.append(optimizer)

    def _experts_due(self, optimizer: Optimizer) -> list[tuple[float, Tensor]]:
        """The parameters to average at the end of the step that begins, with their rates."""
        trained = parameter_ids(optimizer)
        layers = layers_of_trained_experts(optimizer, self.layers())
        rates = self._rates(layers, min((self.updates + 1) / self.total_updates, 1.0))
        due: dict[int, tuple[float, Tensor]] = {}
        for layer, rate in zip(layers, rates, strict=True):
            # At rate 0 nothing is checked. A parameter that layers share has the rate of the first.
            for stacked in _averageable(layer) if rate else dict(layer.named_expert_parameters()).values():
                if id(stacked) in trained and stacked.requires_grad:
                    due.setdefault(id(stacked), (rate, stacked))
        return list(due.values())

    def _other_sequences(self, stacked: Tensor) -> list[Tensor]:
        """:data:`OWN_WEIGHTS` of a parameter in the optimizers' state, which would undo its averaging."""
        states = [optimizer.state.get(stacked) or {} for optimizer in self._handles]
        kept = {
            id(other): other
            for state in states
            for name, other in state.items()
            if isinstance(other, Tensor)
            and other.shape == stacked.shape
            and any(name in names and key in state for key, names in OWN_WEIGHTS.items())
        }
        return list(kept.values())

    def _rates(self, layers: list[MoeMlp], progress: float) -> list[float]:
        """The rate of each layer; ValueError if it is out of range."""
        if callable(self._schedule):  # it is called once for a step
            stated: list[tuple[float, Any]] = [(self._schedule(progress), "constant")] * len(layers)
        else:
            stated = [self._stated(layer) for layer in layers]
        for (rate, _), layer in zip(stated, layers, strict=True):
            check_share_rate(rate, layer.num_experts, parts=layer.parts)
        return [get_schedule(schedule)(progress, rate) for rate, schedule in stated]

    def _stated(self, layer: MoeMlp) -> tuple[float, Any]:
        """Share rate and schedule of a layer: the arguments, and where they are None the layer's own."""
        rate = layer.share_rate if self._share_rate is None else self._share_rate
        return rate, layer.share_schedule if self._schedule is None else self._schedule

    @torch.compiler.disable
    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._steps[:1] != [optimizer]:
            return
        due, self._due, self._steps = self._due, [], []
        if is_skipped(optimizer):
            return
        self.started = True
        self._count(self.updates + 1)
        self.share_rate = due[0][0] if due else 0.0
        for beta, stacked in due:
            for weights in (stacked, *self._other_sequences(stacked)):
                average_(weights, beta)
        if self.updates > 1.1 * self.total_updates and is_first_time(optimizer, "beyond the end"):
            _logger.warning(
                f"EWA: training goes on after update {self.updates}, but the share rate's schedule ended at "
                f"total_updates={self.total_updates}: state the number of optimizer steps in the whole run."
            )


def _has_stepped(optimizer: Optimizer) -> bool:
    """Tell if the states count a step, beside the one by which torch makes them; not all optimizers count steps."""
    steps = [state.get("step") for state in optimizer.state.values() if isinstance(state, dict)]
    return any(float(s) > 1 for s in steps if isinstance(s, (int, float)) or (isinstance(s, Tensor) and s.numel() == 1))


@torch.compiler.disable  # the step of an optimizer may be compiled
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let the averaging of an optimizer follow its step, and check its experts; a pre-hook of every optimizer's step.

    Raises:
        ValueError: if the optimizer or its state belongs to the dense model, or the experts cannot be averaged.
    """
    averaging, layers = ExpertWeightAveraging.of(optimizer), living(MoeMlp)
    if averaging is not None:
        averaging._begin_step(optimizer)
    for layer in trained_layers(optimizer, layers):
        layer.forwards_since_step = 0
    _warn_without_averaging(optimizer, averaging, layers)
    refuse_dense(optimizer, layers)


def _warn_without_averaging(optimizer: Optimizer, own: ExpertWeightAveraging | None, layers: list[MoeMlp]) -> None:
    """Warn once of experts that have a share rate and are trained, but not averaged."""
    # The step may be a part of another optimizer's.
    averagings = [averaging for averaging in living(ExpertWeightAveraging) if averaging is own or averaging._steps]
    averaged = {id(layer) for averaging in averagings for layer in averaging.layers()}
    left_out = [layer for layer in layers if layer.share_rate and id(layer) not in averaged]
    flat = [layer for layer in left_out if next(layer.parameters(), None) is None]
    names = [layer.path or "an expert layer" for layer in (*layers_of_trained_experts(optimizer, left_out), *flat)]
    # torch makes an optimizer's state by a step at rate 0. The rate may be on a GPU: ask only where it matters.
    is_due = names and any(group.get("lr") != 0 for group in optimizer.param_groups)
    if is_due and is_first_time(optimizer, "not averaged"):
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, though they have a share rate (in "
            f"{', '.join(names)}). Make a timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=...), pass "
            "updates_per_epoch to timm's create_scheduler_v2, or give Hugging Face's Trainer or Lightning an "
            "ExpertCallback of timm_moe.integrations. If you call average_experts_ yourself, want no averaging, "
            "or train adapters, set share_rate=0. If FullyShardedDataParallel holds them in flat pieces, take "
            "fully_shard (FSDP2) with timm_moe.expert_placement."
        )
