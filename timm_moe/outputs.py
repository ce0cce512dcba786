"""Outputs of models, with the same random numbers each time, and the tensors in them."""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Begin the same random numbers in each such block, and put the generators back at its end.

    Some routers draw noise in eval mode, too, and some models draw a mask.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[at.index] for at in devices),
        ):
            # torch.manual_seed would also seed devices whose state is not put back.
            generator.manual_seed(0)
        yield


@torch.inference_mode()
def outputs(model: nn.Module, inputs: Any) -> Any:
    """Put a model in eval mode and run it in the type and on the device of its inputs."""
    tensors = tensors_in(inputs)
    first = next((tensor for tensor in tensors if tensor.is_floating_point()), tensors[0])
    if any(
        (tensor.device, tensor.dtype) != (first.device, first.dtype)
        for tensor in model.parameters()
    ):
        dtype = first.dtype if first.is_floating_point() else None
        # The model is copied, as its weights may be the caller's.
        model = copy.deepcopy(model).to(device=first.device, dtype=dtype)
    model.eval()
    with seeded(first.device):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (tuple, list)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]
