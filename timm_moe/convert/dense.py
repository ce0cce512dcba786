"""The way back: one network instead of the experts in each block."""

import contextlib
import logging
from collections.abc import Iterator

from torch import nn

from .blocks import put
from .expert_layers import moe_layers, whole_experts
from .gather import get_method
from .hooks import remove_hooks
from .wrappers import copied, is_sharded, unwrapped

_logger = logging.getLogger(__name__)


def to_dense(
    model: nn.Module, method: str = "average", svd_ratio: float | None = None
) -> nn.Module:
    """Make a new dense model: one feed-forward network takes the place of each layer's experts.

    The new model is of stock classes of timm, or of the library that the model comes from.

    Args:
        model: a model with expert layers; it is not changed. Wrappers (DDP, torch.compile, EMA) are
            taken off. The new model has its modes, and is frozen where it is.
        method: ``"average"``, the mean of the experts (EWA, eq. 7), or one of OneS's: ``"sum"``,
            ``"topk"``, ``"svd"``, ``"random"``; see ``timm_moe.convert.gather``. Only for EWA does
            the mean compute what the model computes in eval mode; otherwise a warning says that
            the new model does not. A shared expert counts as one of the experts. Experts of a part
            of the hidden units (``expert_width``) are first joined to whole networks.
        svd_ratio: of ``"svd"``, the share of the sum of the singular values that each expert keeps;
            0.75 by default.

    Raises:
        ValueError: if the model has no expert layers or holds them in pieces (FSDP), some of its
            weights are elsewhere (offloaded by accelerate) or computed (pruned, with adapters that
            are not merged), it has a layer that no stock model has (``pre_logits``), the method is
            unknown or does not fit the networks, ``num_experts`` leaves parts over, or
            ``svd_ratio`` is not above 0 and at most 1.
    """
    model = unwrapped(model)
    require_weights(model, allow_meta=True)
    layers = moe_layers(model)
    for layer in layers.values():
        whole_experts(layer)  # raises
    is_ewa = all(layer.deploys_dense for layer in layers.values())
    if layers and not (is_ewa and method == "average"):
        remedy = "take method='average', which is exact" if is_ewa else "train it further"
        _logger.warning(
            "The dense model computes another function than the one with experts in %s: %s "
            "(docs/ones.md).",
            next(iter(layers)),
            remedy,
        )
    memo = {id(layer): layer for layer in layers.values()}  # deepcopy leaves them alone
    return to_dense_(copied(model, memo), method, svd_ratio)


def to_dense_(
    model: nn.Module, method: str = "average", svd_ratio: float | None = None
) -> nn.Module:
    """Do the work of :func:`to_dense` in place, on a model without wrappers.

    It goes layer by layer, so it needs memory for one more dense layer only. If gathering fails at
    a later layer, the earlier ones stay dense.
    """
    gather = get_method(method, svd_ratio)
    layers = moe_layers(model)
    if not layers:
        raise ValueError(
            f"This {type(model).__name__} has no expert layers, so it is dense already."
        )
    for path in list(layers):
        if method == "svd":  # It takes seconds for every expert.
            _logger.info("Gathering %s, %s layers left ...", path, len(layers))
        layer = layers.pop(path)  # nothing else keeps it in memory
        put(model, path, layer, layer.to_ffn(gather(layer.stacked_weights())))
    for module in model.modules():
        remove_hooks(module)
        restore = getattr(module, "restore_stock_class", None)  # of the classes in models/
        if restore is not None:
            restore()
    return model


def require_weights(model: nn.Module, allow_meta: bool = False) -> None:
    """Refuse a model with weights that are not here.

    Weights may be spread over processes (FSDP2), which would wait for each other, or have no
    values: they are offloaded, or were not loaded.

    Args:
        model: the model.
        allow_meta: allow a model that is on the meta device as a whole.

    Raises:
        ValueError: if weights are spread or missing; the message names the remedy.
    """
    spread = [name for name, parameter in model.named_parameters() if is_sharded(parameter)]
    if spread:
        raise ValueError(
            f"{spread[0]} is spread over processes (FSDP2): call get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) of "
            "torch.distributed.checkpoint.state_dict in all of them, and load what it returns into "
            "a model that is not sharded."
        )
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if missing and (is_offloaded or not allow_meta or len(missing) < len(list(model.parameters()))):
        raise ValueError(
            f"{missing[0]} has no values here, since it is offloaded or was not loaded: load the "
            "whole model, or bring offloaded weights back by "
            "accelerate.hooks.remove_hook_from_submodules(model)."
        )


@contextlib.contextmanager
def swapped_for_dense(model: nn.Module) -> Iterator[None]:
    """Swap in dense layers for the block of code; at its end, reinitialise the experts from them.

    So a stock model's own ``init_weights`` initialises experts too. The experts' parameters stay
    the same objects.
    """
    swaps = [
        (path, layer, layer.to_ffn(layer.mean_network()))
        for path, layer in moe_layers(model).items()
    ]
    for path, layer, ffn in swaps:
        put(model, path, layer, ffn)
    try:
        yield
    finally:
        for path, layer, ffn in swaps:
            put(model, path, ffn, layer)
    for _, layer, ffn in swaps:
        layer.reset_from_dense(ffn)
