"""Floating-point operations of a deployed model, and the share that its routers decide about."""

from argparse import ArgumentParser
from functools import cache

import torch
from timm.utils import ParseKwargs
from torch.utils.flop_counter import FlopCounterMode

from timm_moe import moe_layers, to_dense
from timm_moe.model_config import model_input_size
from timm_moe.models.registered import weightless_model

from . import rivals
from .deploy import Checkpoint
from .study import Arm, Size, Training


def operations(arm: Arm, size: Size) -> float:
    """Count the operations of an arm's evaluation, for one image and all members of its ensemble.

    The head has as many classes as the model's default, in all arms.
    """
    return sum(_counted_of(arm, size, training)[0] for training in (arm.training, *arm.beside))


def routed_share(arm: Arm, size: Size) -> float | None:
    """Return the share of routed expert layers in the operations of an arm's evaluation.

    Their routers are included.

    Returns:
        None if the deployed model has no routed layers.
    """
    if not _keeps_experts(arm):
        return None
    total, routed = _counted_of(arm, size, arm.training)
    return routed / total if routed else None


def _keeps_experts(arm: Arm) -> bool:
    return isinstance(arm.deployment, Checkpoint) or "--moe" in getattr(
        arm.deployment, "options", ()
    )


def _counted_of(arm: Arm, size: Size, training: Training) -> tuple[float, float]:
    """Count the operations of one model of an arm: all, and those of its routed layers."""
    options = getattr(arm.measure, "options", ())
    samples = int(options[options.index("--mc-dropout") + 1]) if "--mc-dropout" in options else 1
    kwargs = (*size.kwargs, *training.kwargs)
    return _counted(size.models[training.model], kwargs, _keeps_experts(arm), samples)


@cache
def _counted(
    name: str, kwargs: tuple[str, ...], keeps_experts: bool, samples: int
) -> tuple[float, float]:
    """Count the operations of a model for one image: all, and those of its routed layers."""
    parser = ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", action=ParseKwargs, default={})
    stated = parser.parse_args(["--model-kwargs", *kwargs]).model_kwargs if kwargs else {}
    model = weightless_model(name, **stated).eval().requires_grad_(False)
    layers = moe_layers(model).values()
    if layers and not keeps_experts:
        model = to_dense(model, "sum")
    forward = rivals.with_samples(model, samples).forward_members if samples > 1 else model
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(torch.empty(2, *model_input_size(model), device="meta"))
    counts = counter.get_flop_counts()
    total = sum(counts["Global"].values()) / 2
    if not keeps_experts or all(layer.deploys_dense for layer in layers):
        return total, 0.0
    # Blocks may share a layer, which then has the name of one of them.
    names = [
        name for name, module in model.named_modules(remove_duplicate=False) if module in layers
    ]
    routed = sum(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in names)
    return total, routed / 2
