"""Products of the experts' rows with stacked matrices, as operators that compilers know.

The rows of each expert are a run: expert e has the rows from ``end_E[e - 1]`` to ``end_E[e]``. No shape depends on the
lengths of the runs. With ``end_E`` on the CPU nothing waits for a GPU, and with ``end_E`` on a GPU nothing does where
:func:`multiplies_by_offsets`; elsewhere each product waits for the lengths.

Shape suffixes: N rows, D width of the inputs, H of the outputs, E experts.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.utils.flop_counter import register_flop_formula


def grouped_linear(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor) -> Tensor:
    """``x @ weight[e].T + bias[e]`` for each run of rows, (N, H); zero for rows after the last run.

    Under autocast it computes in autocast's dtype, as ``torch.nn.functional.linear`` does.

    Args:
        x_ND: rows in the order of the experts.
        weight_EHD: E times ``nn.Linear.weight``.
        bias_EH: E times ``nn.Linear.bias``, or None.
        end_E: integers that do not decrease, at most N.

    Raises:
        RuntimeError: if widths, dtypes or devices do not fit each other, and in forward-mode differentiation.
    """
    dtype = _autocast_dtype(x_ND)
    if dtype is not None:
        x_ND, weight_EHD = x_ND.to(dtype), weight_EHD.to(dtype)
        bias_EH = bias_EH if bias_EH is None else bias_EH.to(dtype)
    return _call(_Linear, x_ND, weight_EHD, bias_EH, end_E)


def spread_over_rows(stacked_EH: Tensor, end_E: Tensor, rows: int) -> Tensor:
    """(N, H): for each row the vector of its expert; zero after the last run."""
    nothing_ND, nothing_EHD = stacked_EH.new_empty(rows, 0), stacked_EH.new_empty(*stacked_EH.shape, 0)
    return _call(_Linear, nothing_ND, nothing_EHD, stacked_EH, end_E)  # a bias alone


def _call(function: Any, *args: Any) -> Any:
    """Avoid an autograd function where it only takes time; in forward mode it raises, and the bare operator gives 0."""
    if torch.compiler.is_compiling():
        return function.forward(*args)
    is_dual = (isinstance(x, Tensor) and unpack_dual(x).tangent is not None for x in args)
    return (function.apply if torch.is_grad_enabled() or any(is_dual) else function.forward)(*args)


# Each of the two is the other's derivative. torch.func needs them: it knows no formulas of operators.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor) -> Tensor:
        return torch.ops.timm_moe.grouped_linear(x_ND, weight_EHD, bias_EH, end_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_ND, weight_EHD, _, end_E = inputs
        ctx.save_for_backward(x_ND, weight_EHD, end_E)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EHD, end_E = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = _call(_Linear, grad_NH, weight_EHD.transpose(1, 2), None, end_E) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight or needs_bias:
            grad_weight, grad_bias = _call(_Outer, grad_NH, x_ND, end_E, needs_bias)
        return grad_x, grad_weight, grad_bias if needs_bias else None, None


class _Outer(torch.autograd.Function):
    @staticmethod
    def forward(y_NH: Tensor, x_ND: Tensor, end_E: Tensor, with_sum: bool) -> tuple[Tensor, Tensor]:
        return torch.ops.timm_moe.grouped_outer(y_NH, x_ND, end_E, with_sum)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.with_sum = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad_EHD: Tensor, grad_EH: Tensor) -> tuple[Tensor | None, ...]:
        y_NH, x_ND, end_E = ctx.saved_tensors
        needs_y, needs_x, *_ = ctx.needs_input_grad
        grad_y = _call(_Linear, x_ND, grad_EHD, grad_EH if ctx.with_sum else None, end_E) if needs_y else None
        grad_x = _call(_Linear, y_NH, grad_EHD.transpose(1, 2), None, end_E) if needs_x else None
        return grad_y, grad_x, None, None


_SCHEMAS = {
    "timm_moe::grouped_linear": "(Tensor x, Tensor weight, Tensor? bias, Tensor end) -> Tensor",
    "timm_moe::grouped_outer": "(Tensor y, Tensor x, Tensor end, bool with_sum) -> (Tensor, Tensor)",
}
for _name, _schema in _SCHEMAS.items():
    # They may read their last tensor on the host, which a CUDA graph would not repeat.
    torch.library.define(_name, _schema, tags=torch.Tag.cudagraph_unsafe)


@torch.library.impl("timm_moe::grouped_linear", "CompositeExplicitAutograd")
def _linear_of_runs(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor) -> Tensor:
    if _is_by_offsets(x_ND, weight_EHD, end_E):
        return _linear_on_gpu(x_ND, weight_EHD, bias_EH, end_E)
    y_NH = _linear_of_shapes(x_ND, weight_EHD, bias_EH, end_E)
    sizes = sizes_of_runs(end_E, x_ND)
    weights = weight_EHD.transpose(1, 2).unbind()
    biases = len(weights) * [None] if bias_EH is None else bias_EH.unbind()
    *outputs, rest = y_NH.split(sizes)
    for x, weight, bias, y, size in zip(x_ND.split(sizes), weights, biases, outputs, sizes, strict=False):
        if size and bias is not None:
            torch.addmm(bias, x, weight, out=y)
        elif size:
            torch.mm(x, weight, out=y)
    rest.zero_()
    return y_NH


@torch.library.impl("timm_moe::grouped_outer", "CompositeExplicitAutograd")
def _outer_of_runs(y_NH: Tensor, x_ND: Tensor, end_E: Tensor, with_sum: bool) -> tuple[Tensor, Tensor]:
    if _is_by_offsets(x_ND, y_NH, end_E):
        return _outer_on_gpu(y_NH, x_ND, end_E, with_sum)
    product_EHD, total_EH = _outer_of_shapes(y_NH, x_ND, end_E, with_sum)
    sizes = sizes_of_runs(end_E, x_ND)
    runs = zip(y_NH.split(sizes), x_ND.split(sizes), product_EHD.unbind(), total_EH.unbind(), sizes, strict=False)
    for y, x, product, total, size in runs:
        if not size:
            product.zero_()
            total.zero_()
            continue
        torch.mm(y.t(), x, out=product)
        if with_sum:
            torch.sum(y, 0, out=total)
    return product_EHD, total_EH


def sizes_of_runs(end_E: Tensor, x_ND: Tensor) -> list[int]:
    """Number of rows of each expert (on meta equally many) and after the last run; the host waits for a GPU's."""
    rows, experts = x_ND.shape[0], end_E.shape[0]
    ends = [rows * (expert + 1) // experts for expert in range(experts)] if end_E.is_meta else end_E.tolist()
    return [end - start for start, end in itertools.pairwise([0, *ends, rows])]


def multiplies_by_offsets(x_ND: Tensor, *widths: int) -> bool:
    """Tell if ``torch.nn.functional.grouped_mm`` multiplies rows by matrices of these widths without a wait.

    It has kernels for CUDA devices of capability 9 and 10 alone, in bfloat16, and from CUDA 13.3 on in float16; its
    fallback for others copies the offsets to the host. Widths must be multiples of 16 bytes. The last offset may equal
    the number of rows, as in torch's own tests.
    """
    cuda, dtype = torch.version.cuda, _autocast_dtype(x_ND) or x_ND.dtype
    if not x_ND.is_cuda or cuda is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    has_kernel = dtype == torch.bfloat16 or tuple(map(int, cuda.split(".")[:2])) >= (13, 3)
    fits = x_ND.numel() > 0 and all(width > 0 and width % 8 == 0 for width in (x_ND.shape[1], *widths))
    if not (has_kernel and fits and torch.cuda.is_available()):  # tensors without values need no GPU
        return False
    return torch.cuda.get_device_capability(x_ND.device)[0] in (9, 10)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type to which autocast casts the inputs of a linear layer; None if it leaves them alone."""
    if x.dtype == torch.float64 or x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _is_by_offsets(x_ND: Tensor, other: Tensor, end_E: Tensor) -> bool:
    """Tell if a product runs by offsets on the GPU: a bias alone, and what grouped_mm takes."""
    if not end_E.is_cuda:
        return False
    return x_ND.shape[1] == 0 or (x_ND.dtype == other.dtype and multiplies_by_offsets(x_ND, *other.shape[1:]))


def _linear_on_gpu(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor) -> Tensor:
    if not (weight_EHD.is_contiguous() or weight_EHD.transpose(1, 2).is_contiguous()):
        weight_EHD = weight_EHD.contiguous()
    if x_ND.shape[1] == 0:  # a bias alone
        y_NH = x_ND.new_zeros(x_ND.shape[0], weight_EHD.shape[1])
    else:
        y_NH = nn.functional.grouped_mm(x_ND.contiguous(), weight_EHD.transpose(1, 2), offs=end_E.int())
    expert_N = _expert_of_row(end_E, x_ND.shape[0])
    if bias_EH is not None:
        y_NH = y_NH + bias_EH.index_select(0, expert_N.clamp(max=end_E.shape[0] - 1))
    return y_NH.masked_fill_((expert_N == end_E.shape[0]).unsqueeze(1), 0)  # not written by grouped_mm


def _outer_on_gpu(y_NH: Tensor, x_ND: Tensor, end_E: Tensor, with_sum: bool) -> tuple[Tensor, Tensor]:
    y_NH, x_ND = y_NH.contiguous(), x_ND.contiguous()
    if x_ND.shape[1] == 0:
        product_EHD = y_NH.new_empty(end_E.shape[0], y_NH.shape[1], 0)
    else:
        product_EHD = nn.functional.grouped_mm(y_NH.t(), x_ND, offs=end_E.int())
        idle_E = end_E.diff(prepend=end_E.new_zeros(1)) == 0
        product_EHD = product_EHD.masked_fill_(idle_E.view(-1, 1, 1), 0)
    if not with_sum:
        return product_EHD, y_NH.new_empty(end_E.shape[0], 0)
    expert_N = _expert_of_row(end_E, x_ND.shape[0])
    is_of_NE = (expert_N.unsqueeze(1) == torch.arange(end_E.shape[0], device=end_E.device)).to(y_NH.dtype)
    return product_EHD, is_of_NE.t() @ y_NH  # sums by atomic operations would differ from run to run


def _expert_of_row(end_E: Tensor, rows: int) -> Tensor:
    """(N,) the expert of each row, E after the last run."""
    return torch.searchsorted(end_E, torch.arange(rows, device=end_E.device), right=True)


def _check_devices(*tensors: Tensor | None) -> None:
    """Raise RuntimeError where a result would hold values that nobody wrote, as torch does not with ``out=``."""
    devices = [tensor.device for tensor in tensors if tensor is not None]
    if any(device != devices[0] for device in devices):
        raise RuntimeError(
            f"Rows, experts and routing are on different devices ({', '.join(sorted(set(map(str, devices))))}): move "
            "the model and its inputs to one device; weights on the meta device have no values."
        )


@torch.library.register_fake("timm_moe::grouped_linear")
def _linear_of_shapes(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor) -> Tensor:
    if weight_EHD.shape[0] != end_E.shape[0]:
        raise RuntimeError(f"The rows are routed to {end_E.shape[0]} experts, but there are {weight_EHD.shape[0]}.")
    _check_devices(x_ND, weight_EHD, bias_EH, None if end_E.is_cpu else end_E)  # the host may know the lengths alone
    return x_ND.new_empty(x_ND.shape[0], weight_EHD.shape[1])


@torch.library.register_fake("timm_moe::grouped_outer")
def _outer_of_shapes(y_NH: Tensor, x_ND: Tensor, end_E: Tensor, with_sum: bool) -> tuple[Tensor, Tensor]:
    _check_devices(x_ND, y_NH, None if end_E.is_cpu else end_E)
    experts, height = end_E.shape[0], y_NH.shape[1]
    return y_NH.new_empty(experts, height, x_ND.shape[1]), y_NH.new_empty(experts, height if with_sum else 0)


torch.library.register_autograd("timm_moe::grouped_linear", _Linear.backward, setup_context=_Linear.setup_context)
torch.library.register_autograd("timm_moe::grouped_outer", _Outer.backward, setup_context=_Outer.setup_context)


@register_flop_formula([torch.ops.timm_moe.grouped_linear, torch.ops.timm_moe.grouped_outer])
def _flops(first_shape: Any, second_shape: Any, *_: Any, **__: Any) -> int:
    return 2 * first_shape[0] * first_shape[1] * second_shape[1]
