"""Outputs of a model before and after its export, and their difference."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from ..console import describe
from ..model_config import get_pretrained_cfg, is_of_timm, model_input_size
from ..outputs import outputs, tensors_in
from .formats import is_of_transformers

_logger = logging.getLogger(__name__)

#: Largest difference of an output, relative to the largest output, that passes.
TOLERANCE = 1e-4


def inputs_for(model: nn.Module, example_inputs: Any) -> Any:
    """Return the caller's example inputs, or two random images.

    They are in the model's type and on its device. The images are always the same.

    None is returned, with a warning, if a model that is neither of timm nor of transformers does
    not say what it takes.

    Raises:
        ValueError: if the example inputs hold no tensor, or the config of a model of transformers
            does not say which images it takes.
    """
    if example_inputs is None:
        shape = _image_shape(model)
        if shape is None:
            _logger.warning(
                "The model states no inputs, so its outputs are not compared: pass example_inputs."
            )
            return None
        generator = torch.Generator("cpu").manual_seed(0)
        example_inputs = torch.randn(2, *shape, generator=generator, device="cpu")
    like = next(model.parameters(), torch.empty(0))

    def moved(part: Any) -> Any:
        return (
            part.to(like.device, like.dtype if part.is_floating_point() else None)
            if torch.is_tensor(part)
            else part
        )

    inputs = map_aggregate(
        dict(example_inputs) if isinstance(example_inputs, Mapping) else example_inputs, moved
    )
    if not tensors_in(inputs):
        raise ValueError(
            "example_inputs hold no tensor: pass a tensor, a tuple of arguments or a dict by name."
        )
    return inputs


def _image_shape(model: Any) -> tuple[int, ...] | None:
    """Return the (C, H, W) of the images that a model takes; None if it does not state them.

    Raises:
        ValueError: if the config of a model of transformers does not.
    """
    if is_of_timm(model):
        return model_input_size(model)
    if not is_of_transformers(model):
        size = getattr(model, "image_size", None)  # of torchvision's VisionTransformer
        return (3, size, size) if type(size) is int else None
    if model.main_input_name == "pixel_values":
        for config in (model.config, getattr(model.config, "vision_config", None)):
            size = getattr(config, "image_size", None)
            channels = getattr(config, "num_channels", None)
            if size and channels:
                return channels, *((size, size) if isinstance(size, int) else size)
    raise ValueError(
        "The model's config does not say which images the model takes: pass example_inputs."
    )


def source_outputs(model: nn.Module, inputs: Any) -> Any:
    """Run a model before its export.

    Raises:
        ValueError: if the model does not run, or an output is NaN or Inf.
    """
    if inputs is None:
        return None
    try:
        expected = outputs(model, inputs)
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_in(inputs))
        remedy = _remedy_of_stem(model) or "pass example_inputs that it takes"
        raise ValueError(
            f"The model does not run on inputs of shape {shapes}; {remedy}: {describe(error)}"
        ) from error
    if not all(tensor.isfinite().all() for tensor in tensors_in(expected)):
        raise ValueError(
            "The model's weights are finite, but its outputs hold NaN or Inf, so it is not "
            "exported."
        )
    return expected


def _remedy_of_stem(model: nn.Module) -> str | None:
    """Say what mends a timm model whose first convolution takes other channels than it states."""
    name = get_pretrained_cfg(model).get("first_conv")
    if not isinstance(name, str):  # Several models have none, or several.
        return None
    weight = getattr(dict(model.named_modules()).get(name), "weight", None)
    if weight is None or weight.shape[1] == model_input_size(model)[0]:
        return None
    channels = weight.shape[1]
    return f"if its images have {channels} channels as {name} has, set model.in_chans = {channels}"


def compare(expected: Any, loaded: nn.Module, inputs: Any) -> float | None:
    """Return the largest difference of outputs; None if there are no inputs, or no outputs.

    Raises:
        ValueError: if the outputs have other shapes, or differ by more than :data:`TOLERANCE`
            allows.
    """
    if inputs is None:
        return None
    pairs = tensors_in(expected), tensors_in(outputs(loaded, inputs))
    if [tensor.shape for tensor in pairs[0]] != [tensor.shape for tensor in pairs[1]]:
        raise ValueError(
            "The exported model's outputs are not as many as the source's, or of other shapes."
        )
    return max(map(_difference, *pairs), default=None)


def _difference(expected: Tensor, actual: Tensor) -> float:
    if torch.equal(expected, actual):
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
