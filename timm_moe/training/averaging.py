"""During training: averaging the experts after each optimizer step (EWA, section 3.2)."""

import logging
import weakref
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.blocks import moe_layers, sharing, whole_experts
from ..layers import MoeMlp, WeakRegistry
from ..schedules import check_share_rate, get_schedule
from .placement import local_part

_logger = logging.getLogger(__name__)

#: Every expert layer alive in this process, copies included; lets an optimizer be matched to the layers it trains.
living_layers: WeakRegistry[MoeMlp] = WeakRegistry()
MoeMlp.observers.append(living_layers.add)

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

    It does as it is told: frozen experts are averaged, too.

    Raises:
        ValueError: unless 0 <= beta <= (E - 1) / E, if there are no expert layers, if they are sharded along the
            dimension of the experts or held in flat pieces (FSDP1), if they are computed from other parameters
            (pruned, weight-normed), or if they have adapters (PEFT); nothing is averaged then.
    """
    layers = moe_layers(model).values()
    if not layers:
        raise ValueError(f"{type(model).__name__} has no expert layers to average.")
    for layer in layers:
        check_share_rate(beta, layer.num_experts, "beta")
    once = {id(stacked): stacked for layer in layers for stacked in _averageable(layer)}
    for stacked in once.values():
        average_(stacked, beta)


def _averageable(layer: MoeMlp) -> list[nn.Parameter]:
    """The stacked parameters of a layer, (E, ...), each of which can be averaged in its place; else ValueError."""
    experts: list[nn.Parameter] = []
    for name, stacked in whole_experts(layer).items():
        if not isinstance(stacked, nn.Parameter):
            raise ValueError(
                f"{name} of the experts in {layer.path or 'an expert layer'} is computed from other parameters, so it "
                "cannot be averaged: take the pruning or weight norm off (torch.nn.utils.prune.remove, "
                "parametrize.remove_parametrizations). Pruning is not even computed again after a step here, since "
                "the forward that it hooks into is never called."
            )
        local_part(stacked)  # raises
        experts.append(stacked)
    adapted = layer.adapted()
    if adapted:
        raise ValueError(
            f"{adapted[0]} of the experts in {layer.path or 'an expert layer'} has adapters, which cannot be averaged: "
            "merge first, model = model.merge_and_unload(), or train them without averaging (share_rate=0)."
        )
    return experts


class ExpertWeightAveraging:
    """Averages the experts of a model after every step of its optimizer, at a rate that follows a schedule.

    It hooks itself into the optimizer: once made, it needs no further call. Steps that a GradScaler skips are neither
    counted nor averaged. The number of steps done is kept in ``optimizer.param_groups[0]["ewa_updates"]``, so it is
    saved and restored with the optimizer's state, and the schedule goes on after resuming.

    What is averaged is asked anew at each step: the experts that the optimizer then has among its parameters and that
    require gradients, each parameter once, also where layers share it (at the first one's rate).

    Of optimizers that work by another one (timm's Lookahead, SAM) and share its parameter groups, either may be given:
    the experts are averaged once the outermost step ends, also after a ``second_step`` of SAM. An optimizer prepared by
    Accelerate is followed where it really steps.

    Under timm's train.py none of this has to be written: see :mod:`timm_moe.integrations.timm`.

    Args:
        model: holds the expert layers; those whose experts the optimizer trains are averaged.
        optimizer: any torch or timm optimizer.
        share_rate: in [0, (E - 1) / E]; by default the rate of each layer.
        schedule: ``"linear"``, ``"constant"``, ``"early"``, ``"late"``, or a function that returns the rate of a step
            for its progress, the completed fraction of all updates in (0, 1]; by default the schedule of each layer.
        total_updates: optimizer steps in the whole run (an accumulation of gradients ends in one step).

    Raises:
        TypeError: if the optimizer is none of torch's kind, so that its steps cannot be followed.
        ValueError: on a rate or schedule that does not exist, a share rate beside a function, ``total_updates`` below
            1, an optimizer whose step was replaced before it had torch's hooks, one that trains none of the model's
            experts or has its averaging already, or experts that cannot be averaged where they are, as
            :func:`average_experts_`. What comes to be so later is an error at the beginning of the next step.

    Attributes:
        share_rate: the rate of the last averaging in the first layer, 0 before the first.
        total_updates: as given.
    """

    _alive: ClassVar[WeakRegistry["ExpertWeightAveraging"]] = WeakRegistry()

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
        self._of_model = WeakRegistry(moe_layers(model).values())
        self._share_rate, self._schedule = share_rate, schedule
        self._optimizer = weakref.ref(optimizer)
        self._handles: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        self._steps: list[Optimizer] = []  # that have begun since the outermost one, which is the first
        self._due: list[tuple[float, nn.Parameter]] = []  # at the end of that step
        self._started = False
        layers = layers_of_trained_experts(optimizer, self.layers())
        for layer in layers or self.layers():
            _averageable(layer)  # raises
        if not layers:
            raise ValueError(f"The optimizer trains no expert layer of this {type(model).__name__}.")
        if callable(schedule) and share_rate is not None:
            raise ValueError("A schedule given as a function returns the rate itself: leave share_rate out.")
        if not callable(schedule):
            self._rates(layers, 1.0)  # raises
        optimizer.param_groups[0].setdefault(UPDATES, 0)
        self._follow(optimizer)
        self._alive.add(self)
        if is_primary():
            _logger.info(self._describe(layers))

    @classmethod
    def of(cls, optimizer: Optimizer) -> "ExpertWeightAveraging | None":
        """The averaging that an optimizer, or one that shares its parameter groups, has, or None."""
        for averaging in cls._alive:
            owner = averaging._optimizer()
            if owner is not None and owner.param_groups[0] is optimizer.param_groups[0]:
                return averaging
        return None

    @classmethod
    def during(cls, optimizer: Optimizer) -> "list[ExpertWeightAveraging]":
        """The averagings that a step of this optimizer, which may be a part of another one's, ends in."""
        own = cls.of(optimizer)
        return [averaging for averaging in cls._alive if averaging is own or averaging._steps]

    def layers(self) -> list[MoeMlp]:
        """The expert layers that are averaged as long as the optimizer trains their experts."""
        return list(self._of_model)

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
        for handle in self._handles.values():
            handle.remove()
        self._alive.discard(self)

    def _follow(self, optimizer: Optimizer) -> None:
        if optimizer not in self._handles:
            self._handles[optimizer] = optimizer.register_step_post_hook(self._end_step)

    def _begin_step(self, optimizer: Optimizer) -> None:
        """A step begins, perhaps within another one's: whatever cannot be averaged is told before a weight moves."""
        if not self._steps or optimizer in self._steps:  # none steps twice within a step: an earlier one has raised
            self._steps = []
            self._due = self._experts_due(optimizer)
        self._follow(optimizer)
        self._steps.append(optimizer)

    def _experts_due(self, optimizer: Optimizer) -> list[tuple[float, nn.Parameter]]:
        """What the step that begins ends with: the rates and the parameters that they are for."""
        trained = _parameter_ids(optimizer)
        layers = layers_of_trained_experts(optimizer, self.layers())
        rates = self._rates(layers, min((self.updates + 1) / self.total_updates, 1.0))
        due: dict[int, tuple[float, nn.Parameter]] = {}
        for layer, rate in zip(layers, rates, strict=True):
            for stacked in _averageable(layer):
                if id(stacked) in trained and stacked.requires_grad:
                    due.setdefault(id(stacked), (rate, stacked))
        return list(due.values())

    def _rates(self, layers: list[MoeMlp], progress: float) -> list[float]:
        """The rate of each layer; ValueError if it is none."""
        if callable(self._schedule):
            rates = [self._schedule(progress)] * len(layers)  # called once for a step
            for rate, layer in zip(rates, layers, strict=True):
                check_share_rate(rate, layer.num_experts)
            return rates
        return [self._named_rate(layer, progress) for layer in layers]

    def _named_rate(self, layer: MoeMlp, progress: float) -> float:
        rate, schedule = self._stated_sharing(layer)
        check_share_rate(rate, layer.num_experts)
        return get_schedule(schedule)(progress, rate)

    def _stated_sharing(self, layer: MoeMlp) -> tuple[float, Any]:
        """Rate and schedule as this averaging states them, else as the layer does."""
        rate, schedule = sharing(layer)
        stated_rate = rate if self._share_rate is None else self._share_rate
        return stated_rate, schedule if self._schedule is None else self._schedule

    @torch.compiler.disable
    def _end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._steps[:1] != [optimizer]:
            return
        due, self._due, self._steps = self._due, [], []
        found_inf = getattr(optimizer, "found_inf", None)  # set while a GradScaler steps a fused optimizer
        if found_inf is not None and found_inf.item():
            return
        self._started = True
        optimizer.param_groups[0][UPDATES] = self.updates + 1
        self.share_rate = due[0][0] if due else 0.0
        for beta, stacked in due:
            average_(stacked, beta)

    def _describe(self, layers: list[MoeMlp]) -> str:
        experts = "/".join(str(number) for number in sorted({layer.num_experts for layer in layers}))
        if callable(self._schedule):
            course = f"share rate by {getattr(self._schedule, '__name__', 'a function')}"
        else:
            rate, schedule = self._stated_sharing(layers[0])
            course = f"share rate {rate:g}, schedule {schedule}"
        after = f", continuing after update {self.updates}" if self.updates else ""
        return (
            f"EWA: averaging the {experts} experts of {len(layers)} layers after every optimizer step, {course}, "
            f"over {self.total_updates} updates{after}."
        )


@torch.compiler.disable  # the step of an optimizer may be compiled
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Pre-hook of every optimizer's step: its averaging, if there is one, follows it to its end."""
    averaging = ExpertWeightAveraging.of(optimizer)
    if averaging is not None:
        averaging._begin_step(optimizer)


def with_hooks(optimizer: Any) -> Optimizer:
    """The optimizer whose steps are those to follow, with torch's step hooks."""
    while hasattr(optimizer, "step_was_skipped"):  # Accelerate's: its step may be none, that of the one inside is one
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"A {type(optimizer).__name__} is no torch.optim.Optimizer, so its steps cannot be followed.")
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
    """Give an optimizer, and those that it works by, the step hooks which torch's own have."""
    if not _is_hooked(optimizer):
        # Wrappers such as timm's Lookahead skip Optimizer.__init__, which installs the hooks; this does, too.
        optimizer.__setstate__({"defaults": getattr(optimizer, "defaults", {})})
    for inner in vars(optimizer).values():
        if isinstance(inner, Optimizer) and not _is_hooked(inner):
            _install_hooks(inner)


def trained_layers(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Those of the layers that have a parameter among the optimizer's, be it their router's."""
    trained = _parameter_ids(optimizer)
    return [layer for layer in layers if any(id(parameter) in trained for parameter in layer.parameters())]


def layers_of_trained_experts(optimizer: Optimizer, layers: Iterable[MoeMlp]) -> list[MoeMlp]:
    """Those of the layers whose experts are among the optimizer's parameters, or are computed from some of them."""
    trained = _parameter_ids(optimizer)
    return [layer for layer in layers if any(id(source) in trained for source in _sources(layer))]


def _sources(layer: MoeMlp) -> list[Tensor]:
    """The parameters that the experts of a layer are, or are computed from."""
    experts: list[Tensor] = [attrgetter(name)(layer) for name in layer.stacked_shapes]
    if all(isinstance(stacked, nn.Parameter) for stacked in experts) and not layer.adapted():
        return experts
    own = layer.named_parameters()
    return [parameter for name, parameter in own if name.partition(".")[0] not in ("router", "shared")]


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def is_primary() -> bool:
    """Whether this process is the one that logs."""
    return (
        not torch.distributed.is_available()
        or not torch.distributed.is_initialized()
        or torch.distributed.get_rank() == 0
    )
