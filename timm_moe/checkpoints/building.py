"""A description and weights become a model, or it is said why they do not fit each other.

A model is built twice: first without memory for its weights, to compare those of the file.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from ..console import describe, shortened
from ..models.registered import weightless
from ..quick_init import quick_init
from .description import Blueprint
from .layouts import require_kinds, without_wrapper
from .reading import require_intact


@dataclass(frozen=True)
class Fit:
    """A model that weights fit."""

    blueprint: Blueprint
    weights: dict[str, Tensor]  # by the model's names
    dense: set[str]  # names of those that are a dense network's, where the model has experts


def create(blueprint: Blueprint) -> nn.Module:
    """Create the model of a description, with weights that are drawn."""
    args = {option: value for option, value in blueprint.args.items() if value is not None}
    return timm.create_model(
        blueprint.architecture, pretrained_cfg=blueprint.pretrained_cfg, **args
    )


def fitted(blueprint: Blueprint, weights: dict[str, Tensor], path: Path) -> Fit:
    """Compare weights with a model that is built without memory for its own.

    Args:
        blueprint: of the model.
        weights: by their names in the file.
        path: of the file, for messages.

    Returns:
        What fits. Only beside a dense network's weights may those of routers be missing, which
        ``MoeMlp`` adds.

    Raises:
        ValueError: if the model cannot be created, or the weights have other names or shapes than
            the model's, are of another kind, or of some layers only.
    """
    try:
        with weightless():
            sketch = create(blueprint)
    except Exception as error:  # arguments may end in anything
        raise ValueError(
            f"{blueprint.architecture} cannot be created: {first_problem(error)}"
        ) from error

    expected = sketch.state_dict()
    taken = without_wrapper(weights, expected, path)
    try:
        sketch.load_state_dict({key: tensor.to("meta") for key, tensor in taken.items()})
    except (RuntimeError, ValueError) as error:
        classes = _number_of_classes(sketch, taken)
        if classes != sketch.num_classes:
            raise ValueError(
                f"they are of {classes} classes, not {sketch.num_classes}: state --num-classes "
                f"{classes}."
            ) from error
        raise ValueError(first_problem(error)) from error
    require_kinds(taken, expected, path)
    shared = taken.keys() & expected.keys()
    return Fit(blueprint, taken, {key for key in shared if taken[key].ndim < expected[key].ndim})


def _number_of_classes(model: Any, weights: Mapping[str, Tensor]) -> int:
    """Return the number of classes of weights, by the classifier of the model that they may fit.

    It is the model's own where this cannot be told.
    """
    classifier = model.pretrained_cfg.get("classifier")
    bias = weights.get(f"{classifier}.bias")
    return len(bias) if bias is not None and bias.ndim == 1 else int(model.num_classes)


def loaded(fit: Fit, path: Path) -> nn.Module:
    """Create a model and load weights that fit it; beside a dense network's, routers are drawn.

    The model is not the one that was compared: buffers that no file holds have their values from
    the constructor.
    """
    require_intact(path, fit.weights)
    with nullcontext() if fit.dense else quick_init():
        model = create(fit.blueprint)
    model.load_state_dict(fit.weights)
    return model


def first_problem(error: Exception) -> str:
    """Return the first problem of each kind that a load_state_dict lists, or the error itself."""
    heading, *lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if not (lines and heading.startswith("Error(s) in loading")):
        return describe(error)
    of_kind: dict[str, list[str]] = {}  # missing, unexpected, of another size
    for line in lines:
        of_kind.setdefault(line.split()[0], []).append(shortened(line, 200))
    return " ".join(
        first if not others else f"{first} (and {len(others)} more)"
        for first, *others in of_kind.values()
    )
