"""An Mlp becomes a MoeMlp in chosen blocks, and back."""

import contextlib
import copy
import inspect
import logging
import re
import time
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models import (
    Beit,
    Eva,
    MultiScaleVit,
    NaFlexVit,
    PoolingVisionTransformer,
    VisionTransformer,
    VisionTransformerRelPos,
    register_notrace_module,
)
from timm.models.tiny_vit import NormMlp
from timm.models.vitamin import GeGluMlp
from timm.utils import unwrap_model
from torch import Tensor, nn

from .gather import average, get_method
from .layers import (
    EnsembleRouter,
    EwaMlp,
    ImageRouter,
    MoeMlp,
    MultiHeadRouter,
    PartitionedRouter,
    SharedExpertMlp,
    TilingRouter,
    TopKRouter,
    WeakRegistry,
    begin_forward,
)
from .layers.checks import check_flag, check_integer, check_number
from .schedules import check_share_rate, get_schedule

ModelT = TypeVar("ModelT", bound=nn.Module)

_logger = logging.getLogger(__name__)

#: Seconds between two lines about the progress.
PROGRESS_INTERVAL = 10.0

#: Feed-forward networks that act on each token by itself; older versions of timm have fewer.
FFN_CLASSES: tuple[type, ...] = (Mlp, GluMlp, SwiGLU, NormMlp, GeGluMlp)
with contextlib.suppress(ImportError):
    from timm.models.gemma4_vit import Gemma4GatedMlp

    FFN_CLASSES += (Gemma4GatedMlp,)
#: Share rate and schedule of each router where only one of them, or neither, is given.
ROUTERS = {"random": (0.3, "linear"), "top_k": (0.3, "early")}

ROUTING_UNITS = {"token": TopKRouter, "image": ImageRouter}
#: Routers of pBE and its ablations; multi-head routing is in the last layer only.
ENSEMBLES = {
    "pbe": EnsembleRouter,
    "tiling": TilingRouter,
    "partitioning": PartitionedRouter,
    "multi_head": MultiHeadRouter,
}

#: Models whose blocks see the class token as the first token of an image (XCiT's and CaiT's see it in the last blocks).
CLASS_TOKEN_FIRST: tuple[type, ...] = (
    *(VisionTransformer, VisionTransformerRelPos, NaFlexVit),
    *(Beit, Eva, PoolingVisionTransformer, MultiScaleVit),
)

# Their row counts are data to torch.fx, so timm's feature extraction keeps them as leaves.
register_notrace_module(MoeMlp)
register_notrace_module(EwaMlp)
register_notrace_module(SharedExpertMlp)


