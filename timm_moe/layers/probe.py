"""Width of the rows of a feed-forward network, and its linear layers in order.

A network of unknown kind is tried on the meta device, where rows have no values.
"""

import contextlib
import copy
from typing import Any, NamedTuple

import torch
from torch import nn


class Probe(NamedTuple):
    """Result of a trial of a network on rows.

    Attributes:
        width: D, the width of the rows that it takes; 0 if it has no linear layers.
        linear: its linear layers, or copies of them, by their names, in the order of their calls.
            They are as declared if the network calls none, or cannot run on the meta device.
    """

    width: int
    linear: dict[str, nn.Linear]


def without_values(network: nn.Module) -> nn.Module:
    """Copy a network, with its parameters on the meta device."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def is_timms_mlp(network: nn.Module) -> bool:
    """Tell if a network's class is one of timm's.

    These begin and end with a linear layer, and declare their layers in the order of their calls.
    They are known by their module, since this package of layers imports no timm.
    """
    return type(network).__module__ == "timm.layers.mlp"


def linear_layers(network: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a network by name, as declared."""
    return {
        name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)
    }


def probe(network: nn.Module) -> Probe:
    """Find the linear layers that a network calls, and the width of its rows.

    A network that is not timm's may declare its layers in any order. A copy of it runs on rows of
    each width that one of its linear layers takes.
    """
    if is_timms_mlp(network):
        declared = linear_layers(network)
        return Probe(next((module.in_features for module in declared.values()), 0), declared)

    network = without_values(network).eval()
    declared = linear_layers(network)
    names = {module: name for name, module in declared.items()}
    called: dict[str, nn.Linear] = {}

    def note(module: Any, _: Any) -> None:
        called[names[module]] = module

    for module in declared.values():
        module.register_forward_pre_hook(note)
    widths = dict.fromkeys(module.in_features for module in declared.values())
    for width in widths:
        called.clear()
        with contextlib.suppress(Exception):  # a foreign network may raise anything
            dtype = next(network.parameters()).dtype
            network(torch.empty(2, width, device="meta", dtype=dtype))
            return Probe(width, called or declared)
    return Probe(next(iter(widths), 0), declared)
