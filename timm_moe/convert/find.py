"""Search for the feed-forward networks of a model that can become experts.

They are known to this package, or the user names them.
"""

import inspect
import logging
import re
from collections.abc import Callable, Iterable
from typing import TypeAlias

from timm.layers import AttentionPoolLatent
from torch import nn
from torchvision.ops import MLP

from ..layers import MoeMlp
from ..layers.grouped_network import LIBRARIES
from .check import FFN_CLASSES, check_network, computed_by, names_in
from .split import EncoderLayerFfn, ResidualFfn, SplitFfn

_logger = logging.getLogger(__name__)

#: How a user selects networks: by a regular expression that matches the whole name, by a list of
#: names, or by a predicate ``(name, module) -> bool``.
Modules: TypeAlias = str | Iterable[str] | Callable[[str, nn.Module], bool]

#: Name of a network in timm: the ``mlp...`` of a numbered block, or of a part of a block, such as
#: MaxViT's ``attn_grid``. A deeper ``mlp``, e.g. of relative positions, does not map tokens, and a
#: mixer's ``mlp_tokens`` mixes them.
_TIMM_NAME = re.compile(r"(^|\.)\d+\.(\w+\.)?mlp(?!_tokens)\w*$")
#: Name of a network in torchvision and transformers: the ``mlp`` of a numbered block. Of a model
#: with an image tower and a text tower, only the image tower's count.
_BLOCK_NAME = re.compile(r"(?!(.*\.)?(text|language)_model\.)(.*[._])?\d+")
_OTHER_NAME = re.compile(_BLOCK_NAME.pattern + r"\.mlp")


def ffn_paths(model: nn.Module) -> list[str]:
    """List the names of a model's feed-forward networks, expert layers included, in order.

    They are those that are known, or that the model's class names (``ffn_modules``).
    """
    networks = find_networks(model, getattr(model, "ffn_modules", None))
    return [path for path, network in networks.items() if isinstance(network, nn.Module)]


def find_networks(model: nn.Module, modules: Modules | None = None) -> dict[str, nn.Module | str]:
    """Find the feed-forward networks of a model, expert layers included, and warn of unfit ones.

    Args:
        model: the model to search.
        modules: the networks that the user names. A name may also be that of a block whose network
            is in several modules: an ``nn.TransformerEncoderLayer``, or a block of transformers
            with ``intermediate`` and ``output``. By default the search is for the known networks of
            timm, torchvision, Hugging Face transformers and torch's ``nn.TransformerEncoderLayer``.

    Returns:
        The networks by name, in order. In the place of one that cannot become experts stands a
        sentence that says why.

    Raises:
        ValueError: if no module has a requested name, or one cannot become experts.
    """
    if modules is not None:
        return _named(model, modules)
    found: dict[str, nn.Module | str] = {}
    replaced: set[str] = set()
    names = names_in(model)
    # The network of a pooling head is in no block, be the model a numbered part of another or not.
    heads = {module.mlp for module in model.modules() if isinstance(module, AttentionPoolLatent)}
    for name, module in model.named_modules():
        if isinstance(module, MoeMlp):
            found[name] = module
            continue
        is_known = _is_of_timm(name, module) or _is_of_another_library(name, module)
        if is_known and module not in heads:
            path, network = _place_and_network(name, module)
            if isinstance(network, MoeMlp):
                continue  # It is found under its own name.
            found[path] = network
            try:
                check_network(path, network, names)
            except ValueError as error:
                found[path] = str(error)
        elif _is_replaced(name, module):
            replaced.add(name)
            found[name] = f"{name} cannot become experts: it is {_described(module)}"
    known = found.keys() - replaced
    last_names = {path.rpartition(".")[2] for path in known}
    for name in replaced:
        is_place = name.rpartition(".")[2] in last_names  # not that of an mlp_norm
        if not is_place or any(path.startswith(f"{name}.") for path in known):
            del found[name]
    _warn_of_refused([reason for reason in found.values() if isinstance(reason, str)])
    return found


def _warn_of_refused(reasons: list[str]) -> None:
    """Warn of networks that stay dense, by the reason of the first."""
    if reasons:
        more = f" (and {len(reasons) - 1} more like it)" if len(reasons) > 1 else ""
        _logger.warning("Left as it is: %s%s.", reasons[0].rstrip("."), more)


