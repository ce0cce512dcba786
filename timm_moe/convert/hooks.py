"""Hooks of a converted model, from the conversion to :func:`timm_moe.to_dense`."""

import functools
import inspect
import logging
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from ..layers import MoeMlp, RecordingRouter, begin_forward
from .blocks import expert_parameters, moe_layers
from .split import has_tokens_first

_logger = logging.getLogger(__name__)

#: Arguments of a block's forward that may tell which tokens are padding, in timm, transformers,
#: torch and elsewhere.
_MASKS = (
    "attn_mask",
    "attention_mask",
    "src_key_padding_mask",
    "key_padding_mask",
    "padding_mask",
    "mask",
)


def add_hooks(model: nn.Module, paths: Iterable[str]) -> None:
    """Watch what is loaded, the forwards of the model, and the masks that the blocks of new expert layers get."""
    layers = {model.get_submodule(path) for path in paths}
    handles = [model.register_load_state_dict_pre_hook(check_loaded_layers)]
    if any(isinstance(layer.router, RecordingRouter) for layer in layers):
        handles.append(model.register_forward_pre_hook(begin_forward))
    # Some share a layer.
    for block in [block for block in model.modules() if layers.intersection(block.children())]:
        for position, name in enumerate(inspect.signature(block.forward).parameters):
            if name in _MASKS:
                hook = functools.partial(note_padding, name=name, position=position)
                handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
    vars(model)["expert_hooks"] = [*vars(model).get("expert_hooks", ()), *handles]


def remove_hooks(module: nn.Module) -> None:
    """Undo :func:`add_hooks`."""
    for handle in vars(module).pop("expert_hooks", ()):
        handle.remove()


def check_loaded_layers(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Raise ValueError if a checkpoint has experts in some of the model's layers only; a load-state-dict pre-hook.

    The weights of a dense model may become every expert's. They have no routers, which stay as they
    are.
    """
    experts = {prefix + name: stacked.ndim for name, stacked in expert_parameters(model).items()}
    loaded_experts = {name: state_dict[name] for name in experts if name in state_dict}
    dense = [name for name, loaded in loaded_experts.items() if loaded.ndim < experts[name]]
    if 0 < len(dense) < len(loaded_experts):
        raise ValueError(
            f"The checkpoint has experts, but none in {dense[0]}, where the model has some: use "
            "its moe_layers."
        )
    is_sketch = any(loaded.is_meta for loaded in loaded_experts.values())
    if (
        dense
        and not is_sketch
        and any(layer.router.state_dict() for layer in moe_layers(model).values())
    ):
        _logger.info(
            "The weights are a dense model's, of which the experts are made, the routers untrained."
        )


def note_padding(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str, position: int
) -> None:
    """Tell the expert layers of a block which of its tokens are padding, by its mask; a forward pre-hook."""
    mask = args[position] if len(args) > position else kwargs.get(name)
    padding = None
    if isinstance(mask, Tensor) and name != "mask":  # which may be true for either
        padding = _padding(block, name, mask)
    elif mask is not None and not isinstance(mask, Proxy):
        warnings.warn(
            f"Experts cannot see padding by {name!r} of a {type(block).__name__}, a "
            f"{type(mask).__name__}, so padding counts in capacities, router losses and loads: "
            "give the block a tensor named attention_mask (true for tokens) or key_padding_mask "
            "(true for padding).",
            stacklevel=2,
        )
    for layer in block.children():
        if isinstance(layer, MoeMlp):
            layer.padding = padding


def _padding(block: Any, name: str, mask: Tensor) -> Tensor | None:
    """Boolean tensor (B, N), as the block holds its tokens; None if the mask is the same for all images.

    Padding is what no token attends to. A mask is a boolean that is true for what takes part,
    except torch's, or a number that is added to the attention, except the numbers 0 and 1 for each
    token of transformers.
    """
    if name.endswith("padding_mask"):
        padding = mask.isneginf() if mask.is_floating_point() else mask != 0
        return padding.T if has_tokens_first(block) and mask.ndim == 2 else padding
    is_added = mask.is_floating_point() and mask.ndim > 2
    attends = mask > torch.finfo(mask.dtype).min if is_added else mask != 0
    if mask.ndim > 2:
        return ~attends.flatten(1, -2).any(1)
    return ~attends if name == "attention_mask" else None
