"""Calls of any training loop: at its start, for each loss, and where it logs.

An integration consists of these three calls: see :mod:`timm_moe.integrations.transformers` and
:mod:`timm_moe.integrations.lightning`.
"""

import logging
import math

from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.expert_layers import moe_layers
from ..layers import MoeMlp
from ..layers.router_totals import Reader
from .averaging import ExpertWeightAveraging, forget_updates, stated_updates
from .optimizers import (
    are_frozen,
    forget_warnings,
    has_stepped,
    layers_of_trained_experts,
    parameter_ids,
    require_parameters,
)
from .router_losses import add_losses, begin_run, recording_layers, summaries_for
from .wrapped_optimizers import with_hooks

_logger = logging.getLogger(__name__)


def start_averaging(
    model: nn.Module, optimizer: Optimizer, total_updates: float, updates: int = 0
) -> ExpertWeightAveraging | None:
    """Start the averaging of a run, as the options of its expert layers say.

    An averaging that the optimizer has already is that of an earlier run, and ends.

    Args:
        model: the model to be trained.
        optimizer: the optimizer of the run, with its state if the run is resumed.
        total_updates: number of optimizer steps in the whole run.
        updates: number of the steps done before, in the unit of ``total_updates``. It holds
            whatever count the optimizer's state has now, which may be that of another number of
            processes. A state that is loaded later brings its own count. 0 is the start of a run: a
            count that the optimizer has from an earlier run is dropped, with a warning.

    Returns:
        The averaging, which follows the optimizer from now on (:meth:`ExpertWeightAveraging.remove`
        ends it), or None if the optimizer trains no experts that have a share rate. Where all of
        them are frozen, it waits until the optimizer gets them.

    Raises:
        TypeError: as :class:`ExpertWeightAveraging`.
        ValueError: if the optimizer averages the experts of another model; of a model with unfrozen
            experts that have a share rate, if the run has no known end, or the optimizer holds none
            of its parameters; and as :class:`ExpertWeightAveraging`.
    """
    layers = list(moe_layers(model).values())
    begin_run(layers)
    if not layers:
        _logger.warning(
            "This %s has no expert layers, so nothing is averaged: convert it first by "
            "timm_moe.convert_to_moe.",
            type(model).__name__,
        )
    averaged = [layer for layer in layers if layer.share_rate]
    if not averaged:
        return None
    optimizer = with_hooks(optimizer)
    forget_warnings(optimizer)
    held = parameter_ids(optimizer)
    if not layers_of_trained_experts(held, averaged):
        if not are_frozen(averaged):
            require_parameters(optimizer, model)
            return None
        trains_others = not held.isdisjoint(map(id, model.parameters()))
        # Nothing may ever be averaged, so a run without an end is no error.
        if not trains_others or not math.isfinite(total_updates) or total_updates < 1:
            return None

    if not math.isfinite(total_updates) or total_updates < 1:
        raise ValueError(
            "The schedule of expert weight averaging needs the number of optimizer steps of the "
            f"run, got {total_updates}: give the run a number of steps, or epochs of a loader that "
            "has a length."
        )
    _end_earlier(optimizer, layers, updates)
    averaging = ExpertWeightAveraging(model, optimizer, total_updates=int(total_updates))
    # A state without a count may be loaded into a new optimizer: its first step tells of that.
    if updates or has_stepped(optimizer):
        averaging.seek(updates)
    return averaging


def start_or_resume(
    model: nn.Module, optimizer: Optimizer, total_updates: float, steps: int
) -> ExpertWeightAveraging | None:
    """Start the averaging of a run that a trainer begins or resumes.

    An averaging that the optimizer has already is the user's, and stays.

    Args:
        model: the model to be trained.
        optimizer: the optimizer, with its state if the run is resumed.
        total_updates: number of optimizer steps in the whole run.
        steps: the trainer's own count of the steps done. The count in the optimizer's state is more
            exact: it leaves out steps that a GradScaler skipped, and those of other optimizers.

    Returns:
        The averaging that was started, which the trainer ends, or None.

    Raises:
        TypeError: as :func:`start_averaging`.
        ValueError: as :func:`start_averaging`.
    """
    if ExpertWeightAveraging.of(optimizer) is not None:
        begin_run(moe_layers(model).values())
        return None
    if not steps:
        forget_updates(optimizer)  # of an earlier run, or of a trial, as the trainer says
    return start_averaging(model, optimizer, total_updates, stated_updates(optimizer) or steps)


def _end_earlier(optimizer: Optimizer, layers: list[MoeMlp], updates: int) -> None:
    """End the averaging of an earlier run by an optimizer, before a run of these layers begins.

    Raises:
        ValueError: if the optimizer averages experts of other layers, too.
    """
    earlier = ExpertWeightAveraging.of(optimizer)
    if earlier is not None:
        others = [layer for layer in earlier.layers() if layer not in layers]
        if layers_of_trained_experts(parameter_ids(optimizer), others):
            raise ValueError(
                "This optimizer averages the experts of another model: start both at once, by "
                "start_averaging(torch.nn.ModuleList([first, second]), ...)."
            )
        earlier.remove()
    if not updates and stated_updates(optimizer):
        _logger.warning(
            "EWA: a run begins, so the share rate does too. Call start_averaging once, before the "
            "first epoch. To go on with an earlier run, resume your trainer from its checkpoint, "
            "or state start_averaging(..., updates=...)."
        )
    if not updates:
        forget_updates(optimizer)


def add_router_losses(model: nn.Module, loss: Tensor, scale: float = 1.0) -> Tensor:
    """Add the router losses of a model's last training forward; call it after each forward.

    Args:
        model: the model that computed the loss.
        loss: a scalar.
        scale: factor of the router losses: 1 / N where ``loss`` was divided by the number N of
            accumulated batches already.

    Returns:
        The sum; the loss itself in eval mode, without routers, or where
        :func:`timm_moe.auxiliary_loss` was added already.
    """
    return add_losses(recording_layers(model), loss, scale)


def expert_statistics(
    model: nn.Module, averaging: ExpertWeightAveraging | None = None
) -> dict[str, float]:
    """Return statistics for a log, by name.

    They are those of each router that recorded since the last call, and the last share rate.
    ``router/blocks.1.mlp/balance_loss`` is a loss without its weight, ``.../dropped`` the fraction
    of choices beyond the capacities, ``.../load_max`` the fraction of all choices that fell on the
    most chosen expert.
    """
    numbers: dict[str, float] = {}
    for path, summary in summaries_for(Reader.LOG, moe_layers(model), reset=True).items():
        numbers |= {f"router/{path}/{name}_loss": value for name, value in summary.losses.items()}
        numbers |= {
            f"router/{path}/dropped": summary.dropped,
            f"router/{path}/load_max": max(summary.load),
        }
    if averaging is not None:
        numbers["ewa/share_rate"] = averaging.share_rate
    return numbers
