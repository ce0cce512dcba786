"""Calls of a network with other tensors than its own, and the modes in which a call runs."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Proxy


def call(network: nn.Module, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
    """Run ``network`` with these parameters and buffers instead of its own.

    functional_call changes the module during the call, which threads (nn.DataParallel) and torch.jit.trace do not
    allow. So only torch.compile takes it; elsewhere a shallow copy of the network holds the tensors.
    """
    if torch.compiler.is_compiling():
        return functional_call(network, tensors, (x,))
    return with_tensors(network, tensors)(x)


def with_tensors(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> nn.Module:
    """A shallow copy of a module and its submodules that holds only these parameters and buffers."""
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


def kept_whole(module: nn.Module, x: Proxy) -> Proxy:
    """Make one node of a module in a graph of torch.fx, as timm's tracer does; torchvision's knows no such modules."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x,), {})


def no_autocast(x: Tensor) -> Any:
    """A context in which operators on x compute in the types of their inputs; the meta device has no autocast."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def in_plain_operators() -> bool:
    """True while a trace or an ONNX file is made, which others read without this package's operators."""
    return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()
