"""Checks that a network can become experts.

Such a network holds its weights itself and treats every row independently, which is tried on a few
rows.
"""

import contextlib
import copy
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import GluMlp, Mlp, SwiGLU
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm

from ..layers import Experts
from ..layers.probe import probe
from ..outputs import seeded
from ..timm_classes import timm_classes
from .split import ResidualFfn, SplitFfn

#: timm's feed-forward networks, which are known to treat rows independently.
FFN_CLASSES: tuple[type, ...] = (
    Mlp,
    GluMlp,
    SwiGLU,
    *timm_classes("tiny_vit.NormMlp", "vitamin.GeGluMlp", "gemma4_vit.Gemma4GatedMlp"),
)

#: Beginnings of the names of classes that treat rows independently in both modes.
_KNOWN = (
    "torch.nn.modules.activation.",
    "torch.nn.modules.container.",
    "torch.nn.modules.dropout.",
    "torch.nn.modules.linear.",
    "torch.nn.modules.normalization.LayerNorm",
    "torch.nn.modules.normalization.RMSNorm",
    "timm.layers.activations",
    "timm.layers.norm.LayerNorm",
    "timm.layers.norm.RmsNorm",
    "timm.models.metaformer.StarReLU",
)

#: Ends of the names of classes that drop whole images at random, in timm, transformers and
#: torchvision. Experts get rows that belong to no image.
_DROPS_IMAGES = ("DropPath", "StochasticDepth")

#: Largest difference between a row's outputs in two batches, relative to the largest output. It
#: leaves room for rounding in float32.
TOLERANCE = 1e-4


