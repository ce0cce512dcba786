"""Outputs of a model before and after its export, and their difference."""

import copy
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from ..console import describe
from .formats import Format, equal_with_nan

_logger = logging.getLogger(__name__)

#: Largest difference of an output, relative to the largest output, that passes.
TOLERANCE = 1e-4


def inputs_for(layout: Format, example_inputs: Any) -> Any:
    """Return the caller's example inputs, or two random images.

    They are in the model's type and on its device. The images are always the same.

    None is returned, with a warning, if a model that is neither of timm nor of transformers does
    not say what it takes.
    """
    if example_inputs is None:
        shape = layout.image_shape()
        if shape is None:
            _logger.warning(
                "The model states no inputs, so its outputs are not compared: pass example_inputs."
            )
            return None
        example_inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    like = next(layout.model.parameters(), torch.empty(0))

    def moved(part: Any) -> Any:
        return (
            part.to(like.device, like.dtype if part.is_floating_point() else None)
            if torch.is_tensor(part)
            else part
        )

    inputs = map_aggregate(
        dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs, moved
    )
    if not _tensors(inputs):
        raise ValueError(
            "example_inputs hold no tensor: pass a tensor, a tuple of arguments or a dict by name."
        )
    return inputs


def source_outputs(model: nn.Module, inputs: Any, allow_nonfinite: bool) -> Any:
    """Run a model before its export.

    Raises:
        ValueError: if the model does not run, or an output is NaN or Inf.
    """
    if inputs is None:
        return None
    try:
        expected = outputs(model, inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(inputs))
        raise ValueError(
            f"The model does not run on inputs of shape {shapes}; pass example_inputs that it "
            f"takes: {describe(error)}"
        ) from error
    if not allow_nonfinite and not all(tensor.isfinite().all() for tensor in _tensors(expected)):
        raise ValueError(
            "The model's weights are finite, but its outputs on random images hold NaN or Inf; "
            "pass --allow-nonfinite (allow_nonfinite=True) to export it all the same."
        )
    return expected


@torch.inference_mode()
def outputs(model: nn.Module, inputs: Any) -> Any:
    """Put a model in eval mode and run it in the type and on the device of its inputs."""
    tensors = _tensors(inputs)
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    if any(
        (tensor.device, tensor.dtype) != (first.device, first.dtype)
        for tensor in model.parameters()
    ):
        dtype = first.dtype if first.is_floating_point() else None
        # The model is copied, as its weights may be the caller's.
        model = copy.deepcopy(model).to(device=first.device, dtype=dtype)
    model.eval()
    devices = [first.device] if first.is_cuda else []
    # Some routers draw noise in eval mode, too, and some models draw a mask.
    with torch.random.fork_rng(devices):
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[at.index] for at in devices),
        ):
            # torch.manual_seed would also seed devices whose state is not put back.
            generator.manual_seed(0)
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def compare(expected: Any, loaded: nn.Module, inputs: Any) -> float | None:
    """Return the largest difference of outputs; None if there are no inputs.

    Raises:
        ValueError: if it is larger than :data:`TOLERANCE` allows.
    """
    if inputs is None:
        return None
    pairs = _tensors(expected), _tensors(outputs(loaded, inputs))
    if [tensor.shape for tensor in pairs[0]] != [tensor.shape for tensor in pairs[1]]:
        raise ValueError(
            "The exported model's outputs are not as many as the source's, or of other shapes."
        )
    return max(map(_difference, *pairs), default=None)


def _difference(expected: Tensor, actual: Tensor) -> float:
    if equal_with_nan(expected, actual):
        return 0.0
    if not expected.is_floating_point():
        expected, actual = expected.double(), actual.double()
    difference = (expected - actual).abs().max().item()
    if not difference <= TOLERANCE * expected.abs().max().item():
        raise ValueError(
            f"The exported model's outputs differ from the source's by {difference:.3g}. A change "
            "of a model since its creation is in no weights: state it, as in "
            "model_args=dict(act_layer='relu'), or undo it."
        )
    return difference


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]
