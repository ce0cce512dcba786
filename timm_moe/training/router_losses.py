"""Addition of the recorded router losses to the training loss, and sums of the routers' statistics."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.blocks import moe_layers
from ..layers import BalancingBias, MoeMlp, RecordingRouter, RouterRecord
from ..layers.living import living
from .optimizers import is_distributed, is_first_time, is_primary, is_skipped, trained_layers

_logger = logging.getLogger(__name__)

#: Training forwards between two checks of whether the routers' logits were finite: the log interval of timm's train.py.
#: A check waits for the device, so it is not done at every step.
FINITE_CHECK_INTERVAL = 50


@dataclass(frozen=True)
class RoutingSummary:
    """Statistics of a router over a number of training forwards.

    Attributes:
        losses: mean of each loss by name, without its weight.
        dropped: fraction of all choices (K for each token) beyond the capacities of their experts.
        load: fraction of all choices that fell on each expert, dropped ones included; they sum to 1.
    """

    losses: dict[str, float]
    dropped: float
    load: list[float]

    def __str__(self) -> str:
        losses = "".join(f"{name} loss {value:.3g}, " for name, value in self.losses.items())
        mean = sum(self.load) / len(self.load)
        load = " / ".join(f"{share:.1%}" for share in (min(self.load), mean, max(self.load)))
        return f"{losses}dropped {self.dropped:.1%}, share of an expert min/mean/max {load}"


class _Totals:
    """Sums over the training forwards of one router, on its device; reading them waits for the device."""

    def __init__(self) -> None:
        self.forwards = 0
        self.losses: dict[str, Tensor] = {}
        self.load: Tensor | int = 0
        self.dropped: Tensor | int = 0
        self.not_finite: Tensor | int = 0  # since the last check
        self.complete = False  # an epoch has ended: the next record starts new sums

    def add(self, record: RouterRecord) -> None:
        self.forwards += 1
        self.losses = {name: self.losses.get(name, 0) + loss for name, loss in record.losses.items()}
        self.load = self.load + record.load
        self.dropped = self.dropped + record.dropped
        self.not_finite = self.not_finite + (~record.finite).long()

    def summary(self) -> RoutingSummary:
        load = torch.as_tensor(self.load).cpu().double()  # MPS has no float64
        choices = max(load.sum().item(), 1.0)
        return RoutingSummary(
            losses={name: float(total) / self.forwards for name, total in self.losses.items()},
            dropped=int(self.dropped) / choices,
            load=(load / choices).tolist(),
        )

    def warn_if_not_finite(self, layer: MoeMlp) -> None:
        """Warn of NaN or Inf in the logits since the last check."""
        bad, seen = int(self.not_finite), self.forwards % FINITE_CHECK_INTERVAL or FINITE_CHECK_INTERVAL
        self.not_finite = 0
        if bad:
            _logger.warning(
                f"The router of {layer.path or 'an expert layer'} had NaN or Inf in its logits in {bad} of the last "
                f"{seen} training forwards."
            )


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Sum the weighted losses of the routers in the model's last training forward, for the training loss.

    Call it once after each forward. The sum counts as added: a second call gives zero. If a part of the model was
    called instead, as ``forward_features``, the sum is over all forwards since the last call. timm's train.py and any
    ``timm.task.TrainingTask`` add it by themselves.

    Returns:
        A scalar with a gradient; zero if no loss waits, as with ``aux_loss_weight=0``, in eval mode, and within
        ``torch.no_grad()``.
    """
    losses = []
    for layer in routed_layers(model) if torch.is_grad_enabled() else ():  # without gradients they go on waiting
        records, totals = layer.router.take(), layer.router.totals
        if records and (totals is None or totals.complete):
            totals = layer.router.totals = _Totals()
        for record in records:
            totals.add(record)
        if records and totals.forwards % FINITE_CHECK_INTERVAL == 0:
            totals.warn_if_not_finite(layer)
        losses += [record.weighted_loss for record in records if record.weighted_loss is not None]
    if not losses:
        reference = next(model.parameters(), None)
        return torch.zeros((), device=None if reference is None else reference.device)
    return torch.stack([loss.to(losses[-1].device) for loss in losses]).sum()  # blocks may be on several GPUs


