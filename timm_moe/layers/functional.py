"""Calls of a network with other tensors than its own, and the modes in which a call runs."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy


def with_tensors(
    network: nn.Module, tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], prefix: str = ""
) -> nn.Module:
    """A shallow copy of a network that has these parameters, buffers and submodules instead of its own.

    To change the network during a call, as torch's functional_call does, is not possible in threads (nn.DataParallel)
    and in torch.jit.trace.
    """
    copied = network.__class__.__new__(network.__class__)
    children: dict[str, nn.Module | None] = {}
    for name, child in network._modules.items():
        path = prefix + name
        if path in modules:
            children[name] = modules[path]
        else:
            children[name] = None if child is None else with_tensors(child, tensors, modules, f"{path}.")
    copied.__dict__.update(
        network.__dict__,
        _parameters={name: tensors.get(prefix + name) for name in network._parameters},
        _buffers={name: tensors.get(prefix + name) for name in network._buffers},
        _modules=children,
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
