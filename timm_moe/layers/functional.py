"""Calling a network with tensors in the place of its own, and without autocast."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call


def call(network: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run ``network`` with parameters and buffers in the place of its own.

    torch.compile follows functional_call; elsewhere a shallow copy takes them, because functional_call changes the
    module for the time of the call, which neither threads (nn.DataParallel) nor torch.jit.trace bear.
    """
    if torch.compiler.is_compiling():
        return functional_call(network, tensors, (x,))
    return with_tensors(network, tensors)(x)


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """A shallow copy of a module and its submodules that holds these parameters and buffers, and no others."""
    copied = module.__class__.__new__(module.__class__)
    copied.__dict__.update(
        module.__dict__,
        _parameters={name: tensors.get(prefix + name) for name in module._parameters},
        _buffers={name: tensors.get(prefix + name) for name in module._buffers},
        _modules={
            name: child and with_tensors(child, tensors, f"{prefix}{name}.") for name, child in module._modules.items()
        },
    )
    return copied


def no_autocast(x: Tensor) -> Any:
    """A context in which operators on x compute in the types that they are given."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)  # there is none for meta
