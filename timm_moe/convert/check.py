"""Check on a few rows that a network treats each row independently, so that it can become experts."""

import contextlib
import copy

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn

from ..layers import MoeMlp
from .split import ResidualFfn, SplitFfn

#: timm's feed-forward networks, which are known to treat rows independently; older versions of timm have fewer.
FFN_CLASSES: tuple[type, ...] = (Mlp, GluMlp, SwiGLU, NormMlp, GeGluMlp)
with contextlib.suppress(ImportError):
    from timm.models.gemma4_vit import Gemma4GatedMlp

    FFN_CLASSES += (Gemma4GatedMlp,)

#: Largest difference between a row's outputs in two batches, relative to the largest output: float32 rounding.
TOLERANCE = 1e-4


def check_network(model: nn.Module, path: str, network: nn.Module) -> None:
    """Raise ValueError, with the network's name in the model, unless the network can become experts."""
    reason = _unfit(model, network) or _mixing(network)
    if reason:
        parts = " with ".join(network._modules) if isinstance(network, SplitFfn) else f"a {type(network).__name__}"
        raise ValueError(f"{path}, {parts}, cannot become experts: {reason}.")


def row_width(network: nn.Module) -> int:
    """Return D, the width of the rows that a network takes: the input width of its first linear layer."""
    widths = dict.fromkeys(module.in_features for module in network.modules() if isinstance(module, nn.Linear))
    if type(network) in FFN_CLASSES:
        return next(iter(widths))
    # A foreign network may name its layers in any order: try the widths on the meta device.
    memo: dict[int, object] = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in network.parameters()}
    probe = copy.deepcopy(network, memo).eval()
    for width in widths:
        with contextlib.suppress(Exception):  # a foreign network may raise anything
            probe(torch.empty(2, width, device="meta", dtype=next(probe.parameters()).dtype))
            return width
    return next(iter(widths))


def _unfit(model: nn.Module, network: nn.Module) -> str | None:
    if any(isinstance(module, MoeMlp) for module in network.modules()):
        return "it is an expert layer already, or holds one"
    buffer = next(iter(network.named_buffers()), None)
    if buffer is not None:
        return f"it holds a buffer ({buffer[0]}), of which experts would need one each"
    if next(network.parameters(), None) is None:
        return "it has no parameters"
    if not any(isinstance(module, nn.Linear) for module in network.modules()):
        return "it has no torch.nn.Linear that tells the width of its rows"
    own, first = {id(parameter) for parameter in network.parameters()}, {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and name not in first:
            return f"it is used twice, since its weights are also called {name}"
    return None


@torch.no_grad()
def _mixing(network: nn.Module) -> str | None:
    """Return what is wrong with a network's outputs of a few rows in eval mode.

    The weights are random: ones at or near zero would hide that rows mix.
    """
    width, generator = row_width(network), torch.Generator().manual_seed(0)
    probe = copy.deepcopy(network).eval().float()
    if next(probe.parameters()).is_meta:
        probe = probe.to_empty(device="cpu")
    for weight in probe.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) / width**0.5)
    x = torch.randn(4, width, generator=generator).to(next(probe.parameters()).device)
    try:
        y = probe(x)
        if not isinstance(y, Tensor):
            return f"it returns a {type(y).__name__} and not a tensor"
        if y.shape[:-1] != x.shape[:-1]:
            return f"it makes {tuple(y.shape)} of rows of shape {tuple(x.shape)}, which changes their number"
        if not _equal(probe(x), y):
            return "its outputs are random in eval mode"
        if isinstance(probe, ResidualFfn) and not probe.adds_the_residual(x):
            return "its last part does more with the residual than to add it"
        order = torch.tensor([2, 0, 3, 1], device=x.device)
        parts = torch.cat([probe(part) for part in x.split(2)])
        if not (_equal(probe(x[order]), y[order]) and _equal(parts, y)):
            return "it mixes rows, so what it makes of a token depends on the others"
        if not _equal(probe(x.view(2, 2, width)), y.view(2, 2, -1)):
            return "it mixes rows, so what it makes of a token depends on how many there are of each image"
    except Exception as error:  # a foreign network may raise anything
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"it cannot be called with rows (n, width) alone, here {tuple(x.shape)} ({line})"
    return None


def _equal(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * expected.abs().max().item()
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=0, atol=tolerance, equal_nan=True)
