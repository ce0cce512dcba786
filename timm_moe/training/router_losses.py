"""Addition of the recorded router losses to the training loss, and the routers' statistics.

CONTRIBUTING.md has the rules: "When a router's loss is taken, added, dropped, told of".
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.expert_layers import moe_layers
from ..convert.wrappers import unwrapped
from ..layers import MoeMlp, RecordingRouter, RouterRecord
from ..layers.living import find, living
from ..layers.router_totals import Reader, RouterTotals, RoutingSummary
from .optimizers import is_first_time, is_primary, parameter_ids, trained_layers

_logger = logging.getLogger(__name__)


def recording_layers(model: nn.Module) -> list[Any]:
    """Return the expert layers of a model, which may be wrapped, whose routers take records."""
    return only_recording(find(MoeMlp, unwrapped(model)))


def only_recording(layers: Iterable[MoeMlp]) -> list[Any]:
    """Select the layers whose routers take records."""
    return [layer for layer in layers if isinstance(layer.router, RecordingRouter)]


def begin_run(layers: Iterable[MoeMlp]) -> None:
    """Forget what an earlier run, which may have ended amid a forward, left in the routers.

    That is losses that wait, loads for the balancing bias, and statistics.
    """
    for layer in only_recording(layers):
        layer.router.forget()
        for reader in Reader:
            layer.router.totals.begin(reader)


# --- the losses


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Sum the weighted router losses of the model's last training forward, for the training loss.

    Call it once after each forward. The sum counts as added, so a second call gives zero. If a part
    of the model was called instead, as ``forward_features``, the sum is over all forwards since the
    last call. timm's train.py and any ``timm.task.TrainingTask`` add it by themselves.

    Returns:
        A scalar with a gradient, on the device of the last router; zero if no loss waits, as with
        ``aux_loss_weight=0``, in eval mode, and within ``torch.no_grad()``.
    """
    loss = take_losses(recording_layers(model))
    if loss is not None:
        return loss
    reference = next(model.parameters(), None)
    return torch.zeros((), device=None if reference is None else reference.device)


# Statistics change at each call, so compiled code that traced them would be compiled each time.
@torch.compiler.disable
def take_losses(layers: list[Any]) -> Tensor | None:
    """Sum the losses that wait in layers; they count as added then.

    Returns:
        A scalar, or None if no record waits.
    """
    if not torch.is_grad_enabled():  # The losses go on waiting.
        return None
    taken = [(layer, record) for layer in layers for record in layer.router.take()]
    _keep_statistics(taken)
    if not taken:
        return None
    losses = [record.weighted_loss for _, record in taken if record.weighted_loss is not None]
    if not losses:
        return torch.zeros((), device=taken[0][1].load_GE.device)
    # Blocks may be on several GPUs, so the sum is on the device of the last one.
    total = torch.stack([loss.to(losses[-1].device) for loss in losses]).sum()
    if total.requires_grad:
        _follow(total, {layer.router.totals for layer, _ in taken})
    return total


def _follow(total: Tensor, of_routers: set[RouterTotals]) -> None:
    """Let the routers know when backward reaches a sum of their losses."""
    sum_of_losses = object()
    for totals in of_routers:
        totals.take(sum_of_losses)

    def is_trained(gradient: Tensor) -> None:
        for totals in of_routers:
            totals.reach(sum_of_losses)

    total.register_hook(is_trained)


def add_losses(layers: list[Any], loss: Tensor, scale: float = 1.0) -> Tensor:
    """Add the losses that wait in layers to a training loss."""
    router_loss = take_losses(layers)
    return loss if router_loss is None else loss + router_loss.to(loss.device) * scale


@contextmanager
def collecting_losses(task: nn.Module) -> Iterator[list[Any]]:
    """Let the routers gather the records of all forwards of a training task.

    If the task fails, its records are dropped.

    Yields:
        The task's layers whose routers take records, for :func:`take_losses` after the block.
    """
    layers = recording_layers(task)
    for layer in layers:
        layer.router.begin_task()
    try:
        yield layers
    except BaseException:
        drop_losses(layers)
        raise
    finally:
        for layer in layers:
            layer.router.end_task()


def drop_losses(layers: list[Any]) -> None:
    """Drop the losses that wait in layers, as for a batch that is left out."""
    for layer in layers:
        layer.router.drop()


