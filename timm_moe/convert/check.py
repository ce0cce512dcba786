"""Check that a network can become experts: it holds its weights, and treats each of a few rows independently."""

import contextlib
import copy

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ..layers import Experts
from ..timm_classes import timm_classes
from .split import ResidualFfn, SplitFfn

#: timm's feed-forward networks, which are known to treat rows independently.
FFN_CLASSES: tuple[type, ...] = (
    *(Mlp, GluMlp, SwiGLU),
    *timm_classes("tiny_vit.NormMlp", "vitamin.GeGluMlp", "gemma4_vit.Gemma4GatedMlp"),
)

#: Beginnings of the names of classes that treat rows independently in both modes.
_KNOWN = (
    *(f"torch.nn.modules.{name}" for name in ("activation.", "container.", "dropout.", "linear.")),
    *(f"torch.nn.modules.normalization.{name}" for name in ("LayerNorm", "RMSNorm")),
    *(f"timm.layers.{name}" for name in ("activations", "norm.LayerNorm", "norm.RmsNorm")),
    "timm.models.metaformer.StarReLU",
)
#: Largest difference between a row's outputs in two batches, relative to the largest output:
#: float32 rounding.
TOLERANCE = 1e-4


def check_network(model: nn.Module, path: str, network: nn.Module) -> None:
    """Raise ValueError, with the network's name in the model, unless the network can become experts."""
    check_weights(path, network)
    reason = _unfit(model, network) or _mixing(network)
    if reason:
        parts = (
            " with ".join(network._modules)
            if isinstance(network, SplitFfn)
            else f"a {type(network).__name__}"
        )
        raise ValueError(f"{path}, {parts}, cannot become experts: {reason}.")


def is_known(network: nn.Module) -> bool:
    """Tell if a network and its parts are of well-known classes, so that it need not be tried on rows."""
    kinds = {type(part) for part in network.modules()}
    unknown = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds.difference(FFN_CLASSES))
    return type(network) in FFN_CLASSES and all(name.startswith(_KNOWN) for name in unknown)


def check_weights(path: str, network: nn.Module) -> None:
    """Raise ValueError, with the remedy, if a part of a network computes its weights from others or has adapters.

    Each of these tensors would be stacked and averaged by itself, or the old weights would be used.
    """
    prefix = path.rpartition(".")[0] if isinstance(network, SplitFfn) else path
    for name, module in network.named_modules():
        found = computed_by(module)
        if found:
            what, remedy = found
            raise ValueError(
                f"{f'{prefix}.{name}'.strip('.')} {what}, so it cannot become experts: {remedy} "
                "first."
            )


def computed_by(module: nn.Module) -> tuple[str, str] | None:
    """Say what computes the weights of a module and what ends it, or return None."""
    if type(module).__module__.partition(".")[0] in ("peft", "adapters") or hasattr(
        module, "lora_A"
    ):
        return "has adapters", "merge them by model = model.merge_and_unload()"
    if parametrize.is_parametrized(module):
        return (
            "is parametrized",
            "take that off by torch.nn.utils.parametrize.remove_parametrizations",
        )
    if "forward" in vars(module):
        return (
            "has a forward bound to it",
            "take that off (accelerate.hooks.remove_hook_from_submodules)",
        )
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm, prune.BasePruningMethod)):
            remedy = "take that off (torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove)"
            return f"has a hook that computes its weights ({type(hook).__name__})", remedy
    return None


def row_width(network: nn.Module) -> int:
    """Return D, the width of the rows that a network takes: the input width of the linear layer that it calls first.

    A network may name its layers in any order, so the widths are tried on the meta device.
    """
    widths = dict.fromkeys(
        module.in_features for module in network.modules() if isinstance(module, nn.Linear)
    )
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in network.parameters()
    }
    probe = copy.deepcopy(network, memo).eval()
    for width in widths:
        with contextlib.suppress(Exception):  # a foreign network may raise anything
            probe(torch.empty(2, width, device="meta", dtype=next(probe.parameters()).dtype))
            return width
    return next(iter(widths))


def _unfit(model: nn.Module, network: nn.Module) -> str | None:
    buffer = next(iter(network.named_buffers()), None)
    if buffer is not None:
        return f"it holds a buffer ({buffer[0]}), of which experts would need one each"
    if not any(isinstance(module, nn.Linear) for module in network.modules()):
        return "it has no torch.nn.Linear that tells the width of its rows"
    own, first = (
        {id(parameter) for parameter in network.parameters()},
        {name for name, _ in model.named_parameters()},
    )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in own and name not in first:
            return f"it is used twice, since its weights are also called {name}"
    return None


@torch.no_grad()
def _mixing(network: nn.Module) -> str | None:
    """Return what is wrong with a network's outputs of a few rows, in eval mode or in training.

    The weights are random: ones at or near zero would hide that rows mix.
    """
    width, device = row_width(network), next(network.parameters()).device
    device = device if device.type == "cuda" else torch.device("cpu")
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(device)

    with device, _same_draws(device):
        probe = copy.deepcopy(network).float().to_empty(device=device)
        for weight in probe.parameters():
            weight.copy_(random(*weight.shape) / width**0.5)
        experts = Experts(probe, 2, "independent")
        x = random(2, 2, width)
        for training in (False, True):
            try:
                reason = _wrong_rows(probe.train(training), x)
            except Exception as error:  # a foreign network may raise anything
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                reason = (
                    f"it cannot be called with rows (n, width) alone, here {(4, width)} ({line})"
                )
            if reason:
                return reason + " in training mode" * training
        return _wrong_expert(probe.eval(), experts.eval(), x)


def _wrong_rows(network: nn.Module, x: Tensor) -> str | None:
    """Return what is wrong with a network's outputs of two images of two rows, (2, 2, D)."""

    def outputs_of(x: Tensor) -> Tensor:
        with _same_draws(x.device):  # of dropout and noise
            return network(x)

    rows, others = x.flatten(0, 1), 1 - 2 * x.flatten(0, 1)
    others[1] = rows[1]
    y = outputs_of(rows)
    if not isinstance(y, Tensor):
        return f"it returns a {type(y).__name__} and not a tensor"
    if y.shape[:-1] != rows.shape[:-1]:
        return f"it makes {tuple(y.shape)} of rows of shape {tuple(rows.shape)}, which changes their number"
    if not _equal(outputs_of(others)[1], y[1]):
        return "it mixes rows, so what it makes of a token depends on the others"
    if network.training:  # where it may drop whole images at random
        return None
    if not _equal(outputs_of(x).flatten(0, 1), y):
        return (
            "it mixes rows, so what it makes of a token depends on how many there are of each image"
        )
    if isinstance(network, ResidualFfn) and not network.adds_the_residual(rows):
        return "its last part does more with the residual than to add it"
    return None if _equal(network(rows), network(rows)) else "its outputs are random in eval mode"


def _wrong_expert(network: nn.Module, experts: Experts, x: Tensor) -> str | None:
    """Compare a network with the first of its experts; one that calls a module by another way has no weights there."""
    rows, ends = x.flatten(0, 1), torch.tensor([2, 4], device=x.device)
    with contextlib.suppress(Exception):
        if _equal(experts.run(rows, ends)[:2], network(rows[:2])):
            return None
    return "an expert would not compute the same, as it does not find all weights in its submodules"


def _same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Put the random generator of a device back as it was at the beginning of the block."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _equal(actual: Tensor, expected: Tensor) -> bool:
    tolerance = TOLERANCE * expected.abs().max().item()
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=0, atol=tolerance, equal_nan=True
    )
