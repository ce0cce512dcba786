"""The blocks of a model that a placement rule selects, and the expert layers in them."""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from timm.utils import ModelEma, ModelEmaV2, ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ..layers import MoeMlp, SharedExpertMlp
from .split import SplitFfn

ModelT = TypeVar("ModelT", bound=nn.Module)


def select_blocks(moe_layers: str | int | Iterable[int], depth: int) -> list[int]:
    """Return the sorted block numbers that a placement rule selects.

    Args:
        moe_layers: the rule, or block numbers (see :func:`convert_to_moe`).
        depth: number of blocks of the model.

    Raises:
        ValueError: if the rule is unknown or asks for blocks that the model does not have.
    """
    given = moe_layers.split(",") if isinstance(moe_layers, str) else moe_layers
    parts = [str(part).strip() for part in (given if isinstance(given, Iterable) else [given])]

    rule, _, number = parts[0].rpartition("-") if parts else ("", "", "")
    if len(parts) == 1 and rule in ("every", "last", "tail") and number.isdecimal():
        return _blocks_of_rule(rule, int(number), depth)

    if not parts or not all(part.removeprefix("-").isdecimal() for part in parts):
        raise ValueError(
            "moe_layers must be 'every-n', 'last-n', 'tail-n' or block numbers such as '1,3,5', "
            f"got {moe_layers!r}."
        )
    blocks = {int(part) for part in parts}
    outside = [block for block in blocks if not 0 <= block < depth]
    if outside:
        raise ValueError(
            f"moe_layers names block {outside[0]}, but the model has blocks 0 to {depth - 1} with "
            "an Mlp; one with several counts as often."
        )
    return sorted(blocks)


def _blocks_of_rule(rule: str, number: int, depth: int) -> list[int]:
    """Return the block numbers that ``"every-n"``, ``"last-n"`` or ``"tail-n"`` selects."""
    allowed = range(1, depth, 2) if rule == "last" else range(depth)
    if not 1 <= number <= len(allowed):
        kind = "odd-numbered blocks" if rule == "last" else "blocks"
        raise ValueError(
            f"moe_layers='{rule}-{number}' does not fit: n must lie between 1 and "
            f"{len(allowed)}, the number of {kind} with an Mlp."
        )
    return list(allowed[number - 1 :: number] if rule == "every" else allowed[-number:])


#: Wrappers that hold a model as their ``module``, by class and by the name of a class that would
#: take long to import.
_WRAPPERS = (nn.DataParallel, DistributedDataParallel, AveragedModel, ModelEmaV2, ModelEmaV3)
_WRAPPERS_BY_NAME = ("FullyShardedDataParallel", "DeepSpeedEngine")


def unwrapped(model: Any) -> nn.Module:
    """Return a model without its wrappers: DDP, torch.compile, EMA."""
    if isinstance(model, ModelEma):
        return unwrapped(model.ema)
    if isinstance(model, _WRAPPERS) or type(model).__name__ in _WRAPPERS_BY_NAME:
        return unwrapped(model.module)
    return unwrapped(model._orig_mod) if hasattr(model, "_orig_mod") else model


def refuse_wrapped(model: nn.Module, path: str) -> None:
    """Refuse a network that is wrapped, or is inside a module that is.

    The wrapper would not know of the experts.

    Raises:
        ValueError: if the network is wrapped.
    """
    names = path.split(".")
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    wrappers = [type(module).__name__ for module in around if unwrapped(module) is not module]
    if any(is_sharded(parameter) for parameter in model.get_submodule(path).parameters()):
        wrappers.append("fully_shard")
    if wrappers:
        raise ValueError(
            f"{path} is wrapped already, by {wrappers[0]}, which would not know of the experts: "
            "convert the model first, then wrap it."
        )


def moe_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """Find the expert layers of a model by name, in order: ``{"blocks.1.mlp": MoeMlp, ...}``."""
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, MoeMlp)
    }


def described(layers: Iterable[MoeMlp]) -> str:
    """Say in a sentence how many experts are where, and which router they have."""
    each = list(layers)
    paths = [layer.path or "an expert layer" for layer in each]
    where = paths[0] if len(each) == 1 else f"each of {len(each)} layers, {paths[0]} to {paths[-1]}"
    router = each[0].router
    options = router.extra_repr()
    routed = f"{type(router).__name__}({options})" if options else type(router).__name__
    shared = " and a shared one" if isinstance(each[0], SharedExpertMlp) else ""
    return f"{numbers_of_experts(each)} experts{shared} in {where}, by {routed}."


