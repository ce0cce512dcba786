"""The blocks of a model that a placement rule selects, and the expert layers in them."""

import copy
import gc
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..layers import MoeMlp
from .split import SplitFfn

ModelT = TypeVar("ModelT", bound=nn.Module)


def select_blocks(moe_layers: str | int | Iterable[int], depth: int) -> list[int]:
    """Return the block numbers of a placement rule (see :func:`convert_to_moe`) in a model of ``depth`` blocks.

    Raises:
        ValueError: if the rule is unknown or asks for blocks that the model does not have.
    """
    if isinstance(moe_layers, str):
        rule, _, text = moe_layers.rpartition("-")
        if rule in ("every", "last", "tail") and text.isdecimal():
            allowed, number = range(1, depth, 2) if rule == "last" else range(depth), int(text)
            if not 1 <= number <= len(allowed):
                kind = "odd-numbered blocks" if rule == "last" else "blocks"
                raise ValueError(
                    f"moe_layers='{rule}-{number}' does not fit: n must lie between 1 and {len(allowed)}, the number "
                    f"of {kind} with an Mlp."
                )
            return list(allowed[number - 1 :: number] if rule == "every" else allowed[-number:])
        parts: list[Any] = list(moe_layers.split(","))
        blocks = [int(part) for part in parts if part.strip().isdecimal()]
    else:
        parts = list(moe_layers) if isinstance(moe_layers, Iterable) else [moe_layers]
        blocks = [part for part in parts if type(part) is int]
    if not parts or len(blocks) < len(parts):
        raise ValueError(
            f"moe_layers must be 'every-n', 'last-n', 'tail-n' or block numbers such as '1,3,5', got {moe_layers!r}."
        )
    outside = [block for block in blocks if not 0 <= block < depth]
    if outside:
        raise ValueError(f"moe_layers names block {outside[0]}, but the model has blocks 0 to {depth - 1}.")
    if len(set(blocks)) < len(blocks):
        raise ValueError(f"moe_layers names a block twice: {moe_layers!r}.")
    return sorted(blocks)


#: Wrappers that hold a model as their ``module``, by class and by the name of a class that would take long to import.
_WRAPPERS = (nn.DataParallel, DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_WRAPPERS_BY_NAME = ("FullyShardedDataParallel", "DeepSpeedEngine")


def unwrapped(model: Any) -> nn.Module:
    """Return a model without its wrappers: DDP, torch.compile, EMA."""
    if isinstance(model, ModelEma):
        return unwrapped(model.ema)
    if isinstance(model, _WRAPPERS) or type(model).__name__ in _WRAPPERS_BY_NAME:
        return unwrapped(model.module)
    return unwrapped(model._orig_mod) if hasattr(model, "_orig_mod") else model


def refuse_wrapped(model: nn.Module, path: str = "") -> None:
    """Raise ValueError if a model, or a network of it, is wrapped: the wrapper would not know of the experts.

    Some wrappers around a model cannot be seen from it. Where processes train together, their experts would drift
    apart, so there all wrappers of the process are asked.
    """
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:depth])) if depth else model for depth in range(len(names))]
    kind = next((type(module).__name__ for module in around if unwrapped(module) is not module), None)
    if kind is None and any(hasattr(parameter, "placements") for parameter in model.get_submodule(path).parameters()):
        kind = "fully_shard"
    if kind is None and not path and torch.distributed.is_available() and torch.distributed.is_initialized():
        kind = _wrapper_around(model)
    if kind:
        raise ValueError(
            f"{path or f'This {type(unwrapped(model)).__name__}'} is wrapped already, by {kind}, which would not know "
            "of the experts: convert the model first, then wrap it."
        )


def _wrapper_around(model: nn.Module) -> str | None:
    gc.collect()  # wrappers that nobody has any more
    for item in gc.get_objects():
        kind = type(item)
        is_wrapper = issubclass(kind, DistributedDataParallel) or kind.__name__ in _WRAPPERS_BY_NAME
        if is_wrapper and any(module is model for module in item.modules()):
            return kind.__name__
    return None


def moe_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """Find the expert layers of a model by name, in order: ``{"blocks.1.mlp": MoeMlp, ...}``."""
    return {name: module for name, module in unwrapped(model).named_modules() if isinstance(module, MoeMlp)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the experts' parameters, (E, ...), by their names in the model, which may be wrapped."""
    layers = moe_layers(model).values()
    experts = {id(stacked) for layer in layers for _, stacked in layer.named_expert_parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts}


def whole_experts(layer: MoeMlp) -> dict[str, Tensor]:
    """Return the stacked tensors of a layer, (E, ...), by their dense names.

    Raises:
        ValueError: if a wrapper such as FSDP1 holds them in another form.
    """
    experts: dict[str, Tensor] = dict(layer.named_expert_parameters())
    for name, shape in layer.stacked_shapes.items():
        stacked = experts[name]
        # FSDP1 may leave no parameter in the module.
        owner = layer.get_submodule(name.rpartition(".")[0])
        taken = not isinstance(stacked, nn.Parameter) and next(owner.parameters(), None) is None
        if stacked.shape != shape or taken:
            raise ValueError(
                f"The experts in {layer.path or 'an expert layer'} are not there as a whole, since a wrapper holds "
                f"them in flat pieces ({name} should have the shape {tuple(shape)}): FullyShardedDataParallel does; "
                "take fully_shard (FSDP2) with timm_moe.expert_placement, or work on the whole weights, within "
                "FullyShardedDataParallel.summon_full_params or in a model that is not sharded."
            )
    return experts


def require_in_one_process(model: nn.Module) -> None:
    """Raise ValueError if parameters are spread over processes: one process alone would wait for the others."""
    spread = [name for name, parameter in model.named_parameters() if hasattr(parameter, "placements")]
    if spread:
        raise ValueError(
            f"{spread[0]} is spread over processes (FSDP2): call get_model_state_dict(model, options="
            "StateDictOptions(full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict in "
            "all of them, and load what it returns into a model that is not sharded."
        )


def put(model: nn.Module, path: str, old: nn.Module, new: nn.Module) -> None:
    """Replace a network by an expert layer, or the other way round, in every block that shares it."""
    block = model.get_submodule(path.rpartition(".")[0])
    if isinstance(old, SplitFfn):
        old.install(model, block, new)
    elif isinstance(new, SplitFfn):
        new.restore(model, block)
    else:
        for name in [name for name, module in model.named_modules(remove_duplicate=False) if module is old]:
            model.set_submodule(name, new)


def copy_sharing_tensors(model: ModelT) -> ModelT:
    """Copy a module, but not its parameters and buffers."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
