"""The share of a model's operations that its routers decide about."""

from argparse import ArgumentParser
from functools import cache

import torch
from timm.utils import ParseKwargs
from torch.utils.flop_counter import FlopCounterMode

from timm_moe import moe_layers
from timm_moe.model_config import model_input_size
from timm_moe.models.registered import weightless_model

from . import rivals  # noqa: F401  (registers their models)
from .deploy import Checkpoint
from .study import Arm, Size


def routed_share(arm: Arm, size: Size) -> float | None:
    """Return the share of routed expert layers in the operations of an arm's evaluation.

    Their routers are included.

    Returns:
        None if the deployed model has no routed layers.
    """
    keeps_experts = isinstance(arm.deployment, Checkpoint) or "--moe" in getattr(
        arm.deployment, "options", ()
    )
    if not keeps_experts:
        return None
    return _routed_share(size.models[arm.training.model], (*size.kwargs, *arm.training.kwargs))


@cache
def _routed_share(name: str, kwargs: tuple[str, ...]) -> float | None:
    parser = ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", action=ParseKwargs, default={})
    stated = parser.parse_args(["--model-kwargs", *kwargs]).model_kwargs if kwargs else {}
    model = weightless_model(name, **stated).eval().requires_grad_(False)
    layers = moe_layers(model).values()
    if all(layer.deploys_dense for layer in layers):  # as where there are none
        return None
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.empty(2, *model_input_size(model), device="meta"))
    counts = counter.get_flop_counts()
    # Blocks may share a layer, which then has the name of one of them.
    names = [
        name for name, module in model.named_modules(remove_duplicate=False) if module in layers
    ]
    routed = sum(sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) for name in names)
    return routed / sum(counts["Global"].values())