def convert_to_moe(
    model: ModelT,
    num_experts: int = 4,
    moe_layers: str | int | Iterable[int] = "every-2",
    router: str = "random",
    expert_init: str = "same",
    share_rate: float | None = None,
    share_schedule: str | None = None,
    eval_mode: str = "average",
    expert_dropout: float | None = None,
    top_k: int = 1,
    noise_std: float = 0.0,
    capacity_factor: float | str | None = None,
    eval_capacity_factor: float | str | None = None,
    capacity_multiple: int = 4,
    capacity_rounding: str = "ceil",
    batch_priority: bool = False,
    group_images: int | None = None,
    aux_loss: str = "balance",
    aux_loss_weight: float = 0.01,
    routing_unit: str = "token",
    gate_mode: str = "prob",
    shared_expert: bool = False,
    shared_init: str = "pretrained",
    ensemble_size: int = 1,
    ensemble: str = "pbe",
) -> ModelT:
    """Replace the feed-forward networks of some blocks of a timm model by expert layers, in place.

    Args:
        model: a timm model whose numbered blocks hold an ``mlp`` (ViT, DeiT, Swin, ...).
        num_experts: E, the number of experts in each layer.
        moe_layers: which blocks, counted from 0 over the whole model. ``"every-n"``: blocks n-1, 2n-1, ...;
            ``"last-n"``: the last n odd blocks, as in V-MoE; ``"tail-n"``: the last n blocks; or block numbers, as
            ``"1,3,5"`` or as integers.
        router: ``"random"``, the random partition of EWA, or ``"top_k"``, learned routing as in V-MoE.
        expert_init: ``"same"`` copies the weights of the dense network into every expert (sparse upcycling),
            ``"independent"`` draws them anew at the scale of the initial weights (for training from scratch).
        share_rate: how far the experts are averaged after each optimizer step, in [0, (E - 1) / E]. By default 0.3 for
            random partitions; routed experts are only averaged if this or ``share_schedule`` is given (Early EWA).
        share_schedule: its course over training: ``"linear"`` (default for random partitions), ``"constant"``,
            ``"early"`` (default for routed experts) or ``"late"``.
        eval_mode: of random partitions. ``"average"`` evaluates the mean of the experts, which is what is exported;
            ``"partition"`` evaluates the experts on random partitions (for analysis).
        expert_dropout: rate of the dropout inside the experts; by default that of the dense network.
        top_k: this and all below are for routed experts. K, the experts of each token.
        noise_std: standard deviation, times E, of the noise on the router's logits in training.
        capacity_factor: in training, experts take this times their even share of the choices; None or ``"none"`` to
            drop nothing (timm's ``create_model`` drops options that are None).
        eval_capacity_factor: the same in eval mode.
        capacity_multiple: capacities are rounded up to a multiple of this.
        capacity_rounding: ``"ceil"``, ``"round"`` or ``"floor"``, before that.
        batch_priority: let the tokens that the router is surest of queue first.
        group_images: images that share queues, capacities and router losses; by default the local batch.
        aux_loss: the routers' losses, ``"importance"``, ``"load"``, ``"balance"``, ``"balance_top_k"`` or several
            joined by ``+``.
        aux_loss_weight: weight of their mean in the training loss, summed over the layers; 0 for none. In a loop of
            your own, :func:`timm_moe.auxiliary_loss` is this sum.
        routing_unit: ``"token"``, or ``"image"``: all tokens of an image go where its class token, the first, goes
            (ViMoE).
        gate_mode: factor of a chosen expert's output: its gate, ``"prob"``; ``"one"``; or ``"renorm"``, its gate
            divided by the sum of the chosen experts'.
        shared_expert: add one more expert that every token passes through, without a gate (ViMoE).
        shared_init: what it begins as: ``"pretrained"``, a copy of the dense network, or ``"zero_out"``, adding
            nothing.
        ensemble_size: M, members among which the experts are divided; 1 for none (pBE).
        ensemble: how. ``"pbe"``: each image is in the batch M times, each member's tokens choose among its experts.
            Ablations: ``"tiling"``: the same with all experts for all members, which differ by noise alone, also in
            eval mode; ``"partitioning"``: each image once, each token chooses K experts of each part; ``"multi_head"``:
            M = K, in the last layer the k-th choice of each token goes to the k-th member. All but ``"partitioning"``
            need a model that repeats the images and takes the members' outputs apart, as ``vmoe_pbe_*`` do.

    Returns:
        The same model.

    Raises:
        ValueError: if an option is not one of the above, does not go with the router, or the model has no block that
            can be converted; the model is then unchanged.
    """
    routed_options: dict[str, Any] = dict(
        top_k=top_k,
        noise_std=noise_std,
        capacity_factor=_none(capacity_factor),
        eval_capacity_factor=_none(eval_capacity_factor),
        capacity_multiple=capacity_multiple,
        capacity_rounding=capacity_rounding,
        batch_priority=batch_priority,
        group_images=group_images,
        aux_loss=aux_loss,
        aux_loss_weight=aux_loss_weight,
        routing_unit=routing_unit,
        gate_mode=gate_mode,
        ensemble_size=ensemble_size,
        ensemble=ensemble,
    )
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}.")
    check_integer("num_experts", num_experts, 1)
    shared_options = {"shared_expert": shared_expert, "shared_init": shared_init}
    _refuse_foreign_options(router, {"eval_mode": eval_mode} if router == "top_k" else routed_options | shared_options)
    check_flag("shared_expert", shared_expert)
    if shared_init != "pretrained" and not shared_expert:
        raise ValueError(f"shared_init={shared_init!r} is an option of shared_expert=True.")
    if routing_unit == "image" and getattr(model, "cls_token", None) is None:
        raise ValueError(
            f"routing_unit='image' lets the class token of an image choose, but this {type(model).__name__} has none."
        )
    if routing_unit == "image" and not isinstance(model, CLASS_TOKEN_FIRST):
        known = ", ".join(model_class.__name__ for model_class in CLASS_TOKEN_FIRST)
        raise ValueError(
            "routing_unit='image' lets the first token of an image choose, which in this "
            f"{type(model).__name__} is not the class token; it is in {known}."
        )
    _check_ensemble(model, ensemble, ensemble_size, top_k, routing_unit)
    share_rate, share_schedule = _sharing(router, num_experts, share_rate, share_schedule)
    common: dict[str, Any] = dict(
        num_experts=num_experts,
        expert_init=expert_init,
        share_rate=share_rate,
        share_schedule=share_schedule,
        expert_dropout=expert_dropout,
    )

    def make_layer(ffn: nn.Module, is_last: bool) -> MoeMlp:
        if router == "random":
            return EwaMlp(ffn, **common, eval_mode=eval_mode)
        made = _make_router(ffn, num_experts, is_last, **routed_options)
        if shared_expert:
            return SharedExpertMlp(ffn, made, **common, shared_init=shared_init)
        return MoeMlp(ffn, made, **common)

    paths = ffn_paths(model)
    if not paths:
        raise ValueError(
            f"{type(model).__name__} has no numbered block with an mlp of linear layers that could become experts."
        )
    chosen = [paths[block] for block in select_blocks(moe_layers, len(paths))]
    for path in chosen:
        if isinstance(model.get_submodule(path), MoeMlp):
            raise ValueError(f"{path} is an expert layer already.")
    layers = {path: make_layer(model.get_submodule(path), path == chosen[-1]) for path in chosen}
    for path, layer in layers.items():
        ffn = model.get_submodule(path)
        layer.path, layer.replaced = path, WeakRegistry(ffn.parameters())
        _replace(model, ffn, layer.train(model.training))
    if router == "top_k":
        model.register_forward_pre_hook(begin_forward)
    return model


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, in every block that shares it."""
    for path in [path for path, module in model.named_modules(remove_duplicate=False) if module is old]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, new)


def _refuse_foreign_options(router: str, options: dict[str, Any]) -> None:
    """Raise ValueError if an option of the other router is not at its default."""
    parameters = inspect.signature(convert_to_moe).parameters
    for name, value in options.items():
        if value != parameters[name].default:
            other = next(other for other in ROUTERS if other != router)
            raise ValueError(f"{name} is an option of router={other!r}; router={router!r} has none.")


def _sharing(router: str, num_experts: int, share_rate: float | None, share_schedule: str | None) -> tuple[float, str]:
    """Share rate and schedule, with the router's defaults."""
    default_rate, default_schedule = ROUTERS[router]
    if router == "top_k" and share_rate is None and share_schedule is None:
        default_rate = 0.0  # trained without averaging
    share_rate = default_rate if share_rate is None else share_rate
    share_schedule = default_schedule if share_schedule is None else share_schedule
    check_share_rate(share_rate, num_experts)
    get_schedule(share_schedule)
    return share_rate, share_schedule


