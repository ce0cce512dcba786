"""Hooks around every optimizer step of the process: all of it begins in :func:`before_step`.

=======  ==========================================================================================
when     what happens
=======  ==========================================================================================
before   experts that the optimizer does not know are refused, and the state of other experts
before   router losses that nobody added are refused; else the routers are cleared
before   warnings name experts that are trained in eval mode, those that have a share rate but that
         nothing averages, and balancing biases that cannot move
after    the experts are averaged, see :mod:`timm_moe.training.averaging`
after    balancing biases move by the choices since the last step
=======  ==========================================================================================

None of this happens in a step by which torch only makes an optimizer's state.
"""

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from ..layers import MoeMlp
from ..layers.living import living
from . import balancing
from .averaging import ExpertWeightAveraging
from .optimizers import (
    is_first_time,
    layers_of_trained_experts,
    only_makes_state,
    parameter_ids,
    trained_layers,
)
from .router_losses import end_forwards, only_recording

_logger = logging.getLogger(__name__)


@torch.compiler.disable  # The step of an optimizer may be compiled.
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Do what is due before a step; a pre-hook of every optimizer's step.

    Raises:
        ValueError: if the optimizer or its state belongs to the dense model, or the experts cannot
            be averaged.
        RuntimeError: if losses of routers that it trains wait, or a CUDA graph captures a step
            whose count is on the host.
    """
    layers = living(MoeMlp)
    if layers and not only_makes_state(optimizer, args, kwargs):
        _begin_step(optimizer, layers)


def _begin_step(optimizer: Optimizer, layers: list[MoeMlp]) -> None:
    """Do what is due before a step in a process with expert layers."""
    held = parameter_ids(optimizer)
    trained = trained_layers(held, layers)
    others = [layer for layer in layers if layer not in trained]

    _refuse_older(layers, held)
    _refuse_other_state(optimizer, trained)

    averaging = ExpertWeightAveraging.of(optimizer)
    if averaging is not None:
        averaging.begin_step(optimizer, held)
    for layer in trained:
        layer.has_stepped = True
    _warn_of_eval_mode(optimizer, trained)
    _warn_without_averaging(optimizer, layers, held)
    _warn_of_flat_biases(optimizer, layers)

    end_forwards(optimizer, trained, others)
    if any(layer.router.balancing_bias is not None for layer in only_recording(trained)):
        balancing.begin_step(optimizer)


def _refuse_older(layers: list[MoeMlp], held: set[int]) -> None:
    """Refuse an optimizer that holds the parameters whose place experts took, but not the experts.

    Raises:
        ValueError: if the optimizer is so.
    """
    for layer in layers:
        replaced = [reference() for reference in layer.replaced]
        holds_replaced = any(
            parameter is not None and id(parameter) in held for parameter in replaced
        )
        if not holds_replaced or layers_of_trained_experts(held, [layer]):
            continue
        if any(stacked.requires_grad for _, stacked in layer.named_expert_parameters()):
            raise ValueError(
                f"This optimizer is older than the experts in {layer.path}: it holds the weights "
                "whose place they took, and would leave them untrained. Create it from the model's "
                "parameters after convert_to_moe and parallelize_experts."
            )


def _refuse_other_state(optimizer: Optimizer, trained: list[MoeMlp]) -> None:
    """Refuse an optimizer whose loaded state is the dense model's, or of another number of experts.

    Fused steps would write beyond the end of its tensors.

    Raises:
        ValueError: if the state is so.
    """
    attributes = vars(optimizer)
    # torch loads a state into a new object, so each object is looked at once.
    if attributes.get("_timm_moe_checked") is optimizer.state:
        return
    attributes["_timm_moe_checked"] = optimizer.state
    for stacked in (stacked for layer in trained for _, stacked in layer.named_expert_parameters()):
        # ZeroRedundancyOptimizer has None for parameters of other processes.
        state = optimizer.state.get(stacked) or {}
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        if moment is None or moment.shape == stacked.shape:
            continue
        is_dense = moment.shape == stacked.shape[1:]
        if is_dense or moment.shape[1:] == stacked.shape[1:]:
            other = (
                "a dense model, not of its" if is_dense else f"{len(moment)}, not of {len(stacked)}"
            )
            raise ValueError(
                f"The optimizer's state that was loaded is that of {other} experts: begin with a "
                "new one (train.py --no-resume-opt)."
            )


def _warn_of_eval_mode(optimizer: Optimizer, trained: list[MoeMlp]) -> None:
    """Warn once of experts that are trained in eval mode, where they work as in evaluation.

    transformers' ``from_pretrained`` returns a model in eval mode, and Lightning leaves it there.
    """
    names = [
        layer.path
        for layer in trained
        if not layer.training
        and any(
            stacked.requires_grad and stacked.grad is not None
            for _, stacked in layer.named_expert_parameters()
        )
    ]
    if names and is_first_time(optimizer, "eval mode"):
        _logger.warning(
            f"The experts in {', '.join(names)} are trained in eval mode, where EWA's experts "
            "compute their mean and stay alike, and routers have no losses: call model.train() "
            "before the training."
        )


def _warn_without_averaging(optimizer: Optimizer, layers: list[MoeMlp], held: set[int]) -> None:
    """Warn once of experts that have a share rate and are trained, but not averaged."""
    # The step may be a part of another optimizer's step, which averages.
    averagings = [each for each in living(ExpertWeightAveraging) if each.follows(optimizer)]
    averaged = {id(layer) for averaging in averagings for layer in averaging.layers()}
    left_out = [layer for layer in layers if layer.share_rate and id(layer) not in averaged]
    if not left_out:
        return
    flat = [layer for layer in left_out if _is_flat(layer)]
    trained = layers_of_trained_experts(held, left_out)
    names = [layer.path for layer in (*trained, *flat)]
    if names and is_first_time(optimizer, "not averaged"):
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, though they have a "
            f"share rate (in {', '.join(names)}). Make a timm_moe.ExpertWeightAveraging(model, "
            "optimizer, total_updates=...), pass updates_per_epoch to timm's create_scheduler_v2, "
            "or give Hugging Face's Trainer or Lightning an ExpertCallback of "
            "timm_moe.integrations. If you call average_experts_ yourself, want no averaging, or "
            "train adapters, set share_rate=0. If FullyShardedDataParallel holds them in flat "
            "pieces, take fully_shard (FSDP2) with timm_moe.expert_placement."
        )


def _warn_of_flat_biases(optimizer: Optimizer, layers: list[MoeMlp]) -> None:
    """Warn once of balancing biases whose routers FSDP1 holds in flat pieces."""
    names = [
        layer.path
        for layer in only_recording(layers)
        if layer.router.balancing_bias is not None and _is_flat(layer)
    ]
    if names and is_first_time(optimizer, "flat biases"):
        _logger.warning(
            f"The balancing biases in {', '.join(names)} do not move, as FullyShardedDataParallel "
            "holds the layers in flat pieces: take fully_shard (FSDP2)."
        )


def _is_flat(layer: MoeMlp) -> bool:
    """Tell if FSDP1 has left a layer no parameter, so nobody knows which optimizer trains it."""
    return next(layer.parameters(), None) is None
