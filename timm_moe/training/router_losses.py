"""During training: the routers' losses join the training loss, and their statistics reach the user."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.blocks import moe_layers
from ..layers import MoeMlp, RecordingRouter, RouterRecord
from .averaging import is_primary, living_layers, trained_layers

_logger = logging.getLogger(__name__)

#: Training forwards between two looks at whether the routers' logits were finite: the log interval of timm's train.py.
#: Each look waits for the device, so it is not done at every step.
FINITE_CHECK_INTERVAL = 50


@dataclass(frozen=True)
class RoutingSummary:
    """What a router did over a number of training forwards.

    Attributes:
        losses: mean of each of its losses by name, without their weights.
        dropped: fraction of all choices (K for each token) that found no place at their expert.
        load: fraction of all choices that went for each expert, dropped ones included; they sum to 1.
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
    """Sums over the training forwards of one router, on its device; reading them waits for it."""

    def __init__(self) -> None:
        self.forwards = 0
        self.losses: dict[str, Tensor] = {}
        self.load: Tensor | int = 0
        self.dropped: Tensor | int = 0
        self.not_finite: Tensor | int = 0  # since the last look
        self.complete = False  # told of; the next record begins anew

    def add(self, record: RouterRecord) -> None:
        self.forwards += 1
        self.losses = {name: self.losses.get(name, 0) + loss for name, loss in record.losses.items()}
        self.load = self.load + record.load
        self.dropped = self.dropped + record.dropped
        self.not_finite = self.not_finite + (~record.finite).long()

    def summary(self) -> RoutingSummary:
        load = torch.as_tensor(self.load).double().cpu()
        choices = max(load.sum().item(), 1.0)
        return RoutingSummary(
            losses={name: float(total) / self.forwards for name, total in self.losses.items()},
            dropped=int(self.dropped) / choices,
            load=(load / choices).tolist(),
        )


_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
#: Of the routers whose losses were added.
_totals: "weakref.WeakKeyDictionary[nn.Module, _Totals]" = weakref.WeakKeyDictionary()


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The weighted sum of the routers' losses of the model's last training forward, to be added to the training loss.

    Call it once after each forward; a second call gives the same again. Calling it counts as adding it. (If not the
    model but a part of it is called, as ``forward_features``, it holds all forwards since the last call.) Under timm's
    train.py, and with any ``timm.task.TrainingTask``, it is in the loss already.

    Returns:
        A scalar with a gradient; zero if no router recorded a loss (in eval mode, without gradients, or with
        ``aux_loss_weight=0``).
    """
    losses = []
    for layer in routed_layers(model):
        if layer.router.is_pending():
            _check_finite(layer, _count(layer.router))
            layer.router.end_waiting()
        losses += [record.weighted_loss for record in layer.router.records if record.weighted_loss is not None]
    if not losses:
        reference = next(model.parameters(), None)
        return torch.zeros((), device=None if reference is None else reference.device)
    return torch.stack(losses).sum()


def routing_summary(model: nn.Module, reset: bool = False) -> dict[str, RoutingSummary]:
    """Router losses, dropped choices and load of each expert, averaged over the training forwards.

    They are counted when their losses are added (by :func:`auxiliary_loss` or a timm training task), in this process,
    from the start, the last reset, or the last end of an epoch that a scheduler of timm was told of.

    Args:
        model: holds routed expert layers.
        reset: begin anew afterwards.

    Returns:
        The summary of each layer by its name; layers that were not trained yet are left out.
    """
    summaries = {}
    for name, layer in moe_layers(model).items():
        totals = _totals.get(layer.router)
        if totals is not None:
            summaries[name] = totals.summary()
            totals.complete |= reset
    return summaries


@contextmanager
def gathering(task: nn.Module) -> Iterator[None]:
    """A timm training task runs, in which routers gather the records of all forwards; if it fails, they forget them."""
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


def with_auxiliary_loss(task: nn.Module, result: dict[str, Any]) -> dict[str, Any]:
    """What a timm training task returned, with the losses of its routers in its loss."""
    routers = [layer.router for layer in routed_layers(task)]
    if not any(router.is_pending() for router in routers):  # not training, or a task within did it
        return result
    loss = auxiliary_loss(task)
    return {**result, "loss": result["loss"] + loss, "auxiliary_loss": loss.detach()}


@torch.compiler.disable
def before_step(optimizer: Optimizer, *args: Any) -> None:
    """Optimizer pre-hook: raise RuntimeError if routers that it trains have losses which nobody added."""
    routed: list[Any] = [layer for layer in living_layers if isinstance(layer.router, RecordingRouter)]
    trained: list[Any] = trained_layers(optimizer, routed) if routed else []
    for layer in routed:
        if layer not in trained:
            layer.router.see_another_step()
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
    if any(layer.router.discarded for layer in trained) and optimizer not in _warned:
        _warned.add(optimizer)
        _logger.warning(
            "The routers' losses of some forwards were not added to the training loss: timm_moe.auxiliary_loss(model) "
            "holds those of the last forward, so call it after each one that is trained on."
        )
    for layer in trained:
        layer.router.see_step()


def log_epoch(optimizer: Optimizer) -> None:
    """Log the summary of each router that the optimizer trains, and begin anew; done at the end of an epoch."""
    trained = [layer for layer in trained_layers(optimizer, living_layers) if layer.router in _totals]
    for layer in sorted(trained, key=by_block):
        totals = _totals[layer.router]
        if not totals.complete:
            _check_finite(layer, totals, now=True)
            if is_primary():
                _logger.info(f"Routing in {layer.path or 'an expert layer'}: {totals.summary()}.")
            totals.complete = True


def summary_of_epoch(layer: MoeMlp) -> RoutingSummary | None:
    """What a router did since the last end of an epoch; None of one that was not trained, or has no losses."""
    totals = _totals.get(layer.router)
    return None if totals is None or totals.complete else totals.summary()


def routed_layers(model: nn.Module) -> list[Any]:
    """The expert layers of a model, however wrapped, whose routers have losses."""
    return [
        module
        for module in model.modules()
        if isinstance(module, MoeMlp) and isinstance(module.router, RecordingRouter)
    ]


def _count(router: RecordingRouter) -> _Totals:
    totals = _totals.get(router)
    if totals is None or totals.complete:
        totals = _totals[router] = _Totals()
    for record in router.records:
        totals.add(record)
    return totals


def _check_finite(layer: MoeMlp, totals: _Totals, now: bool = False) -> None:
    """Warn of NaN or Inf in the router's logits."""
    if not totals.forwards or (totals.forwards % FINITE_CHECK_INTERVAL and not now):
        return
    bad, seen = int(totals.not_finite), totals.forwards % FINITE_CHECK_INTERVAL or FINITE_CHECK_INTERVAL
    totals.not_finite = 0
    if bad:
        _logger.warning(
            f"The router of {layer.path or 'an expert layer'} had NaN or Inf in its logits in {bad} of the last {seen} "
            "training forwards."
        )


def by_block(layer: MoeMlp) -> list[Any]:
    """Sort key: blocks by number."""
    return [int(part) if part.isdecimal() else -1 for part in layer.path.split(".")]
