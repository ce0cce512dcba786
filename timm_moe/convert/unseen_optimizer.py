"""A warning of experts that an optimizer trains which this package does not see.

The package acts at the steps of torch's optimizers. An optimizer of copies of the parameters, or
one that is not torch's, takes none. Calls of a part of the model, such as ``forward_features``, are
not counted; ``forward_intermediates`` is.
"""

import warnings
from typing import Any

import torch
from torch import nn

from ..layers import MoeMlp
from ..layers.living import find

#: Number of training forwards of a model after which steps are looked for, each time. No
#: accumulation of gradients is so long: a batch of 4,096 images may take 256.
MOST_FORWARDS = 1024


def count_forward(model: nn.Module, *args: Any) -> None:
    """Warn once if no known optimizer trains a model's experts, and nobody averages or balances.

    This is a forward pre-hook of the model.
    """
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return
    state = vars(model)
    state["forwards_counted"] = state.get("forwards_counted", 0) + 1
    if state["forwards_counted"] != MOST_FORWARDS:
        return
    layers = find(MoeMlp, model)
    if any(layer.has_stepped for layer in layers):
        state["forwards_counted"] = 0
        for layer in layers:
            layer.has_stepped = False
        return
    remedies = dict.fromkeys(remedy for layer in layers for remedy in _remedies(layer))
    if remedies:
        warnings.warn(
            f"Experts ran forward {MOST_FORWARDS} times in training mode, and no torch optimizer "
            "that holds their parameters took a step. If another optimizer trains them, such as "
            f"one of copies, {', and '.join(remedies)}; if none does, call eval() on the model.",
            stacklevel=2,
        )


def _remedies(layer: MoeMlp) -> list[str]:
    """Return what a user must do if an optimizer that nobody sees trains a layer."""
    remedies = []
    experts = [stacked for _, stacked in layer.named_expert_parameters()]
    are_trained = any(
        isinstance(stacked, nn.Parameter) and stacked.requires_grad for stacked in experts
    )
    if layer.share_rate and not layer.is_averaged_by_hand and are_trained:
        remedies.append(
            "call timm_moe.average_experts_(model, rate) after each step, or set share_rate=0"
        )
    totals = getattr(layer.router, "totals", None)
    if totals is not None and totals.lost and not totals.forwards:
        remedies.append("add timm_moe.auxiliary_loss(model) to the loss after each forward")
    bias = getattr(layer.router, "balancing_bias", None)
    is_trained = any(parameter.requires_grad for parameter in layer.router.parameters())
    if bias is not None and is_trained and not bias.steps.any():
        remedies.append(
            "call bias.update(bias.load) of each router's balancing_bias after each step"
        )
    return remedies
