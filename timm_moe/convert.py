"""An Mlp becomes a MoeMlp in chosen blocks, and back."""

import copy
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models import register_notrace_module
from timm.utils import unwrap_model
from torch import nn

from .gather import get_gather
from .layers import MoeMlp
from .schedules import check_share_rate, get_schedule

ModelT = TypeVar("ModelT", bound=nn.Module)

#: Feed-forward networks that act on each token by itself.
FFN_CLASSES = (Mlp, GluMlp, SwiGLU)
ROUTERS = ("random",)

register_notrace_module(MoeMlp)  # its row count is data to torch.fx, so timm's feature extraction keeps it as a leaf


def convert_to_moe(
    model: ModelT,
    num_experts: int = 4,
    moe_layers: str | int | Iterable[int] = "every-2",
    router: str = "random",
    expert_init: str = "same",
    share_rate: float = 0.3,
    share_schedule: str = "linear",
    eval_mode: str = "average",
) -> ModelT:
    """Replace the feed-forward networks of some blocks of a timm model by expert layers, in place.

    Args:
        model: a timm model whose numbered blocks hold an ``mlp`` (ViT, DeiT, Swin, ...).
        num_experts: E, the number of experts in each layer.
        moe_layers: which blocks, counted from 0 over the whole model. ``"every-n"``: blocks n-1, 2n-1, ...;
            ``"last-n"``: the last n odd blocks, as in V-MoE; ``"tail-n"``: the last n blocks; or block numbers, as
            ``"1,3,5"`` or as integers.
        router: ``"random"``, the random partition of EWA.
        expert_init: ``"same"`` copies the weights of the dense network into every expert (sparse upcycling),
            ``"independent"`` draws them anew at the scale of the initial weights (for training from scratch).
        share_rate: how far the experts are averaged after each optimizer step, in [0, (E - 1) / E].
        share_schedule: its course over training: ``"linear"``, ``"constant"``, ``"early"`` or ``"late"``.
        eval_mode: ``"average"`` evaluates the mean of the experts, which is what is exported; ``"partition"``
            evaluates the experts on random partitions (for analysis).

    Returns:
        The same model.

    Raises:
        ValueError: if an option is not one of the above or the model has no block that can be converted; the model
            is then unchanged.
    """
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {', '.join(ROUTERS)}, got {router!r}.")
    if not isinstance(num_experts, int) or isinstance(num_experts, bool) or num_experts < 1:
        raise ValueError(f"num_experts must be an integer of at least 1, got {num_experts!r}.")
    check_share_rate(share_rate, num_experts)
    get_schedule(share_schedule)
    paths = ffn_paths(model)
    if not paths:
        raise ValueError(
            f"{type(model).__name__} has no numbered block with an mlp of linear layers that could become experts."
        )
    chosen = [paths[block] for block in select_blocks(moe_layers, len(paths))]
    for path in chosen:
        if isinstance(model.get_submodule(path), MoeMlp):
            raise ValueError(f"{path} is an expert layer already.")
    layers = {
        path: MoeMlp(model.get_submodule(path), num_experts, expert_init, share_rate, share_schedule, eval_mode)
        for path in chosen
    }
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.train(model.training))
    return model


def moe_layers(model: nn.Module) -> dict[str, MoeMlp]:
    """The expert layers of a model by name, in order: ``{"blocks.1.mlp": MoeMlp, ...}``."""
    return {name: module for name, module in unwrap_model(model).named_modules() if isinstance(module, MoeMlp)}


def to_dense(model: nn.Module, method: str = "average") -> nn.Module:
    """A new model of stock timm classes in which one feed-forward network stands for the experts of each layer.

    Args:
        model: a model with expert layers; it is left as it is. Wrappers (DDP, torch.compile, EMA) are taken off.
        method: ``"average"``, the mean of the experts (EWA, eq. 7).

    Raises:
        ValueError: if the model has no expert layers or the method is unknown.
    """
    gather = get_gather(method)
    model = unwrap_model(model)
    layers = moe_layers(model)
    if not layers:
        raise ValueError(f"This {type(model).__name__} has no expert layers, so it is dense already.")
    # Standing in the memo, the dense networks take the place of the expert layers, which are never copied.
    memo: dict[int, Any] = {id(layer): gather(layer) for layer in layers.values()}
    dense = copy.deepcopy(model, memo)
    for module in dense.modules():
        restore = getattr(module, "restore_stock_class", None)
        if restore is not None:
            restore()
    return dense


def ffn_paths(model: nn.Module) -> list[str]:
    """Names of the feed-forward networks that sit directly in a numbered block, in order."""
    return [
        name
        for name, module in model.named_modules()
        if re.search(r"(^|\.)\d+\.mlp$", name)
        and (isinstance(module, MoeMlp) or type(module) in FFN_CLASSES)
        and not any(isinstance(child, nn.Conv2d) for child in module.children())
    ]


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
