"""The mean of a layer's experts, kept from one evaluation to the next as long as their weights are the same.

Torch counts the changes of a parameter, but not those by ``parameter.data``, by which averages of weights (EMA) and
merged adapters are often written. So some entries are compared as well. On a GPU the host would have to wait for them:
there nothing is kept.
"""

import math
import weakref
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .scripting import in_plain_operators

#: Entries of a tensor that are compared.
_SAMPLE = 128


class _Source(NamedTuple):
    """What tells whether a parameter is still what it was."""

    identity: int
    version: int
    address: int
    sample: list[float]

    @classmethod
    def of(cls, stacked: Tensor) -> "_Source":
        flat = stacked.detach().flatten()
        return cls(id(stacked), stacked._version, stacked.data_ptr(), flat[:: _stride(len(flat))].tolist())


def _stride(numel: int) -> int:
    """Of some ``_SAMPLE`` entries, in all columns and rows: it shares no factor with the widths of the tensor."""
    return next(stride for stride in range(max(1, numel // _SAMPLE), 0, -1) if math.gcd(stride, numel) == 1)


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

    A change of few entries by ``parameter.data`` may not be seen before :func:`forget`.

    Args:
        layer: whose they are.
        weights: what its experts compute with, by name.
    """
    if torch.compiler.is_compiling() or in_plain_operators():  # part of a graph
        return _means(weights)
    if torch.is_grad_enabled() or not all(map(_is_own, weights.values())):
        forget(layer)
        return _means(weights)
    kept = _kept.get(layer)
    sources = [_Source.of(stacked) for stacked in weights.values()]
    if kept is None or kept.sources != sources:
        with torch.inference_mode(False), torch.no_grad():  # for whoever comes next
            kept = _Kept(sources, _means(weights))
        if all(type(mean) is Tensor for mean in kept.means.values()):  # and not one without values
            _kept[layer] = kept
    return kept.means


def forget(layer: nn.Module) -> None:
    """The weights may have changed."""
    _kept.pop(layer, None)


def _means(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: mean_over_experts(stacked) for name, stacked in weights.items()}


def _is_own(stacked: Tensor) -> bool:
    """Whether it is a parameter, whose changes are counted, and not what stands for one: adapters, replicas, ..."""
    return type(stacked) is nn.Parameter and stacked.device.type == "cpu" and not stacked.is_inference()