def _none(value: Any) -> Any:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _check_ensemble(model: nn.Module, ensemble: str, ensemble_size: int, top_k: int, routing_unit: str) -> None:
    if ensemble not in ENSEMBLES:
        raise ValueError(f"ensemble must be one of {', '.join(ENSEMBLES)}, got {ensemble!r}.")
    check_integer("ensemble_size", ensemble_size, 1)
    if ensemble_size == 1:
        if ensemble != "pbe":
            raise ValueError(f"ensemble={ensemble!r} needs an ensemble_size above 1.")
        return
    if ensemble == "multi_head" and ensemble_size != top_k:
        raise ValueError(
            f"ensemble='multi_head' has a member for each choice of a token: set top_k={ensemble_size} as "
            f"ensemble_size, got top_k={top_k}."
        )
    if routing_unit != "token":
        raise ValueError(
            f"The members of an ensemble route tokens, so routing_unit={routing_unit!r} has no place here."
        )
    if ensemble == "partitioning":
        return
    if not hasattr(model, "forward_members"):
        raise ValueError(
            f"ensemble_size={ensemble_size} needs a model that repeats its images for the members of the ensemble, as "
            f"vmoe_pbe_* do; a {type(model).__name__} does not."
        )
    if moe_layers(model):
        raise ValueError(f"This {type(model).__name__} has the expert layers of its ensemble already.")


