"""The mean of a layer's experts, kept from one evaluation to the next as long as their weights are the same."""

import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .scripting import in_plain_operators


class _Source(NamedTuple):
    """What tells whether a parameter is still what it was."""

    parameter: "weakref.ref[Tensor]"
    version: int
    address: int


class _Kept(NamedTuple):
    sources: list[_Source]
    means: dict[str, Tensor]


#: By layer, and outside of it: copies, pickles and state dicts know nothing of it.
_kept: "weakref.WeakKeyDictionary[nn.Module, _Kept]" = weakref.WeakKeyDictionary()


def mean_over_experts(stacked: Tensor) -> Tensor:
    """Mean over the first dimension, taken in float32 at least and returned in the dtype of ``stacked``."""
    return stacked.mean(0, dtype=torch.promote_types(stacked.dtype, torch.float32)).to(stacked.dtype)


def means_of(layer: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mean of each stacked tensor; the same tensors as at the last call, if nothing has changed since.

    A change by ``parameter.data`` is not seen before :func:`forget`: torch does not count it.

    Args:
        layer: whose they are.
        weights: what its experts compute with, by name.
    """
    if not _can_be_kept(weights):
        forget(layer)
        return {name: mean_over_experts(stacked) for name, stacked in weights.items()}
    kept = _kept.get(layer)
    sources = [_Source(weakref.ref(stacked), stacked._version, stacked.data_ptr()) for stacked in weights.values()]
    if kept is None or kept.sources != sources:
        with torch.inference_mode(False), torch.no_grad():  # for whoever comes next
            kept = _Kept(sources, {name: mean_over_experts(stacked) for name, stacked in weights.items()})
        if all(type(mean) is Tensor for mean in kept.means.values()):  # and not one without values
            _kept[layer] = kept
    return kept.means


def forget(layer: nn.Module) -> None:
    """The weights may have changed."""
    _kept.pop(layer, None)


def _can_be_kept(weights: Mapping[str, Tensor]) -> bool:
    """Not in a graph, and not of what stands for the parameters: adapters, replicas, what torch.func puts in."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or in_plain_operators():
        return False
    return all(type(stacked) is nn.Parameter and not stacked.is_inference() for stacked in weights.values())
