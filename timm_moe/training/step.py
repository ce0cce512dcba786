"""Hooks around every optimizer step of the process: all of it begins in :func:`before_step`.

========  ==============================================================================================
before    experts that the optimizer does not know, or whose state is a dense model's, are refused
          router losses that nobody added are refused; else the routers are cleared
          experts that have a share rate and nothing averages are told of
after     the experts are averaged, see :mod:`timm_moe.training.averaging`
          balancing biases move by the choices since the last step
========  ==============================================================================================
"""

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from ..layers import MoeMlp
from ..layers.living import living
from .averaging import ExpertWeightAveraging
from .balancing import after_step
from .optimizers import is_first_time, layers_of_trained_experts, parameter_ids, trained_layers
from .router_losses import end_forwards, routed

_logger = logging.getLogger(__name__)


@torch.compiler.disable  # the step of an optimizer may be compiled
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Do what is due before a step; a pre-hook of every optimizer's step.

    Raises:
        ValueError: if the optimizer or its state belongs to the dense model, or the experts cannot
            be averaged.
        RuntimeError: if losses of routers that it trains wait.
    """
    layers = living(MoeMlp)
    if layers:
        _begin_step(optimizer, layers)


def _begin_step(optimizer: Optimizer, layers: list[MoeMlp]) -> None:
    held = parameter_ids(optimizer)
    trained = trained_layers(optimizer, layers, held)
    others = [layer for layer in layers if layer not in trained]
    _refuse_older(optimizer, layers, held)
    _refuse_dense_state(optimizer, trained)
    averaging = ExpertWeightAveraging.of(optimizer)
    if averaging is not None:
        averaging.begin_step(optimizer, held)
    for layer in trained:
        layer.calls_since_step = 0
    _warn_without_averaging(optimizer, averaging, layers)
    end_forwards(optimizer, trained, others)
    has_biases = any(layer.router.balancing_bias is not None for layer in routed(trained))
    if has_biases and is_first_time(optimizer, "balancing"):
        optimizer.register_step_post_hook(after_step)


def _refuse_older(optimizer: Optimizer, layers: list[MoeMlp], held: set[int]) -> None:
    """Raise ValueError if an optimizer holds weights of a dense network whose place experts took, and not these."""
    for layer in layers:
        replaced = any(
            id(parameter) in held
            for reference in layer.replaced
            if (parameter := reference()) is not None
        )
        if not replaced or layers_of_trained_experts(optimizer, [layer], held):
            continue
        if any(stacked.requires_grad for _, stacked in layer.named_expert_parameters()):
            raise ValueError(
                f"This optimizer is older than the experts in {layer.path}: it holds the weights "
                "whose place they took, and would leave them untrained. Create it from the model's "
                "parameters after convert_to_moe and parallelize_experts."
            )


def _refuse_dense_state(optimizer: Optimizer, trained: list[MoeMlp]) -> None:
    """Raise ValueError if the state that an optimizer loaded belongs to the dense model."""
    attributes = vars(optimizer)
    # Torch loads a state into another object.
    if attributes.get("_timm_moe_checked") is optimizer.state:
        return
    attributes["_timm_moe_checked"] = optimizer.state
    for stacked in (stacked for layer in trained for _, stacked in layer.named_expert_parameters()):
        # ZeroRedundancyOptimizer has None for other processes' parts.
        state = optimizer.state.get(stacked) or {}
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        # Fused steps would write beyond its end.
        if moment is not None and moment.shape == stacked.shape[1:]:
            raise ValueError(
                "The optimizer's state that was loaded is that of a dense model, not of its "
                "experts: begin with a new one (train.py --no-resume-opt)."
            )


def _warn_without_averaging(
    optimizer: Optimizer, own: ExpertWeightAveraging | None, layers: list[MoeMlp]
) -> None:
    """Warn once of experts that have a share rate and are trained, but not averaged."""
    # The step may be a part of another optimizer's.
    averagings = [
        each for each in living(ExpertWeightAveraging) if each is own or each.is_in_a_step()
    ]
    averaged = {id(layer) for averaging in averagings for layer in averaging.layers()}
    left_out = [layer for layer in layers if layer.share_rate and id(layer) not in averaged]
    if not left_out:
        return
    flat = [layer for layer in left_out if next(layer.parameters(), None) is None]
    names = [
        layer.path or "an expert layer"
        for layer in (*layers_of_trained_experts(optimizer, left_out), *flat)
    ]
    # torch makes an optimizer's state by a step at rate 0. The rate may be on a GPU: ask only where
    # it matters.
    is_due = names and any(group.get("lr") != 0 for group in optimizer.param_groups)
    if is_due and is_first_time(optimizer, "not averaged"):
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, though they have a "
            f"share rate (in {', '.join(names)}). Make a timm_moe.ExpertWeightAveraging(model, "
            "optimizer, total_updates=...), pass updates_per_epoch to timm's create_scheduler_v2, "
            "or give Hugging Face's Trainer or Lightning an ExpertCallback of "
            "timm_moe.integrations. If you call average_experts_ yourself, want no averaging, or "
            "train adapters, set share_rate=0. If FullyShardedDataParallel holds them in flat "
            "pieces, take fully_shard (FSDP2) with timm_moe.expert_placement."
        )
