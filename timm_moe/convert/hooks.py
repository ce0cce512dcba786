"""Hooks of a converted model, from the conversion to :func:`timm_moe.to_dense`."""

import functools
import inspect
import logging
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy
from torch.utils.hooks import RemovableHandle

from ..layers import MoeMlp, RecordingRouter, begin_forward
from ..layers.living import find
from .expert_layers import expert_parameters, moe_layers
from .split import has_tokens_first
from .unseen_optimizer import count_forward

_logger = logging.getLogger(__name__)

#: Arguments of a block's forward that may tell which tokens are padding, in timm, transformers,
#: torch and elsewhere. Those that tell of nothing else come first.
_MASKS = (
    "src_key_padding_mask",
    "key_padding_mask",
    "padding_mask",
    "attention_mask",
    "attn_mask",
    "mask",
)
#: Numbers up to this, added to the attention's logits, leave no attention: exp(-1000) is zero.
_NO_ATTENTION = -1000.0


def add_hooks(model: nn.Module, layers: Iterable[MoeMlp]) -> None:
    """Add the hooks that a model with expert layers needs.

    They watch what the model loads, its forwards and the masks that the blocks around the new
    layers get.

    Args:
        model: the model.
        layers: the new expert layers in the model.
    """
    own: set[nn.Module] = {*layers}
    _keep(model, model.register_load_state_dict_pre_hook(check_loaded_layers))
    if not hasattr(model, "forwards_counted"):
        vars(model)["forwards_counted"] = 0
        _keep(model, model.register_forward_pre_hook(count_forward))
    if any(isinstance(layer.router, RecordingRouter) for layer in own):
        _keep(model, model.register_forward_pre_hook(begin_forward))

    # Several blocks may share a layer, so they are found by what they hold and not by its name.
    for block in [block for block in model.modules() if own.intersection(block.children())]:
        arguments = list(inspect.signature(block.forward).parameters)
        masks = {name: arguments.index(name) for name in _MASKS if name in arguments}
        if masks:
            hook = functools.partial(note_padding, masks=masks)
            _keep(block, block.register_forward_pre_hook(hook, with_kwargs=True))


def _keep(module: nn.Module, handle: RemovableHandle) -> None:
    """Keep a hook's handle on its module, which may leave the model that was converted."""
    vars(module).setdefault("expert_hooks", []).append(handle)


def remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of :func:`add_hooks` from a module, not those of its submodules."""
    for handle in vars(module).pop("expert_hooks", ()):
        handle.remove()
    vars(module).pop("forwards_counted", None)


def check_loaded_layers(
    model: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """Refuse a checkpoint that has experts in some of the model's layers only.

    This is a load-state-dict pre-hook. The weights of a dense model are allowed and become every
    expert's. They have no routers, so the model's routers stay as they are.

    Raises:
        RuntimeError: as torch's ``load_state_dict``, if the checkpoint has experts in some layers
            only.
    """
    experts = {prefix + name: stacked.ndim for name, stacked in expert_parameters(model).items()}
    loaded_experts = {name: state_dict[name] for name in experts if name in state_dict}
    dense = [name for name, loaded in loaded_experts.items() if loaded.ndim < experts[name]]
    if 0 < len(dense) < len(loaded_experts):
        raise RuntimeError(
            f"The checkpoint has experts, but none in {dense[0]}, where the model has some: use "
            "its moe_layers."
        )

    is_sketch = any(loaded.is_meta for loaded in loaded_experts.values())
    has_routers = any(layer.router.state_dict() for layer in moe_layers(model).values())
    if dense and not is_sketch and has_routers:
        _logger.warning(
            "The weights are a dense model's: the experts are made of its networks, and the "
            "routers are untrained."
        )


def note_padding(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, masks: Mapping[str, int]
) -> None:
    """Tell the expert layers of a block which tokens its masks declare to be padding.

    This is a forward pre-hook of the block. A mask that says nothing of this sort causes a warning.

    Args:
        block: the block.
        args: its positional arguments.
        kwargs: its keyword arguments.
        masks: position of each mask among the block's arguments, by its name.
    """
    padding = None
    for name, position in masks.items():
        mask = args[position] if len(args) > position else kwargs.get(name)
        # A mask of the name "mask" may be true for tokens or for padding.
        if isinstance(mask, Tensor) and name != "mask":
            found = _padding(block, name, mask)
            if padding is None:
                padding = found
            elif found is not None and found.shape == padding.shape:  # else it is of each head
                padding = padding | found
        elif mask is not None and not isinstance(mask, Proxy):
            warnings.warn(
                f"Experts cannot see padding by {name!r} of a {type(block).__name__}, a "
                f"{type(mask).__name__}, so padding counts in capacities, router losses and "
                "loads: give the block a tensor named attention_mask (true for tokens) or "
                "key_padding_mask (true for padding).",
                stacklevel=2,
            )
    # A layer may be within a wrapper, as for checkpointing. Blocks within the block have masks of
    # their own, which come later.
    for layer in find(MoeMlp, block):
        layer.padding = padding


def _padding(block: Any, name: str, mask: Tensor) -> Tensor | None:
    """Return which tokens are padding, (B, N) or as the block holds them, or None.

    The known masks are:

    - ``*_padding_mask`` of torch, (B, N): true for padding, or a number that is added to the
      attention, at most -1000 for padding.
    - ``attention_mask`` of transformers, (B, N): 0 or false for padding.
    - Other masks (B, ..., N): true where a query attends to a key, or a number that is added to
      the attention, at most -1000 where none attends. Padding is what no query attends to.
    - Masks (N, N) are the same for all images and tell of no padding.
    """
    if name.endswith("padding_mask"):
        padding = mask <= _NO_ATTENTION if mask.is_floating_point() else mask != 0
        return padding.T if has_tokens_first(block) and mask.ndim == 2 else padding
    is_added = mask.is_floating_point() and mask.ndim > 2
    attends = mask > _NO_ATTENTION if is_added else mask != 0
    if mask.ndim > 2:
        return ~attends.flatten(1, -2).any(1)
    return ~attends if name == "attention_mask" else None
