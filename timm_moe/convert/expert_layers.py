"""The expert layers of a model, their parameters, and how many there are."""

from collections.abc import Iterable

from torch import Tensor, nn

from ..layers import MoeMlp, SharedExpertMlp
from .wrappers import unwrapped


def moe_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """Find the expert layers of a model by name, in order: ``{"blocks.1.mlp": MoeMlp, ...}``."""
    return {
        name: module
        for name, module in unwrapped(model).named_modules()
        if isinstance(module, MoeMlp)
    }


def described(layers: Iterable[MoeMlp]) -> str:
    """Say how many experts are where, which router they have, and if they run one by one."""
    each = list(layers)
    paths = [layer.path for layer in each]
    where = paths[0] if len(each) == 1 else f"each of {len(each)} layers, {paths[0]} to {paths[-1]}"
    router = each[0].router
    options = router.extra_repr()
    routed = f"{type(router).__name__}({options})" if options else type(router).__name__
    shared = " and a shared one" if isinstance(each[0], SharedExpertMlp) else ""
    slow = next((layer for layer in each if not layer.is_grouped), None)
    told = "" if slow is None else f" Experts of {slow.network_name} run one after the other."
    return f"{numbers_of_experts(each)} experts{shared} in {where}, by {routed}.{told}"


def numbers_of_experts(layers: Iterable[MoeMlp]) -> str:
    """Write the different numbers of experts that layers have, as ``"4/8"``."""
    return "/".join(map(str, sorted({layer.num_experts for layer in layers})))


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the experts' parameters, (E, ...), by their names in the model, which may be wrapped."""
    experts = expert_ids(moe_layers(model).values())
    return {
        name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts
    }


def expert_ids(layers: Iterable[MoeMlp]) -> set[int]:
    """Return the ids of the stacked parameters of layers."""
    return {id(stacked) for layer in layers for _, stacked in layer.named_expert_parameters()}


def expert_biases(model: nn.Module) -> set[str]:
    """Return the names in the model of the experts' biases and norm scales, (E, size).

    By their two dimensions they look like matrices. timm would decay the scales, and with
    ``layer_decay`` the biases too.
    """
    return {name for name, stacked in expert_parameters(model).items() if stacked.ndim == 2}


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
    idle = sum(
        (layer.num_experts - (experts or layer.router.experts_of_row()))
        * parameters_of_an_expert(layer)
        for layer in moe_layers(model).values()
    )
    return parameters(model) - round(idle)


def parameters_of_an_expert(layer: MoeMlp) -> int:
    """Count the parameters of one expert of a layer."""
    of_all = sum(stacked.numel() for _, stacked in layer.named_expert_parameters())
    return of_all // layer.num_experts


def whole_experts(layer: MoeMlp) -> dict[str, Tensor]:
    """Return the stacked tensors of a layer, (E, ...), by their dense names.

    Raises:
        ValueError: if a wrapper such as FSDP1 holds them in another form, or they were cut.
    """
    experts: dict[str, Tensor] = dict(layer.named_expert_parameters())
    for name, shape in layer.stacked_shapes.items():
        stacked = experts[name]
        is_taken = False
        if not isinstance(stacked, nn.Parameter):  # FSDP1 may leave no parameter in the module.
            owner = layer.get_submodule(name.rpartition(".")[0])
            is_taken = next(owner.parameters(), None) is None
        if stacked.shape[1:] == shape[1:] and len(stacked) != shape[0]:
            raise ValueError(
                f"{layer.path} was made with {shape[0]} experts and holds {len(stacked)} now: load "
                f"the weights into a model with num_experts={len(stacked)}."
            )
        is_cut = stacked.shape != shape and stacked.ndim == len(shape) and not is_taken
        if is_cut and len(stacked) == shape[0]:
            raise ValueError(
                f"{name} of the experts in {layer.path} was made with the shape {tuple(shape)} and "
                f"has {tuple(stacked.shape)} now: cut the dense model, and convert it afterwards."
            )
        if stacked.shape != shape or is_taken:
            raise ValueError(
                f"The experts in {layer.path} are not there as a whole, since a wrapper holds "
                f"them in flat pieces ({name} should have the shape {tuple(shape)}): "
                "FullyShardedDataParallel does; take fully_shard (FSDP2) with "
                "timm_moe.expert_placement, or work on the whole weights, within "
                "FullyShardedDataParallel.summon_full_params or in a model that is not sharded."
            )
    return experts