def end_forwards(optimizer: Optimizer, trained: list[MoeMlp], others: list[MoeMlp]) -> None:
    """Clear the routers of the layers that an optimizer trains as it steps.

    Records without losses go to the statistics, since nobody has to add them.

    Raises:
        RuntimeError: if losses of routers that it trains wait.
    """
    for layer in only_recording(others):
        layer.router.end_other_step()
    layers = only_recording(trained)
    routers = [layer.router for layer in layers]
    forgotten = [router for router in routers if router.has_pending_losses()]
    lost = sum(router.totals.lost for router in routers)
    is_untrained = any(router.totals.untrained for router in routers)
    if not forgotten:
        _keep_statistics([(layer, record) for layer in layers for record in layer.router.take()])
    for router in forgotten or routers:
        router.end_step()
    if forgotten:
        raise RuntimeError(
            "The routers' losses were not added to the training loss, so the experts would not be "
            "used evenly: add timm_moe.auxiliary_loss(model) to the loss after each forward, train "
            "with a timm.task.TrainingTask, give Hugging Face's Trainer or Lightning the "
            "ExpertCallback of timm_moe.integrations.transformers or .lightning, or create the "
            "model with aux_loss_weight=0, and without z_loss_weight."
        )
    if lost and is_first_time(optimizer, "lost losses"):
        _logger.warning(
            "The routers' losses of some forwards were not added to the training loss: "
            "timm_moe.auxiliary_loss(model) holds the losses of the last forward, so call it after "
            "each one that is trained on."
        )
    if is_untrained and is_first_time(optimizer, "untrained losses"):
        _logger.warning(
            "The routers' losses of some forwards were taken, but no backward reached them: "
            "timm_moe.auxiliary_loss(model) gives them once, so call it once after each forward, "
            "add that tensor to the loss, and log the same tensor. Where you skipped a batch on "
            "purpose, all is well."
        )


# --- the statistics


def _keep_statistics(taken: list[tuple[Any, RouterRecord]]) -> None:
    """Add records to the totals of their layers, without their graphs."""
    records = [record for _, record in taken]
    # Copies, of all layers at once: the outputs of a CUDA graph are overwritten by the next step.
    loads = iter(_copies([record.load_GE for record in records]))
    losses = iter(_copies([loss for record in records for loss in record.losses.values()]))
    for layer, record in taken:
        own = {name: next(losses) for name in record.losses}
        totals: RouterTotals = layer.router.totals
        totals.add(record._replace(losses=own, weighted_loss=None, load_GE=next(loads)))


def _copies(tensors: list[Tensor]) -> Iterable[Tensor]:
    return torch._foreach_add(tensors, 0) if tensors else ()


def routing_summary(model: nn.Module, reset: bool = False) -> dict[str, RoutingSummary]:
    """Average what the routers of a model recorded over the training forwards.

    That is their losses, the dropped choices and the load of each expert. Forwards count once their
    losses were added (by :func:`auxiliary_loss` or a timm training task), in this process. Of
    routers without losses, which nobody has to add, the last forward before each optimizer step
    counts. The averages begin at the last call with ``reset=True``, or where
    :func:`start_averaging` or timm's ``create_scheduler_v2`` began the run.

    Args:
        model: a model with routed expert layers.
        reset: start new averages afterwards.

    Returns:
        The summary of each layer by its name; layers without such forwards are left out.
    """
    return summaries_for(Reader.SUMMARY, moe_layers(model), reset)


def summaries_for(
    reader: Reader, layers: dict[str, MoeMlp], reset: bool = False
) -> dict[str, RoutingSummary]:
    """Return a reader's summary of each layer that has one, and start new averages if asked to."""
    summaries = {}
    for name, layer in layers.items():
        if isinstance(layer.router, RecordingRouter):
            summary = layer.router.totals.summary(reader)
            if summary is not None:
                summaries[name] = summary
            if reset:
                layer.router.totals.begin(reader)
    return summaries


def log_epoch(optimizer: Optimizer) -> None:
    """Log the summary of each router that the optimizer trains, and start new averages.

    This is called at the end of an epoch.
    """
    for layer in only_recording(trained_layers(parameter_ids(optimizer), living(MoeMlp))):
        if is_primary():  # A summary waits for the device.
            for path, summary in summaries_for(Reader.EPOCH, {layer.path: layer}).items():
                _logger.info(f"Routing in {path}: {summary}.")
        layer.router.totals.begin(Reader.EPOCH)
