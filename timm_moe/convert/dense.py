"""From experts back to one network in each block."""

import contextlib
import copy
import logging
import time
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from ..layers import MoeMlp, begin_forward
from .blocks import moe_layers, put_network, unwrapped, whole_experts
from .gather import average, get_method

ModelT = TypeVar("ModelT", bound=nn.Module)

_logger = logging.getLogger(__name__)

#: Seconds between two lines about the progress.
PROGRESS_INTERVAL = 10.0


def to_dense(model: nn.Module, method: str = "average", svd_ratio: float | None = None) -> nn.Module:
    """A new model of stock timm classes in which one feed-forward network stands for the experts of each layer.

    Args:
        model: a model with expert layers; it is left as it is. Wrappers (DDP, torch.compile, EMA) are taken off.
        method: ``"average"``, the mean of the experts (EWA, eq. 7), or one of OneS's: ``"sum"``, ``"topk"``,
            ``"topk_biases"``, ``"svd"``, ``"random"``; see ``timm_moe.convert.gather``. A shared expert counts as one
            of the experts.
        svd_ratio: of ``"svd"``, the share of the singular values that each expert keeps; 0.75 by default.

    Raises:
        ValueError: if the model has no expert layers or holds them in pieces (FSDP1), the method is unknown or does not
            fit the networks (only ``"average"`` fits fused ones), or ``svd_ratio`` is not above 0 and at most 1.
    """
    model = unwrapped(model)
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
    for path, layer in layers.items():
        whole_experts(layer)  # raises
        if layer.fused and method != "average":
            raise ValueError(
                f"The experts in {path} are fused: they are one network, so method={method!r} has no place."
            )
    number, told = len(layers), time.monotonic()
    for done, path in enumerate(list(layers)):
        if method == "svd" or time.monotonic() - told > PROGRESS_INTERVAL:  # which takes seconds for every expert
            told = time.monotonic()
            _logger.info("Gathering %s, layer %s of %s ...", path, done + 1, number)
        layer = layers.pop(path)
        put_network(model, path, layer, layer.to_ffn(gather(layer.stacked_weights())))
    for module in without_announcements(model).modules():
        restore = getattr(module, "restore_stock_class", None)
        if restore is not None:
            restore()
    return model


@contextlib.contextmanager
def swapped_for_dense(model: nn.Module) -> Iterator[None]:
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
    dense = {layer: layer.to_ffn(average(layer.stacked_weights())) for _, _, layer in places}
    for parent, name, layer in places:
        setattr(parent, name, dense[layer])
    try:
        yield
    finally:
        for parent, name, layer in places:
            setattr(parent, name, layer)
    for layer, ffn in dense.items():
        layer.reset_from_dense(ffn)


def without_announcements(model: ModelT) -> ModelT:
    """The same model, which no longer announces its forwards to routers."""
    for module in model.modules():
        for handle, hook in list(module._forward_pre_hooks.items()):
            if hook is begin_forward:
                del module._forward_pre_hooks[handle]
    return model
