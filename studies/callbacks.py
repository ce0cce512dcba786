"""Additions to timm's train.py: ``python -m studies.script NAME[=VALUE] ... train.py OPTIONS``.

An addition wraps timm's factory of optimizers or schedulers before the script starts.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import timm.layers
import timm.optim
import timm.scheduler
import torch
from torch import nn
from torch.optim import Optimizer

from timm_moe.convert import ffn_paths
from timm_moe.convert.blocks import select_blocks

from . import candidates, device_images
from .rivals import Fusion, SwitchEma, factors, scale_learning_rates


def switch_ema(window: str) -> None:
    """Switch EMA at the end of each epoch; the window of the average is a fraction of an epoch."""

    def attach(optimizer: Optimizer, *, updates_per_epoch: int, **_: Any) -> None:
        SwitchEma(optimizer, 1 - 1 / (float(window) * updates_per_epoch), updates_per_epoch)

    _around(timm.scheduler, "create_scheduler_v2", after=lambda _, arguments: attach(**arguments))


def lr_divided(value: str) -> None:
    """Divide the learning rate of the networks that EWA would convert.

    ``every-2/4`` divides it by 4 in every second block.
    """
    places, divisor = _places_and_divisor(value)

    def divide(optimizer: Optimizer, arguments: dict[str, Any]) -> None:
        _divide(optimizer, arguments["model_or_params"], places, divisor)

    _around(timm.optim, "create_optimizer_v2", after=divide)


def _divide(optimizer: Optimizer, model: nn.Module, places: str, divisor: float) -> None:
    slowed = {
        parameter: 1 / divisor
        for network in _networks(model, places)
        for parameter in network.parameters()
    }
    scale_learning_rates(optimizer, slowed)


def factor_lr(multiplier: str) -> None:
    """Multiply the learning rate of the factors of batch ensembles."""

    def multiply(optimizer: Optimizer, arguments: dict[str, Any]) -> None:
        found = factors(arguments["model_or_params"])
        if not found:
            raise ValueError("The model has no factors of a batch ensemble: take a vit_be_*.")
        scale_learning_rates(optimizer, dict.fromkeys(found, float(multiplier)))

    _around(timm.optim, "create_optimizer_v2", after=multiply)


def begin_divided(value: str) -> None:
    """Divide the initial weights of the networks that EWA would convert.

    ``every-2/2`` gives the size of a mean of four independent networks.
    """
    places, divisor = _places_and_divisor(value)
    _change(lambda model: _divide_weights(model, places, divisor))


@torch.no_grad()
def _divide_weights(model: nn.Module, places: str, divisor: float) -> None:
    for network in _networks(model, places):
        for parameter in network.parameters():
            parameter /= divisor


def _places_and_divisor(value: str) -> tuple[str, float]:
    places, _, divisor = value.rpartition("/")
    return places, float(divisor)


def _networks(model: nn.Module, places: str) -> list[nn.Module]:
    """List the feed-forward networks that EWA would convert."""
    paths = ffn_paths(model)
    return [model.get_submodule(paths[block]) for block in select_blocks(places, len(paths))]


def _freeze_all_but_fusion(model: nn.Module) -> None:
    """Train only the weights that fuse the experts, which were trained before (XFT)."""
    fusions = [module for module in model.modules() if isinstance(module, Fusion)]
    if not fusions:
        raise ValueError(
            "The model has no experts that learned weights fuse: give it router=fused."
        )
    model.requires_grad_(False)
    for fusion in fusions:
        fusion.requires_grad_(True)


def on_device(value: str) -> None:
    """Keep the images on the device, and augment them there."""
    device_images.put_images_on_the_device()


def hold_rate(fraction: str) -> None:
    """Hold the learning rate from this fraction of the updates on.

    Stochastic weight averaging does so.
    """

    def hold(scheduler: Any, updates: int) -> None:
        step = scheduler.step_update
        scheduler.step_update = lambda num_updates, *args, **kwargs: step(
            min(num_updates, updates), *args, **kwargs
        )

    def attach(made: Any, arguments: dict[str, Any]) -> None:
        scheduler, epochs = made
        hold(scheduler, round(float(fraction) * epochs * arguments["updates_per_epoch"]))

    _around(timm.scheduler, "create_scheduler_v2", after=attach)


def plain_attention(value: str) -> None:
    """Compute attention by matrix products.

    On CPUs the backward of torch's fused attention is slow in bfloat16.
    """
    timm.layers.set_fused_attn(False)


def candidate_routers(value: str) -> None:
    """Do nothing, as :mod:`studies.script` has registered the routers.

    Stored trainings are stated with this name.
    """


def _with_model(change: Callable[[nn.Module], object]) -> Callable[[str], None]:
    """Make a callback without a value, which changes the model."""
    return lambda value: _change(change)


def _change(change: Callable[[nn.Module], object]) -> None:
    """Change the model before its optimizer is created."""
    _around(
        timm.optim,
        "create_optimizer_v2",
        before=lambda arguments: change(arguments["model_or_params"]),
    )


def _around(
    module: Any,
    name: str,
    before: Callable[[dict[str, Any]], object] | None = None,
    after: Callable[[Any, dict[str, Any]], object] | None = None,
) -> None:
    """Wrap a factory of timm.

    ``before`` is called with its arguments, ``after`` with its result and its arguments.
    """
    make = getattr(module, name)
    signature = inspect.signature(make)

    @functools.wraps(make)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        if before is not None:
            before(arguments)
        made = make(*args, **kwargs)
        if after is not None:
            after(made, arguments)
        return made

    setattr(module, name, wrapped)


CALLBACKS: dict[str, Callable[[str], None]] = {
    "on_device": on_device,
    "hold_rate": hold_rate,
    "plain_attention": plain_attention,
    "candidate_routers": candidate_routers,
    "switch_ema": switch_ema,
    "lr_divided": lr_divided,
    "factor_lr": factor_lr,
    "begin_divided": begin_divided,
    "only_fusion": _with_model(_freeze_all_but_fusion),
    "rate_by_depth": _with_model(candidates.rate_by_depth),
    "whole_images": _with_model(candidates.whole_images),
    "drop_path_by_expert": _with_model(candidates.drop_path_by_expert),
    **{
        name: _with_model(functools.partial(candidates.follow, name))
        for name in candidates.CANDIDATES
    },
}