def _make_router(
    ffn: nn.Module,
    num_experts: int,
    is_last: bool,
    routing_unit: str,
    aux_loss: str,
    aux_loss_weight: float,
    ensemble_size: int,
    ensemble: str,
    **options: Any,
) -> TopKRouter:
    if routing_unit not in ROUTING_UNITS:
        raise ValueError(f"routing_unit must be one of {', '.join(ROUTING_UNITS)}, got {routing_unit!r}.")
    check_number("aux_loss_weight", aux_loss_weight, 0)
    names = aux_loss.split("+") if isinstance(aux_loss, str) else []
    if not names or len(set(names)) < len(names):
        raise ValueError(f"aux_loss must be different names of losses joined by +, got {aux_loss!r}.")
    first = next(module for module in ffn.modules() if isinstance(module, nn.Linear))
    options["loss_weights"] = dict.fromkeys(names, aux_loss_weight / len(names))
    options |= dict(device=first.weight.device, dtype=first.weight.dtype)
    if ensemble_size == 1 or (ensemble == "multi_head" and not is_last):
        return ROUTING_UNITS[routing_unit](first.in_features, num_experts, **options)
    if ensemble != "multi_head":
        options["ensemble_size"] = ensemble_size
    return ENSEMBLES[ensemble](first.in_features, num_experts, **options)


def moe_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """The expert layers of a model by name, in order: ``{"blocks.1.mlp": MoeMlp, ...}``."""
    return {name: module for name, module in unwrap_model(model).named_modules() if isinstance(module, MoeMlp)}


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The experts' parameters, (E, ...), by the names that the model, however wrapped, has for them."""
    experts = {
        id(stacked)
        for layer in model.modules()
        if isinstance(layer, MoeMlp)
        for _, stacked in layer.named_expert_parameters()
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in experts}


def whole_experts(layer: MoeMlp) -> dict[str, Tensor]:
    """The stacked tensors of a layer by their dense names, each of them (E, ...).

    Raises:
        ValueError: if a wrapper holds them in another form, as FSDP1 does.
    """
    experts: dict[str, Tensor] = {name: attrgetter(name)(layer) for name in layer.stacked_shapes}
    for name, shape in layer.stacked_shapes.items():
        stacked = experts[name]
        # Such a wrapper may take the parameters out of their module altogether.
        taken = not isinstance(stacked, nn.Parameter) and not _has_parameters(layer, name)
        if stacked.shape != shape or taken:
            raise ValueError(
                f"The experts in {layer.path or 'an expert layer'} are not there as a whole, since a wrapper holds "
                f"them in flat pieces ({name} should have the shape {tuple(shape)}): FullyShardedDataParallel does; "
                "take fully_shard (FSDP2) with timm_moe.expert_placement, or work on the whole weights, within "
                "FullyShardedDataParallel.summon_full_params or in a model that is not sharded."
            )
    return experts


def _has_parameters(layer: MoeMlp, name: str) -> bool:
    """Whether the module that a parameter of this name belongs to has any."""
    return next(layer.get_submodule(name.rpartition(".")[0]).parameters(), None) is not None


def copy_sharing_tensors(model: ModelT, instead: dict[int, Any] | None = None) -> ModelT:
    """A copy with the very parameters and buffers of the model.

    Args:
        model: any module.
        instead: by the id of a module in it, what the copy has in its place.
    """
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, {**memo, **(instead or {})})


@contextlib.contextmanager
def dense_for_now(model: nn.Module) -> Iterator[None]:
    """Let dense networks stand for the expert layers as long as this lasts; the layers then begin anew as these.

    With it the ``init_weights`` of a stock model reaches the experts too: each family, and each mode, has its own way
    to initialise a feed-forward network. The parameters of the layers stay the same objects.
    """
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, MoeMlp)
    ]
    dense = {layer: layer.to_ffn(average(layer.networks())) for _, _, layer in places}
    for parent, name, layer in places:
        setattr(parent, name, dense[layer])
    try:
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)
    for layer, ffn in dense.items():
        layer.begin_as(ffn)


def without_announcements(model: ModelT) -> ModelT:
    """The same model, which no longer announces its forwards to routers."""
    for module in model.modules():
        for handle, hook in list(module._forward_pre_hooks.items()):
            if hook is begin_forward:
                del module._forward_pre_hooks[handle]
    return model


