"""The modes in which a call runs, and calls of a network or an autograd function."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.fx import Proxy

#: Whether this torch has a flag that it does not document.
_HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


class Mode(Enum):
    """Mode of a call: what becomes of its operators.

    A layer asks :func:`current_mode` once and passes the answer on.
    """

    EAGER = auto()
    COMPILED = auto()  # by torch.compile
    EXPORTED = auto()  # by torch.export, for any batch
    TRACED = auto()  # by torch.jit.trace
    ONNX = auto()  # by an exporter of torch.onnx

    @property
    def is_plain(self) -> bool:
        """Tell if the graph runs where this package's operators are unknown."""
        return self in (Mode.TRACED, Mode.ONNX)


def is_intercepted(module: nn.Module) -> bool:
    """Tell if hooks, or a forward that was replaced, act in calls of a module."""
    return has_hooks(module) or "forward" in vars(module)


def has_hooks(module: nn.Module) -> bool:
    """Tell if hooks act in calls of a module, or in their backward passes."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks)


def current_mode() -> Mode:
    """Tell in which mode the present call runs."""
    is_exporting, is_compiling = _is_exporting(), torch.compiler.is_compiling()
    is_tracing = torch.jit.is_tracing()
    if not (is_exporting or is_compiling or is_tracing):
        return Mode.EAGER
    # ONNX comes before the others, since its exporters trace or export.
    if torch.onnx.is_in_onnx_export():
        return Mode.ONNX
    if is_exporting:
        return Mode.EXPORTED
    return Mode.COMPILED if is_compiling else Mode.TRACED


def _is_exporting() -> bool:
    """Tell if torch.export traces this call."""
    # Before torch 2.14 torch.compiler.is_exporting() is a constant True in compiled code, unlike
    # the flag behind it.
    return torch.compiler._is_exporting_flag if _HAS_FLAG else torch.compiler.is_exporting()


def call_with(
    network: nn.Module,
    tensors: Mapping[str, Tensor | None],
    modules: Mapping[str, nn.Module],
    x: Tensor,
    mode: Mode,
) -> Tensor:
    """Call a network with other parameters, buffers and submodules than its own.

    Args:
        network: the network.
        tensors: the parameters and buffers by their names in it.
        modules: the submodules by their names in it.
        x: the network's input.
        mode: mode of the call.
    """
    if mode is not Mode.COMPILED:
        return with_tensors(network, tensors, modules)(x)
    # Before torch 2.14 Dynamo cannot trace how a copy is made.
    for path, module in modules.items():
        if network.get_submodule(path) is not module:
            network.set_submodule(path, module)
    return torch.func.functional_call(network, dict(tensors), (x,))  # type: ignore[arg-type]


def with_tensors(
    network: nn.Module,
    tensors: Mapping[str, Tensor | None],
    modules: Mapping[str, nn.Module],
    prefix: str = "",
) -> nn.Module:
    """Make a shallow copy of a network with other parameters, buffers and submodules than its own.

    torch's functional_call changes the network during a call instead, which is not possible in
    threads (nn.DataParallel) and in torch.jit.trace.

    Args:
        network: the network.
        tensors: the parameters and buffers by their names in the whole network.
        modules: the submodules by their names in the whole network.
        prefix: beginning of the names within this network, if it is a part.
    """
    copied = network.__class__.__new__(network.__class__)
    children: dict[str, nn.Module | None] = {}
    for name, child in network._modules.items():
        path = prefix + name
        if path in modules:
            children[name] = modules[path]
        else:
            children[name] = (
                None if child is None else with_tensors(child, tensors, modules, f"{path}.")
            )
    copied.__dict__.update(
        network.__dict__,
        _parameters={name: tensors.get(prefix + name) for name in network._parameters},
        _buffers={name: tensors.get(prefix + name) for name in network._buffers},
        _modules=children,
    )
    return copied


def fast_apply(function: Any, is_operator: bool = False) -> Callable[..., Any]:
    """Return ``function.apply`` without torch's binding of arguments.

    The binding takes 27 µs of a call's 35 µs (a CPU, torch 2.14). Only torch.func and Dynamo need
    ``setup_context``, for which torch does it. Without gradients the autograd function is only
    needed in forward mode, where it raises an error; bare operators would give zeros. vmap is
    refused in words of its own.

    Args:
        function: an autograd function that has a ``setup_context``.
        is_operator: it calls an operator of this package, whose formulas compilers know.
    """

    def forward(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    function.vmap = staticmethod(_refuse_vmap)
    methods = dict(forward=staticmethod(forward), backward=staticmethod(function.backward))
    in_one_step: Any = type(function.__name__, (torch.autograd.Function,), methods)

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return (function.forward if is_operator else function.apply)(*args)
        if _are_transforms_active():
            return function.apply(*args)
        if torch.is_grad_enabled() or any(map(_is_dual, args)):
            return in_one_step.apply(*args)
        return function.forward(*args)

    return call


def _refuse_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    """Raise RuntimeError: what an entry of the batch computes depends on where its rows go."""
    raise RuntimeError(
        "Experts do not run under torch.func.vmap (per-sample gradients, Jacobians), as each entry "
        "would send its tokens elsewhere: loop over the images, or take a dense model of "
        "timm_moe.to_dense."
    )


def _always() -> bool:
    return True


# torch.autograd.Function itself asks this. In a torch without it every call is as under torch.func,
# which takes longer.
_are_transforms_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", _always
)


def _is_dual(x: Any) -> bool:
    """Tell if forward-mode differentiation goes through a tensor."""
    return isinstance(x, Tensor) and unpack_dual(x).tangent is not None


def kept_whole(module: nn.Module, x: Proxy) -> Proxy:
    """Make one node of a module in a graph of torch.fx, which cannot follow row counts of data."""
    tracer: Any = x.tracer
    return tracer.create_proxy("call_module", tracer.path_of_module(module), (x,), {})


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the type to which autocast casts a linear layer's inputs; None if it does not."""
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def no_autocast(x: Tensor) -> Any:
    """Return a context in which operators on x compute in the types of their inputs.

    The meta device has no autocast, so nothing is needed there.
    """
    is_needed = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_needed else nullcontext()
