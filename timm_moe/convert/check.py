"""Check that a network can become experts: it holds its weights, and treats each of a few rows independently."""

import contextlib
import copy
from collections.abc import Iterator

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.gemma4_vit import Gemma4GatedMlp
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..layers import Experts, MoeMlp
from .split import ResidualFfn, SplitFfn

#: timm's feed-forward networks, which are known to treat rows independently.
FFN_CLASSES: tuple[type, ...] = (Mlp, GluMlp, SwiGLU, NormMlp, GeGluMlp, Gemma4GatedMlp)

#: Beginnings of the names of classes that treat rows independently in both modes.
_KNOWN = (
    *(f"torch.nn.modules.{name}" for name in ("activation.", "container.", "dropout.", "linear.")),
    *(f"torch.nn.modules.normalization.{name}" for name in ("LayerNorm", "RMSNorm")),
    *(f"timm.layers.{name}" for name in ("activations", "norm.LayerNorm", "norm.RmsNorm")),
    "timm.models.metaformer.StarReLU",
)
#: Hooks that compute a weight before each forward, and what takes them off.
_HOOKS: dict[type, str] = {
    WeightNorm: "torch.nn.utils.remove_weight_norm",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm",
    prune.BasePruningMethod: "torch.nn.utils.prune.remove",
}
#: Largest difference between a row's outputs in two batches, relative to the largest output: float32 rounding.
TOLERANCE = 1e-4


def check_network(model: nn.Module, path: str, network: nn.Module) -> None:
    """Raise ValueError, with the network's name in the model, unless the network can become experts."""
    reason = _unfit(model, network) or _mixing(network)
    if reason:
        parts = " with ".join(network._modules) if isinstance(network, SplitFfn) else f"a {type(network).__name__}"
        raise ValueError(f"{path}, {parts}, cannot become experts: {reason}.")


def is_known(network: nn.Module) -> bool:
    """Tell if a network and its parts are of well-known classes, so that it need not be tried on rows."""
    return type(network) in FFN_CLASSES and all(map(_is_known_part, network.modules()))


def _is_known_part(part: nn.Module) -> bool:
    kind = type(part)
    if hasattr(part, "dim") or kind.forward.__module__ != kind.__module__:  # a softmax over rows, a patched class
        return False
    return kind in FFN_CLASSES or f"{kind.__module__}.{kind.__qualname__}".startswith(_KNOWN)


def check_weights(path: str, network: nn.Module) -> None:
    """Raise ValueError, with the remedy, if a part of a network computes its weights from others or has adapters.

    Each of these tensors would be stacked and averaged by itself, or the old weights would be used.
    """
    prefix = path.rpartition(".")[0] if isinstance(network, SplitFfn) else path
    for name, module in network.named_modules():
        found = computed_by(module)
        if found:
            what, remedy = found
            raise ValueError(f"{f'{prefix}.{name}'.strip('.')} {what}, so it cannot become experts: {remedy} first.")