def to_dense(model: nn.Module, method: str = "average", svd_ratio: float | None = None) -> nn.Module:
    """A new model of stock timm classes in which one feed-forward network stands for the experts of each layer.

    Args:
        model: a model with expert layers; it is left as it is. Wrappers (DDP, torch.compile, EMA) are taken off.
        method: ``"average"``, the mean of the experts (EWA, eq. 7), or one of OneS's: ``"sum"``, ``"topk"``, ``"svd"``;
            see ``timm_moe.gather``. A shared expert counts as one of the experts.
        svd_ratio: of ``"svd"``, the share of the singular values that each expert keeps; 0.75 by default.

    Raises:
        ValueError: if the model has no expert layers or holds them in pieces (FSDP1), the method is unknown or does not
            fit the networks, or ``svd_ratio`` is not above 0 and at most 1.
    """
    model = unwrap_model(model)
    memo = {id(layer): layer for layer in moe_layers(model).values()}  # so that these are not copied
    for layer in memo.values():
        whole_experts(layer)  # raises
    return to_dense_(copy.deepcopy(model, memo), method, svd_ratio)


def to_dense_(model: nn.Module, method: str = "average", svd_ratio: float | None = None) -> nn.Module:
    """As :func:`to_dense`, in place: needs memory for one more dense layer only, since each layer goes before the next.

    Args:
        model: a model with expert layers, without wrappers.
        method: as there.
        svd_ratio: as there.

    Raises:
        ValueError: as there; a model of which only some layers could be gathered is left half done.
    """
    gather = get_method(method, svd_ratio)
    layers = moe_layers(model)
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no expert layers, so it is dense already.")
    for layer in layers.values():
        whole_experts(layer)  # raises
    number, told = len(layers), time.monotonic()
    for done, path in enumerate(list(layers)):
        if method == "svd" or time.monotonic() - told > PROGRESS_INTERVAL:  # which takes seconds for every expert
            told = time.monotonic()
            _logger.info("Gathering %s, layer %s of %s ...", path, done + 1, number)
        layer = layers.pop(path)
        _replace(model, layer, layer.to_ffn(gather(layer.networks())))
    for module in without_announcements(model).modules():
        restore = getattr(module, "restore_stock_class", None)
        if restore is not None:
            restore()
    return model


def ffn_paths(model: nn.Module) -> list[str]:
    """Names of the feed-forward networks that could become experts, in order.

    They are the ``mlp...`` of a numbered block, or of a part of one as MaxViT's ``attn_grid``. Those deeper inside, of
    relative positions for instance, do not map tokens, and a mixer's ``mlp_tokens`` sees all tokens at once.
    """
    return [
        name
        for name, module in model.named_modules()
        if re.search(r"(^|\.)\d+\.(\w+\.)?mlp(?!_tokens)\w*$", name)
        and (isinstance(module, MoeMlp) or _acts_on_each_token(module))
    ]


def _acts_on_each_token(module: nn.Module) -> bool:
    convolutional = any(isinstance(child, nn.Conv2d) for child in module.children())
    return type(module) in FFN_CLASSES and not convolutional and next(module.buffers(), None) is None


def select_blocks(moe_layers: str | int | Iterable[int], depth: int) -> list[int]:
    """Block numbers for a placement rule (see :func:`convert_to_moe`) in a model of ``depth`` blocks.

    Raises:
        ValueError: if the rule is unknown or asks for blocks that the model does not have.
    """
    if isinstance(moe_layers, str):
        rule, _, number = moe_layers.rpartition("-")
        if rule in ("every", "last", "tail") and number.isdecimal():
            return _blocks_by_rule(rule, int(number), depth)
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


def _blocks_by_rule(rule: str, number: int, depth: int) -> list[int]:
    choices = {"every": range(number - 1, depth, max(number, 1)), "last": range(1, depth, 2), "tail": range(depth)}
    blocks = choices[rule]
    if rule == "every":
        available, enough = depth, 1 <= number <= depth
    else:
        available, enough = len(blocks), 1 <= number <= len(blocks)
        blocks = blocks[-number:]
    if not enough:
        kind = "odd-numbered blocks" if rule == "last" else "blocks"
        raise ValueError(
            f"moe_layers='{rule}-{number}' does not fit: n must lie between 1 and {available}, the number of {kind} "
            "with an Mlp."
        )
    return list(blocks)
