"""Checks before each optimizer step: expert layers that it would train wrongly, or that nothing averages."""

import logging
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..layers import MoeMlp
from ..layers.living import living
from .averaging import ExpertWeightAveraging
from .optimizers import is_first_time, layers_of_trained_experts, parameter_ids, trained_layers

_logger = logging.getLogger(__name__)


@torch.compiler.disable  # the step of an optimizer may be compiled
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check the expert layers of this process against an optimizer; a pre-hook of every optimizer's step.

    Raises:
        ValueError: if the optimizer, or the state that it loaded, belongs to the dense model.
    """
    layers = living(MoeMlp)
    for layer in trained_layers(optimizer, layers):
        layer.forwards_since_step = 0
    if layers:
        _warn_without_averaging(optimizer, layers)
        _refuse_dense_optimizer(optimizer, layers)


def _warn_without_averaging(optimizer: Optimizer, layers: list[MoeMlp]) -> None:
    """Warn once of experts that have a share rate and are trained, but not averaged."""
    averaged = {id(layer) for averaging in ExpertWeightAveraging.during(optimizer) for layer in averaging.layers()}
    left_out = [layer for layer in layers if layer.share_rate and id(layer) not in averaged]
    names = [layer.path or "an expert layer" for layer in layers_of_trained_experts(optimizer, left_out)]
    if names and is_first_time(optimizer, "not averaged"):
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, though they have a share rate (in "
            f"{', '.join(names)}). Make a timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=...), pass "
            "updates_per_epoch to timm's create_scheduler_v2, or give Hugging Face's Trainer or Lightning an "
            "ExpertCallback of timm_moe.integrations. If you call average_experts_ yourself, want no averaging, "
            "or train adapters, set share_rate=0."
        )
    experts = (stacked for layer in left_out for _, stacked in layer.named_expert_parameters())
    in_pieces = not all(isinstance(stacked, nn.Parameter) for stacked in experts)
    flat = getattr(sys.modules.get("torch.distributed.fsdp"), "FlatParameter", ())  # nobody uses it unless imported
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    is_flat = not names and in_pieces and any(isinstance(parameter, flat) for parameter in held)
    if is_flat and is_first_time(optimizer, "not averaged"):
        _logger.warning(
            "EWA: nothing averages the experts, since FullyShardedDataParallel holds them in flat pieces: take "
            "fully_shard (FSDP2) with timm_moe.expert_placement, or set share_rate=0."
        )


def _refuse_dense_optimizer(optimizer: Optimizer, layers: list[MoeMlp]) -> None:
    held, trained = parameter_ids(optimizer), layers_of_trained_experts(optimizer, layers)
    for layer in layers:
        is_frozen = not any(stacked.requires_grad for _, stacked in layer.named_expert_parameters())
        replaced = any(id(parameter) in held for reference in layer.replaced if (parameter := reference()) is not None)
        if replaced and not is_frozen and layer not in trained:
            raise ValueError(
                f"This optimizer is older than the experts in {layer.path}: it holds the dense weights whose place "
                "they took, and would leave them untrained. Create it from the model's parameters after convert_to_moe."
            )
    for layer in trained:
        for _, stacked in layer.named_expert_parameters():
            state = optimizer.state.get(stacked) or {}  # ZeroRedundancyOptimizer has None for other processes' parts
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if moment is not None and moment.shape == stacked.shape[1:]:
                raise ValueError(
                    "The optimizer's state that was loaded is that of a dense model, not of its experts: begin with a "
                    "new one (train.py --no-resume-opt)."
                )