def _is_of_timm(name: str, module: nn.Module) -> bool:
    """Tell if a module is a feed-forward network that timm's models have, by its name and class."""
    is_known = type(module) in FFN_CLASSES and not any(
        isinstance(child, nn.Conv2d) for child in module.children()
    )
    return bool(_TIMM_NAME.search(name)) and (is_known or computed_by(module) is not None)


def _described(module: nn.Module) -> str:
    """Say what stands in the place of a network, and what to do about it."""
    if type(module) is nn.Identity:
        return "an Identity"
    kind = type(module).__name__
    return f"of an unknown class, {kind} (modules=... names networks of your own)"


def _is_replaced(name: str, module: nn.Module) -> bool:
    """Tell if a user may have put something else where timm has a feed-forward network.

    It may be a network of the user's own class, an adapter, a wrapper or nothing.
    """
    package, _, inside = type(module).__module__.partition(".")
    is_wrapper = package == "torch" and inside.startswith("distributed.")
    is_sequence = type(module) is nn.Sequential and any(
        type(part) in FFN_CLASSES for part in module.children()
    )
    is_one_of_these = is_wrapper or is_sequence or type(module) is nn.Identity
    return (is_one_of_these or package not in LIBRARIES) and bool(_TIMM_NAME.search(name))


def _is_of_another_library(name: str, module: nn.Module) -> bool:
    """Tell if a module is a network, or a block with one, of torchvision, transformers or torch."""
    if isinstance(module, MLP) or type(module).__module__.startswith("transformers."):
        return bool((_BLOCK_NAME if _first_part(module) else _OTHER_NAME).fullmatch(name))
    return type(module) is nn.TransformerEncoderLayer


def _first_part(module: nn.Module) -> str:
    """Return the name of the first part of a block's network, or ``""`` if it has none known."""
    if isinstance(module, nn.TransformerEncoderLayer):
        is_torchs = type(module)._ff_block is nn.TransformerEncoderLayer._ff_block
        return "linear1" if is_torchs else ""
    is_of_transformers = type(module).__module__.startswith("transformers.")
    has_parts = {"intermediate", "output"} <= module._modules.keys()
    return "intermediate" if is_of_transformers and has_parts else ""


def _place_and_network(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """Return the name of a network and the network itself; a block's has the first part's name."""
    first = _first_part(module)
    path = f"{name}.{first}" if name and first else name or first
    network = module.get_submodule(first)
    if not first or isinstance(network, MoeMlp):
        return path, network
    if isinstance(module, nn.TransformerEncoderLayer):
        return path, EncoderLayerFfn(module)
    last = module.get_submodule("output")
    takes_residual = "input_tensor" in inspect.signature(last.forward).parameters
    network_class = ResidualFfn if takes_residual else SplitFfn
    return path, network_class(module, "intermediate", "output")


def _named(model: nn.Module, modules: Modules) -> dict[str, nn.Module | str]:
    """Return the networks that the user names, by name, or raise ValueError."""
    matching = _matching(model, modules)
    places = dict(_place_and_network(name, module) for name, module in matching.items())
    for name in matching:
        block = model.get_submodule(name.rpartition(".")[0])
        if _first_part(block) and not isinstance(model.get_submodule(name), MoeMlp):
            raise ValueError(
                f"modules names {name}, a part of the network of its block: name the block instead."
            )
    names = names_in(model)
    for path, network in places.items():
        outer = next((other for other in places if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(f"modules names {path} and {outer}, of which one is inside the other.")
        if not isinstance(network, MoeMlp):
            check_network(path, network, names)
    return dict(places)


def _matching(model: nn.Module, modules: Modules) -> dict[str, nn.Module]:
    """Return the modules that the user names, in the model's order, or raise ValueError."""
    everything = {name: module for name, module in model.named_modules() if name}
    if callable(modules):
        names = [name for name, module in everything.items() if modules(name, module)]
    elif isinstance(modules, str):
        names = [name for name in everything if re.fullmatch(modules, name)]
    else:
        names = list(modules)
        missing = [name for name in names if name not in everything]
        if missing:
            raise ValueError(
                f"modules names {missing[0]!r}, but this {type(model).__name__} has no module so "
                "called."
            )
    if not names:
        similar = [name for name in everything if isinstance(modules, str) and modules in name]
        example = next(iter([*similar, *everything]), "")
        raise ValueError(
            f"modules={modules!r} names no module of this {type(model).__name__}. An expression "
            f"must match a whole name, such as {example!r}."
        )
    return {name: module for name, module in everything.items() if name in names}