def numbers_of_experts(layers: Iterable[MoeMlp]) -> str:
    """Write the different numbers of experts that layers have, as ``"4/8"``."""
    return "/".join(map(str, sorted({layer.num_experts for layer in layers})))


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the experts' parameters, (E, ...), by their names in the model, which may be wrapped."""
    layers = moe_layers(model).values()
    experts = {id(stacked) for layer in layers for _, stacked in layer.named_expert_parameters()}
    return {
        name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts
    }


def expert_biases(model: nn.Module) -> set[str]:
    """Return the names in the model of the experts' biases and norm scales, (E, size).

    By their two dimensions they look like matrices. timm would decay the scales, and with
    ``layer_decay`` the biases too.
    """
    return {name for name, stacked in expert_parameters(model).items() if stacked.ndim == 2}


def is_sharded(tensor: Tensor) -> bool:
    """Tell if processes hold parts of a tensor, as a DTensor (FSDP2, expert parallelism)."""
    return hasattr(tensor, "placements")


def parameters(module: nn.Module) -> int:
    """Count the entries of all parameters of a module, shared ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def activated_parameters(model: nn.Module, experts: int | None = None) -> int:
    """Count the parameters that a token passes through.

    Args:
        model: a model with or without expert layers.
        experts: number of experts that a token takes in each layer; by default as many as its
            router gives it.
    """
    return parameters(model) - sum(
        (layer.num_experts - (experts or layer.router.experts_of_row()))
        * parameters_of_an_expert(layer)
        for layer in moe_layers(model).values()
    )


def parameters_of_an_expert(layer: MoeMlp) -> int:
    """Count the parameters of one expert of a layer."""
    of_all = sum(stacked.numel() for _, stacked in layer.named_expert_parameters())
    return of_all // layer.num_experts


def whole_experts(layer: MoeMlp) -> dict[str, Tensor]:
    """Return the stacked tensors of a layer, (E, ...), by their dense names.

    Raises:
        ValueError: if a wrapper such as FSDP1 holds them in another form.
    """
    experts: dict[str, Tensor] = dict(layer.named_expert_parameters())
    for name, shape in layer.stacked_shapes.items():
        stacked = experts[name]
        owner = layer.get_submodule(name.rpartition(".")[0])
        # FSDP1 may leave no parameter in the module.
        is_plain = isinstance(stacked, nn.Parameter)
        is_taken = not is_plain and next(owner.parameters(), None) is None
        if stacked.shape != shape or is_taken:
            raise ValueError(
                f"The experts in {layer.path or 'an expert layer'} are not there as a whole, since "
                f"a wrapper holds them in flat pieces ({name} should have the shape "
                f"{tuple(shape)}): FullyShardedDataParallel does; take fully_shard (FSDP2) with "
                "timm_moe.expert_placement, or work on the whole weights, within "
                "FullyShardedDataParallel.summon_full_params or in a model that is not sharded."
            )
    return experts


def put(model: nn.Module, path: str, old: nn.Module, new: nn.Module) -> None:
    """Replace a network by an expert layer, or an expert layer by a network.

    Every block that shares the old module gets the new one.
    """
    block = model.get_submodule(path.rpartition(".")[0])
    if isinstance(old, SplitFfn):
        old.install(model, block, new)
    elif isinstance(new, SplitFfn):
        new.restore(model, block)
    else:
        everything = list(model.named_modules(remove_duplicate=False))
        for name in [name for name, module in everything if module is old]:
            model.set_submodule(name, new)


def copy_sharing_tensors(model: ModelT) -> ModelT:
    """Copy a module, but not its parameters and buffers."""
    return copied(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def copied(model: ModelT, memo: dict[int, Any]) -> ModelT:
    """Copy a module, but not the objects in ``memo``, which maps ids to what is taken instead.

    The copy is without the autocast that Accelerate puts around a model's forward, and its parts
    are not compiled, so that its weights have their own names.
    """
    model = copy.deepcopy(model, memo)
    if vars(model).pop("_original_forward", None):
        del model.forward
    for part in list(model.modules()):
        for name, child in list(part._modules.items()):
            if hasattr(child, "_orig_mod"):  # of torch.compile
                setattr(part, name, unwrapped(child))
    return model