def has_waiting_losses(model: nn.Module) -> bool:
    """Return True if records wait for :func:`auxiliary_loss`."""
    return any(layer.router.waiting() for layer in routed_layers(model))


def routing_summary(model: nn.Module, reset: bool = False) -> dict[str, RoutingSummary]:
    """Average the router losses, the dropped choices and the load of each expert over the training forwards.

    Forwards count once their losses were added (by :func:`auxiliary_loss` or a timm training task), in this process,
    since the start, the last reset, or the last end of an epoch of timm's scheduler.

    Args:
        model: holds routed expert layers.
        reset: start new averages afterwards.

    Returns:
        The summary of each layer by its name; layers that were not trained yet are left out.
    """
    summaries = {}
    for name, layer in moe_layers(model).items():
        totals = getattr(layer.router, "totals", None)
        if totals is not None:
            summaries[name] = totals.summary()
            totals.complete |= reset
    return summaries


@contextmanager
def gathering(task: nn.Module) -> Iterator[None]:
    """Let the routers gather the records of all forwards of a training task; if it fails, they drop them."""
    routers = [layer.router for layer in routed_layers(task)]
    for router in routers:
        router.begin_task()
    try:
        yield
    except BaseException:
        for router in routers:
            router.forget()
        raise
    finally:
        for router in routers:
            router.end_task()


@torch.compiler.disable
def before_step(optimizer: Optimizer, *args: Any) -> None:
    """Raise RuntimeError if losses of routers that an optimizer trains wait; a pre-hook of every optimizer's step."""
    routed: list[Any] = [layer for layer in living(MoeMlp) if isinstance(layer.router, RecordingRouter)]
    trained: list[Any] = trained_layers(optimizer, routed) if routed else []
    for layer in routed:
        if layer not in trained:
            layer.router.end_other_step()
    forgotten = [layer.router for layer in trained if layer.router.has_pending_losses()]
    for router in forgotten:
        router.forget()
    if forgotten:
        raise RuntimeError(
            "The routers' losses were not added to the training loss, so the experts would not be used evenly: add "
            "timm_moe.auxiliary_loss(model) to the loss after each forward, train with a timm.task.TrainingTask, give "
            "Hugging Face's Trainer or Lightning an ExpertCallback of timm_moe.integrations, or create the model with "
            "aux_loss_weight=0."
        )
    if any(layer.router.discarded for layer in trained) and is_first_time(optimizer, "discarded losses"):
        _logger.warning(
            "The routers' losses of some forwards were not added to the training loss: timm_moe.auxiliary_loss(model) "
            "holds the losses of the last forward, so call it after each one that is trained on."
        )
    for layer in trained:
        layer.router.end_step()
    biases = (layer.router.balancing_bias for layer in trained)
    # Without a choice since the last step there is nothing to do, as in the optimizers that another one works by.
    due = [bias for bias in biases if bias is not None and bias.load is not None]
    if due and not is_skipped(optimizer):
        _update_biases(due)


def _update_biases(biases: list[BalancingBias]) -> None:
    """Balance the experts by the choices since the last step, of all processes."""
    loads: list[Any] = [bias.load for bias in biases]
    if is_distributed():
        total = torch.cat([load.to(loads[0].device) for load in loads])
        torch.distributed.all_reduce(total)
        loads = list(total.split([len(load) for load in loads]))
    for bias, load in zip(biases, loads, strict=True):
        bias.update(load.to(bias.steps.device))


def log_epoch(optimizer: Optimizer) -> None:
    """Log the summary of each router that the optimizer trains, and start new averages; done at the end of an epoch."""
    for layer in trained_layers(optimizer, living(MoeMlp)):
        totals = getattr(layer.router, "totals", None)
        if totals is not None and not totals.complete:
            totals.warn_if_not_finite(layer)
            if is_primary():
                _logger.info(f"Routing in {layer.path or 'an expert layer'}: {totals.summary()}.")
            totals.complete = True


def routed_layers(model: nn.Module) -> list[Any]:
    """The expert layers of a model, however wrapped, whose routers have losses."""
    return [layer for layer in moe_layers(model).values() if isinstance(layer.router, RecordingRouter)]
