"""Trial of a feed-forward network on the meta device, where rows have no values and no cost."""

import contextlib
import copy
from typing import Any, NamedTuple

import torch
from torch import nn


class Probe(NamedTuple):
    """Result of a trial of a network on rows.

    Attributes:
        width: D, the width of the rows that it takes; 0 if it has no linear layers.
        linear: copies of its linear layers on the meta device by their names, in the order of their
            calls. They are as declared if the network calls none, or cannot run there.
    """

    width: int
    linear: dict[str, nn.Linear]


def without_values(network: nn.Module) -> nn.Module:
    """Copy a network, with its parameters on the meta device."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in network.parameters()
    }
    return copy.deepcopy(network, memo)


def probe(network: nn.Module) -> Probe:
    """Run a copy of a network on rows of each width that one of its linear layers takes.

    A network may declare its layers in any order.
    """
    network = without_values(network).eval()
    declared = {
        name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)
    }
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