def computed_by(module: nn.Module) -> tuple[str, str] | None:
    """Say what computes the weights of a module and what ends it, or return None."""
    if type(module).__module__.partition(".")[0] in ("peft", "adapters") or hasattr(module, "lora_A"):
        return "has adapters", "merge them by model = model.merge_and_unload()"
    if parametrize.is_parametrized(module):
        return "is parametrized", "take that off by torch.nn.utils.parametrize.remove_parametrizations"
    if "forward" in vars(module):
        return "has a forward bound to it", "take that off (accelerate.hooks.remove_hook_from_submodules)"
    for hook in module._forward_pre_hooks.values():
        for kind, remove in _HOOKS.items():
            if isinstance(hook, kind):
                return f"has a hook that computes its weights ({type(hook).__name__})", f"take that off by {remove}"
    return None


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
    for name, value in _python_attributes(network):
        values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(x, nn.Module) or (isinstance(x, Tensor) and x.requires_grad) for x in values):
            return f"it holds weights in {name}, where torch does not see them, so experts would not either"
    own, first = {id(parameter) for parameter in network.parameters()}, {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and name not in first:
            return f"it is used twice, since its weights are also called {name}"
    return None


@torch.no_grad()
def _mixing(network: nn.Module) -> str | None:
    """Return what is wrong with a network's outputs of a few rows, in eval mode or in training.

    The weights are random: ones at or near zero would hide that rows mix. Dropout is left out.
    """
    width, place = row_width(network), next(network.parameters()).device
    place = torch.device("cpu") if place.type == "meta" else place
    with place, torch.random.fork_rng([place] if place.type == "cuda" else []):
        probe = copy.deepcopy(network).float()
        if next(probe.parameters()).is_meta:
            probe = probe.to_empty(device=place)
        generator = torch.Generator("cpu").manual_seed(0)
        for weight in probe.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, device="cpu") / width**0.5)
        for module in probe.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and "drop" in f"{type(module).__name__}.{name}".lower():
                    vars(module)[name] = 0.0
        x = torch.randn(4, width, generator=generator, device="cpu").to(place)
        experts = Experts(probe, 2, "independent")
        for training in (False, True):
            state = _state(probe)
            try:
                reason = _wrong_rows(probe.train(training), x) or _wrong_expert(probe, experts.train(training), x)
            except Exception as error:  # a foreign network may raise anything
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                reason = f"it cannot be called with rows (n, width) alone, here {tuple(x.shape)} ({line})"
            if reason:
                return reason + " in training mode" * training
            changed = next((name for name, value in _state(probe).items() if state.get(name) != value), None)
            if changed:
                return f"its forward changes {changed}, which each expert would have to have for itself"
    return None


def _wrong_rows(network: nn.Module, x: Tensor) -> str | None:
    """Return what is wrong with a network's outputs of rows (4, D)."""
    y = network(x)
    if not isinstance(y, Tensor):
        return f"it returns a {type(y).__name__} and not a tensor"
    if y.shape[:-1] != x.shape[:-1]:
        return f"it makes {tuple(y.shape)} of rows of shape {tuple(x.shape)}, which changes their number"
    if not _equal(network(x), y):
        return _mixes_random_rows(network, x) if network.training else "its outputs are random in eval mode"
    if isinstance(network, ResidualFfn) and not network.adds_the_residual(x):
        return "its last part does more with the residual than to add it"
    order = torch.tensor([2, 0, 3, 1], device=x.device)
    parts = torch.cat([network(part) for part in x.split(2)])
    if not (_equal(network(x[order]), y[order]) and _equal(parts, y)):
        return "it mixes rows, so what it makes of a token depends on the others"
    if not _equal(network(x.view(2, 2, -1)), y.view(2, 2, -1)):
        return "it mixes rows, so what it makes of a token depends on how many there are of each image"
    return None


def _wrong_expert(network: nn.Module, experts: Experts, x: Tensor) -> str | None:
    """Compare a network, if its outputs are not random, with the first of its experts."""
    y = network(x[:2])
    try:
        is_right = not _equal(network(x[:2]), y) or _equal(experts.run(x, torch.tensor([2, 4], device=x.device))[:2], y)
    except Exception:  # a module that it reaches otherwise than as its submodule has no weights there
        is_right = False
    return (
        None if is_right else "an expert would not compute the same, as it does not find all weights in its submodules"
    )


def _mixes_random_rows(network: nn.Module, x: Tensor) -> str | None:
    """Look at the derivatives of the first row's outputs, as two forwards cannot be compared."""
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(leaf)[0].square().sum(), leaf, allow_unused=True)
    is_mixed = gradient is not None and gradient[1:].any()
    return "it mixes rows, so what it makes of a token depends on the others" if is_mixed else None


def _python_attributes(network: nn.Module, shared: bool = True) -> Iterator[tuple[str, object]]:
    """List what the modules hold that torch does not know of, by name; or leave out modules that experts share."""
    of_torch = vars(nn.Module()).keys()
    for path, module in network.named_modules():
        if shared or next(module.parameters(), None) is not None:
            for name in vars(module).keys() - of_torch:
                yield f"{path}.{name}".strip("."), vars(module)[name]


def _state(network: nn.Module) -> dict[str, str]:
    """Describe what the modules with weights hold beside tensors."""
    return {name: repr(value) for name, value in _python_attributes(network, shared=False)}


def _equal(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * expected.abs().max().item()
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=0, atol=tolerance, equal_nan=True)
