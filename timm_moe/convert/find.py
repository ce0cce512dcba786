"""The feed-forward networks of a model that could become experts: those that are known, or that the user names."""

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from torch import nn
from torchvision.ops import MLP

from ..layers import MoeMlp
from .check import FFN_CLASSES, check_network
from .split import EncoderLayerFfn, ResidualFfn, SplitFfn

_logger = logging.getLogger(__name__)

#: How a user names networks: a regular expression that matches the whole name, the names, or a predicate of both.
Modules: TypeAlias = str | Iterable[str] | Callable[[str, nn.Module], bool]

#: In timm they are the ``mlp...`` of a numbered block, or of a part of one as MaxViT's ``attn_grid``. Those deeper
#: inside, of relative positions for instance, do not map tokens, and a mixer's ``mlp_tokens`` sees all tokens at once.
_TIMM_NAME = re.compile(r"(^|\.)\d+\.(\w+\.)?mlp(?!_tokens)\w*$")
#: In torchvision and transformers, the ``mlp`` of a numbered block; there may be two towers, of images and of texts.
_OTHER_NAME = re.compile(r"(?!(.*\.)?(text|language)_model\.)(.*[._])?\d+\.mlp")
_BLOCK_NAME = re.compile(r"(?!(.*\.)?(text|language)_model\.)(.*[._])?\d+")


def ffn_paths(model: nn.Module) -> list[str]:
    """Names of the places of the known feed-forward networks, expert layers included, in order."""
    return list(find_networks(model))


def find_networks(model: nn.Module, modules: Modules | None = None) -> dict[str, nn.Module]:
    """Feed-forward networks by the name of their place, in order, expert layers included.

    Args:
        model: any module.
        modules: which; by default those of timm, torchvision, Hugging Face transformers and
            ``nn.TransformerEncoderLayer`` that are known. A name may also be that of a block whose network is in
            several modules: of an ``nn.TransformerEncoderLayer``, or one of transformers with ``intermediate`` and
            ``output``.

    Raises:
        ValueError: if nothing has a name that is asked for, or what has it cannot become experts.
    """
    return _known(model) if modules is None else _named(model, modules)


def _known(model: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    refused: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, MoeMlp) or (_TIMM_NAME.search(name) and _acts_on_each_token(module)):
            found[name] = module
            continue
        if not _is_of_another_library(name, module):
            continue
        path, network = _place_and_network(name, module)
        if isinstance(network, MoeMlp):
            continue  # found under its own name
        try:
            check_network(model, path, network)
        except ValueError as error:
            refused.append(str(error))
        else:
            found[path] = network
    if refused:
        more = f" (and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        _logger.warning("Left as it is: %s%s", refused[0].rstrip("."), f"{more}.")
    return found


def _acts_on_each_token(module: nn.Module) -> bool:
    convolutional = any(isinstance(child, nn.Conv2d) for child in module.children())
    return type(module) in FFN_CLASSES and not convolutional and next(module.buffers(), None) is None


def _is_of_another_library(name: str, module: nn.Module) -> bool:
    if _is_block(module):
        return type(module) is nn.TransformerEncoderLayer or (
            _is_of_transformers(module) and bool(_BLOCK_NAME.fullmatch(name))
        )
    return (isinstance(module, MLP) or _is_of_transformers(module)) and bool(_OTHER_NAME.fullmatch(name))


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _is_block(module: nn.Module) -> bool:
    """Whether this is a block whose feed-forward network is in several modules, or was, which it calls as is known."""
    if isinstance(module, nn.TransformerEncoderLayer):
        return type(module)._ff_block is nn.TransformerEncoderLayer._ff_block
    return _is_of_transformers(module) and {"intermediate", "output"} <= module._modules.keys()


def _place_and_network(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The name of the place of a network, or of that in a block."""
    if not _is_block(module):
        return name, module
    first = "linear1" if isinstance(module, nn.TransformerEncoderLayer) else "intermediate"
    path = f"{name}.{first}" if name else first
    inside = getattr(module, first)
    if isinstance(inside, MoeMlp):
        return path, inside
    if isinstance(module, nn.TransformerEncoderLayer):
        return path, EncoderLayerFfn(module)
    takes_residual = "input_tensor" in inspect.signature(module.get_submodule("output").forward).parameters
    return path, (ResidualFfn if takes_residual else SplitFfn)(module, "intermediate", "output")


def _named(model: nn.Module, modules: Modules) -> dict[str, nn.Module]:
    matching = _matching(model, modules)
    places = dict(_place_and_network(name, module) for name, module in matching.items())
    for name in matching:
        block = model.get_submodule(name.rpartition(".")[0])
        if _is_block(block) and not isinstance(model.get_submodule(name), MoeMlp):
            raise ValueError(f"modules names {name}, a part of the network of its block: name the block instead.")
    for path, network in places.items():
        outer = next((other for other in places if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"modules names {path} and {outer}, of which one is inside the other.")
        if not isinstance(network, MoeMlp):
            check_network(model, path, network)
    return places


def _matching(model: nn.Module, modules: Modules) -> dict[str, nn.Module]:
    everything = {name: module for name, module in model.named_modules() if name}
    if callable(modules):
        matching = {name: module for name, module in everything.items() if modules(name, module)}
    elif isinstance(modules, str):
        try:
            matching = {name: module for name, module in everything.items() if re.fullmatch(modules, name)}
        except re.error as error:
            raise ValueError(f"modules={modules!r} is not a regular expression: {error}.") from error
    else:
        names = list(modules)
        missing = [name for name in names if name not in everything]
        if missing:
            raise ValueError(f"modules names {missing[0]!r}, but this {type(model).__name__} has no module so called.")
        matching = {name: everything[name] for name in everything if name in names}
    if not matching:
        some = next(
            (name for name in everything if isinstance(modules, str) and modules in name), next(iter(everything), "")
        )
        raise ValueError(
            f"modules={modules!r} names no module of this {type(model).__name__}. An expression must match a whole "
            f"name, such as {some!r}."
        )
    return matching