def names_in(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each module and parameter of a model, by its id."""
    names: dict[int, list[str]] = {}
    for name, part in (
        *model.named_modules(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ):
        names.setdefault(id(part), []).append(name)
    return names


def check_network(path: str, network: nn.Module, names: Mapping[int, list[str]]) -> None:
    """Refuse a network that cannot become experts.

    One whose weights are computed passes here: choosing it is an error (:func:`check_weights`).

    Args:
        path: name of the network in its model, for the message.
        network: the network.
        names: the names in its model (:func:`names_in`).

    Raises:
        ValueError: if the network cannot become experts; the message says why.
    """
    if any(map(computed_by, network.modules())):
        return
    reason = _unfit(network, names)
    if reason is None and not is_known(network):
        reason = _mixing(network)
    if reason:
        is_split = isinstance(network, SplitFfn)
        kind = " with ".join(network._modules) if is_split else f"a {type(network).__name__}"
        raise ValueError(f"{path}, {kind}, cannot become experts: {reason}.")


def is_known(network: nn.Module) -> bool:
    """Tell if a network and its parts are of known classes and need not be tried on rows."""
    kinds = {type(part) for part in network.modules()}
    unknown = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds.difference(FFN_CLASSES))
    return type(network) in FFN_CLASSES and all(name.startswith(_KNOWN) for name in unknown)


def drops_of_images(path: str, network: nn.Module) -> list[str]:
    """Return the names in the model of a network's parts that drop whole images in training."""
    return [
        _name_in_model(path, network, name)
        for name, module in network.named_modules()
        if type(module).__name__.endswith(_DROPS_IMAGES)
        and any(getattr(module, rate, 0) for rate in ("drop_prob", "p"))
    ]


def check_weights(path: str, network: nn.Module) -> None:
    """Refuse a network with adapters, or with a part that computes its weights from other tensors.

    Each of these tensors would be stacked and averaged by itself, or the old weights would be used.

    Raises:
        ValueError: if there is such a part; the message names the remedy.
    """
    for name, module in network.named_modules():
        found = computed_by(module)
        if found:
            what, remedy = found
            raise ValueError(
                f"{_name_in_model(path, network, name)} {what}, so it cannot become experts: "
                f"{remedy} first."
            )


def _name_in_model(path: str, network: nn.Module, name: str) -> str:
    """Return the name in the model of a part of a network."""
    prefix = path.rpartition(".")[0] if isinstance(network, SplitFfn) else path
    return f"{prefix}.{name}".strip(".")


def computed_by(module: nn.Module) -> tuple[str, str] | None:
    """Return what computes the weights of a module and its remedy, as two phrases, or None."""
    library = type(module).__module__.partition(".")[0]
    if library in ("peft", "adapters") or hasattr(module, "lora_A"):
        return "has adapters", "merge them by model = model.merge_and_unload()"
    if parametrize.is_parametrized(module):
        remedy = "take that off by torch.nn.utils.parametrize.remove_parametrizations"
        return "is parametrized", remedy
    if "forward" in vars(module):
        remedy = "take that off (accelerate.hooks.remove_hook_from_submodules)"
        return "has a forward bound to it", remedy
    hook = computing_hook(module)
    if hook is not None:
        what = f"has a hook that computes its weights ({type(hook).__name__})"
        remedies = "torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove"
        return what, f"take that off ({remedies})"
    return None


def computing_hook(module: nn.Module) -> Any:
    """Return the hook that computes the weights of a module before its forward, or None."""
    for hook in module._forward_pre_hooks.values():
        # WeightNorm is of a function that torch will remove.
        is_norm = isinstance(hook, SpectralNorm) or type(hook).__name__ == "WeightNorm"
        if is_norm or isinstance(hook, prune.BasePruningMethod):
            return hook
    return None


def _unfit(network: nn.Module, names: Mapping[int, list[str]]) -> str | None:
    """Return why a network's tensors cannot be stacked, or None."""
    buffer = next(iter(network.named_buffers()), None)
    if buffer is not None:
        return f"it holds a buffer ({buffer[0]}), of which experts would need one each"
    for module in network.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:  # It cannot be copied.
                return f"its attribute {name} is a tensor of an earlier forward: delete it first"
    if not any(isinstance(module, nn.Linear) for module in network.modules()):
        return "it has no torch.nn.Linear that tells the width of its rows"

    # Several blocks may have one known network, as in CoaT, but not a layer of it.
    places = names[id(network)] if is_known(network) else []
    for name, parameter in network.named_parameters():
        own = [f"{place}.{name}" for place in places] or names[id(parameter)][:1]
        others = [other for other in names[id(parameter)] if other not in own]
        if others:
            return f"it is used twice, since its weights are also called {others[0]}"
    return None


@torch.no_grad()
def _mixing(network: nn.Module) -> str | None:
    """Return what is wrong with a network's outputs of a few rows, in eval mode or in training.

    The rows go through a copy with random weights, since weights near zero would hide that rows
    mix.
    """
    width = probe(network).width
    device = next(network.parameters()).device
    if device.type != "cuda":
        device = torch.device("cpu")
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return numbers.to(device)

    with device, seeded(device):
        trial = copy.deepcopy(network).float().to_empty(device=device)
        for weight in trial.parameters():
            weight.copy_(random(*weight.shape) / width**0.5)
        experts = Experts(trial, 2, "independent")
        x = random(2, 2, width)
        for training in (False, True):
            try:
                reason = _wrong_rows(trial.train(training), x)
            except Exception as error:  # a foreign network may raise anything
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                reason = (
                    f"it cannot be called with rows (n, width) alone, here {(4, width)} ({line})"
                )
            if reason:
                return f"{reason} in training mode" if training else reason
        return _wrong_expert(trial.eval(), experts.eval(), x)


def _wrong_rows(network: nn.Module, x: Tensor) -> str | None:
    """Return what is wrong with a network's outputs of two images of two rows, (2, 2, D)."""

    def outputs_of(x: Tensor) -> Tensor:
        with seeded(x.device):  # of dropout and noise
            return network(x)

    rows = x.flatten(0, 1)
    others = 1 - 2 * rows
    others[1] = rows[1]
    y = outputs_of(rows)
    if not isinstance(y, Tensor):
        return f"it returns a {type(y).__name__} and not a tensor"
    if y.shape[:-1] != rows.shape[:-1]:
        return (
            f"it makes {tuple(y.shape)} of rows of shape {tuple(rows.shape)}, which changes their "
            "number"
        )
    if not _equal(outputs_of(others)[1], y[1]):
        return "it mixes rows, so what it makes of a token depends on the others"

    if network.training:  # It may drop whole images at random, which rows (4, D) do not show.
        return None
    if not _equal(outputs_of(x).flatten(0, 1), y):
        return (
            "it mixes rows, so what it makes of a token depends on how many there are of each image"
        )
    if isinstance(network, ResidualFfn) and not network.adds_the_residual(rows):
        return "its last part does more with the residual than to add it"
    return None if _equal(network(rows), network(rows)) else "its outputs are random in eval mode"


def _wrong_expert(network: nn.Module, experts: Experts, x: Tensor) -> str | None:
    """Return what is wrong with the outputs of experts made from a network, or None.

    An expert is the network with other tensors in its submodules. A network that holds a module
    elsewhere too, and calls that, would compute with weights that are not the expert's.
    """
    rows = x.flatten(0, 1)
    ends = torch.tensor([2, 4], device=x.device)
    with contextlib.suppress(Exception):
        if _equal(experts.run(rows, ends)[:2], network(rows[:2])):
            return None
    return "an expert would not compute the same, as it does not find all weights in its submodules"


def _equal(actual: Tensor, expected: Tensor) -> bool:
    """Tell if two tensors have the same shape and, within :data:`TOLERANCE`, the same values."""
    tolerance = TOLERANCE * expected.abs().max().item()
    return actual.shape == expected.shape and torch.allclose(
        actual, expected, rtol=0, atol=tolerance, equal_nan=True
    )
