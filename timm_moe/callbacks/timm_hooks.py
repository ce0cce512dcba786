"""How an unmodified train.py gets its callbacks. The only place that touches timm's training objects.

timm's ``create_scheduler_v2`` is where every timm training script states its optimizer, epochs and updates per epoch.
It is wrapped so that the optimizer also gets the averaging that the experts it trains were created with.
"""

import functools
import inspect
import sys
from typing import Any

from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..layers import MoeMlp
from .ewa import ExpertWeightAveraging, trained_layers

_signature = inspect.signature(create_scheduler_v2)


@functools.wraps(create_scheduler_v2)
def _create_scheduler_v2(*args: Any, **kwargs: Any) -> Any:
    lr_scheduler, num_epochs = create_scheduler_v2(*args, **kwargs)
    arguments = _signature.bind(*args, **kwargs).arguments
    updates_per_epoch = arguments.get("updates_per_epoch", 0)
    averaging = _attach_averaging(arguments["optimizer"], num_epochs * updates_per_epoch)
    if averaging is not None and lr_scheduler is not None:
        _start_where_scheduler_starts(averaging, lr_scheduler, updates_per_epoch)
    return lr_scheduler, num_epochs


def _attach_averaging(optimizer: Optimizer, total_updates: int) -> ExpertWeightAveraging | None:
    layers = [layer for layer in trained_layers(optimizer, MoeMlp.alive) if layer.share_rate]
    if not layers or not total_updates or ExpertWeightAveraging.of(optimizer):
        return None
    return ExpertWeightAveraging(nn.ModuleList(layers), optimizer, total_updates=int(total_updates))


def _start_where_scheduler_starts(averaging: ExpertWeightAveraging, lr_scheduler: Any, updates_per_epoch: int) -> None:
    """Take the first update from the epoch at which train.py starts the scheduler.

    After ``--resume`` this equals the count in the optimizer's state; after ``--no-resume-opt`` or ``--start-epoch`` it
    is the only trace of it.
    """
    step, step_update = lr_scheduler.step, lr_scheduler.step_update

    @functools.wraps(step)
    def seek_and_step(epoch: int, *args: Any, **kwargs: Any) -> None:
        averaging.seek(epoch * updates_per_epoch)
        step(epoch, *args, **kwargs)

    @functools.wraps(step_update)
    def seek_and_step_update(num_updates: int, *args: Any, **kwargs: Any) -> None:
        averaging.seek(num_updates)
        step_update(num_updates, *args, **kwargs)

    lr_scheduler.step, lr_scheduler.step_update = seek_and_step, seek_and_step_update


def _require_averaging(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse to train random partitions that nothing averages: their mean would be a bad model, silently."""
    if ExpertWeightAveraging.of(optimizer):
        return
    if any(layer.share_rate for layer in trained_layers(optimizer, MoeMlp.alive)):
        raise RuntimeError(
            "This optimizer trains experts that nothing averages: make a timm_moe.ExpertWeightAveraging(model, "
            "optimizer, total_updates=...), or pass updates_per_epoch to timm's create_scheduler_v2, or create "
            "the model with share_rate=0 to train without averaging."
        )


def wrap_scheduler_factory() -> None:
    """Put the wrapped ``create_scheduler_v2`` wherever timm's own stands, also in a script that already imported it."""
    here = sys.modules[__name__]
    for module in list(sys.modules.values()):
        if module is not here and getattr(module, "__dict__", {}).get("create_scheduler_v2") is create_scheduler_v2:
            module.create_scheduler_v2 = _create_scheduler_v2  # type: ignore[attr-defined]


def install() -> None:
    """Put the hooks in place; done once, when timm_moe is imported."""
    wrap_scheduler_factory()
    register_optimizer_step_pre_hook(_require_averaging)
