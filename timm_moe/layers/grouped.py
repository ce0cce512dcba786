"""Products of the experts' rows with stacked matrices.

The rows of each expert are a run: expert e has the rows from ``end_E[e - 1]`` to ``end_E[e]``. No
shape depends on the lengths of the runs. With ``end_E`` on the CPU nothing waits for a GPU. With
``end_E`` on a GPU nothing waits where :func:`multiplies_by_offsets` holds; elsewhere
:func:`runs_of` waits once for the lengths. Experts with equally many rows, (E, C, D), need no
lengths.

Products are in the type of the rows. Under autocast each product casts the weights that it needs,
in the backward pass once more. So no cast weights are kept, and weights must not change between the
forward and the backward pass.

Shape suffixes: N rows, D width of the inputs, H of the outputs, E experts, C rows of each expert.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from .functional import autocast_dtype, fast_apply

#: Namespace of this module's operators: the package's name, so that a copy in another package
#: defines its own.
_NAMESPACE = __name__.partition(".")[0]
_operators = getattr(torch.ops, _NAMESPACE)


class Runs(NamedTuple):
    """The rows of each expert, for all products of a layer.

    Attributes:
        end: (E,) integers that do not decrease, at most N.
        expert: (N,) expert of each row, and some expert after the last run, where products are by
            offsets on a GPU. Elsewhere it is None, and each product reads ``end`` on the host.
        is_after: (N, 1) whether a row is after the last run; None without ``expert``, and where it
            is known that none is.
        is_idle: (E, 1, 1) whether an expert has no rows; None without ``expert``, and without
            gradients.
    """

    end: Tensor
    expert: Tensor | None = None
    is_after: Tensor | None = None
    is_idle: Tensor | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return what the products need."""
        return (self.end,) if self.expert is None else tuple(self)


def runs_of(end_E: Tensor, x_ND: Tensor, *widths: int, is_full: bool = False) -> Runs:
    """Prepare products of rows with matrices of these widths; the host waits here, if at all.

    Args:
        end_E: end of each expert's run.
        x_ND: the rows.
        widths: of the matrices.
        is_full: whether it is known that no row is after the last run.
    """
    if end_E.is_cpu or end_E.is_meta:
        return Runs(end_E)
    return (
        runs_by_offsets(end_E, x_ND.shape[0], is_full)
        if multiplies_by_offsets(x_ND, *widths)
        else Runs(end_E.cpu())
    )


def runs_by_offsets(end_E: Tensor, rows: int, is_full: bool = False) -> Runs:
    """Prepare products that read nothing on the host; see :func:`runs_of`."""
    end_E = end_E.int()
    row_N = torch.arange(rows, device=end_E.device, dtype=torch.int32)
    expert_N = torch.searchsorted(end_E, row_N, right=True)
    # Only gradients of weights need the experts without rows.
    is_idle_E11 = _are_idle(end_E) if torch.is_grad_enabled() else None
    if is_full:
        return Runs(end_E, expert_N, None, is_idle_E11)
    is_after_N1 = (expert_N == end_E.shape[0]).unsqueeze(1)
    return Runs(end_E, expert_N.clamp(max=end_E.shape[0] - 1), is_after_N1, is_idle_E11)


def _are_idle(end_E: Tensor) -> Tensor:
    """Tell for each expert, (E, 1, 1), if it has no rows."""
    return (end_E.diff(prepend=end_E.new_zeros(1)) == 0).view(-1, 1, 1)


def batched_linear(x_ECD: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None) -> Tensor:
    """Compute ``x[e] @ weight[e].T + bias[e]`` for each expert, (E, C, H).

    Under autocast the dtype is autocast's.

    Raises:
        RuntimeError: if widths, dtypes or devices do not fit each other.
    """
    return _batched(_cast_rows(x_ECD, weight_EHD), weight_EHD, bias_EH)


def _cast_rows(x: Tensor, weight_EHD: Tensor) -> Tensor:
    """Cast rows as autocast casts the inputs of a linear layer.

    Raises:
        RuntimeError: without autocast, if the weights are of another type.
    """
    dtype = autocast_dtype(x)
    if dtype is not None:
        return x.to(dtype)
    if x.dtype != weight_EHD.dtype:
        raise RuntimeError(
            f"Rows of {x.dtype} meet experts of {weight_EHD.dtype}: cast the model or its input, "
            "or use autocast with rows of float32 or less."
        )
    return x


class _BatchedLinear(torch.autograd.Function):
    """A batched linear layer whose weight gradients have the parameters' layout.

    torch's own formula would transpose them, and then copy them to that layout.
    """

    @staticmethod
    def forward(x_ECD: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None) -> Tensor:
        weight_EDH = weight_EHD.to(x_ECD.dtype).transpose(1, 2)
        if bias_EH is None:
            return torch.bmm(x_ECD, weight_EDH)
        return torch.baddbmm(bias_EH.to(x_ECD.dtype).unsqueeze(1), x_ECD, weight_EDH)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad_ECH: Tensor) -> tuple[Tensor | None, ...]:
        x_ECD, weight_EHD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dtype = weight_EHD.dtype
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = torch.bmm(grad_ECH, weight_EHD.to(grad_ECH.dtype))
        if needs_weight:
            grad_weight = torch.bmm(grad_ECH.transpose(1, 2), x_ECD).to(dtype)
        if needs_bias:
            grad_bias = grad_ECH.sum(1).to(dtype)
        return grad_x, grad_weight, grad_bias


_batched = fast_apply(_BatchedLinear)


def grouped_linear(x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, runs: Runs) -> Tensor:
    """Compute ``x @ weight[e].T + bias[e]`` for each run of rows, (N, H).

    Rows after the last run are zero. Under autocast the dtype is autocast's, as in
    ``torch.nn.functional.linear``.

    Args:
        x_ND: rows in the order of the experts.
        weight_EHD: weights of E ``nn.Linear``.
        bias_EH: their biases, or None.
        runs: the rows of each expert.

    Raises:
        RuntimeError: if widths, dtypes or devices do not fit each other, and in forward-mode
            differentiation.
    """
    return _linear(_cast_rows(x_ND, weight_EHD), weight_EHD, bias_EH, *runs.tensors())


def spread_over_rows(stacked_EH: Tensor, runs: Runs, rows: int) -> Tensor:
    """Return for each row the vector of its expert, (N, H); zero after the last run.

    It is a linear layer of width zero, whose bias is the result, so that this needs no operator and
    no derivative of its own.
    """
    nothing_ND, nothing_EHD = (
        stacked_EH.new_empty(rows, 0),
        stacked_EH.new_empty(*stacked_EH.shape, 0),
    )
    return _linear(nothing_ND, nothing_EHD, stacked_EH, *runs.tensors())


# Each of the two functions below is the other's derivative. torch.func needs them, since it does
# not know the formulas of operators. Products by offsets need all of the runs' tensors, others the
# ends alone.


class _Linear(torch.autograd.Function):
    """Product of each run with its expert's matrix, (N, D) -> (N, H), and sum with its bias."""

    @staticmethod
    def forward(
        x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor, *runs: Any
    ) -> Tensor:
        if runs:
            return _operators.linear_by_offsets(x_ND, weight_EHD, bias_EH, end_E, *runs)
        return _operators.grouped_linear(x_ND, weight_EHD, bias_EH, end_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_ND, weight_EHD, _, *runs = inputs
        ctx.save_for_backward(x_ND, weight_EHD, *runs)

    @staticmethod
    def backward(ctx: Any, grad_NH: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_EHD, *runs = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = _linear(grad_NH, weight_EHD.transpose(1, 2), None, *runs)
        if needs_weight or needs_bias:
            grad_weight, total_EH = _outer(grad_NH, x_ND, needs_bias, *runs)
            grad_weight = grad_weight.to(weight_EHD.dtype)
            grad_bias = total_EH.to(weight_EHD.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, *(None for _ in runs)


class _Outer(torch.autograd.Function):
    """Products ``y.T @ x`` of each run, (E, H, D), and sums of y, (E, H)."""

    @staticmethod
    def forward(
        y_NH: Tensor, x_ND: Tensor, with_sum: bool, end_E: Tensor, *runs: Any
    ) -> tuple[Tensor, Tensor]:
        if runs:
            return _operators.outer_by_offsets(y_NH, x_ND, with_sum, end_E, *runs)
        return _operators.grouped_outer(y_NH, x_ND, with_sum, end_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        y_NH, x_ND, ctx.with_sum, *runs = inputs
        ctx.save_for_backward(y_NH, x_ND, *runs)

    @staticmethod
    def backward(ctx: Any, grad_EHD: Tensor, grad_EH: Tensor) -> tuple[Tensor | None, ...]:
        y_NH, x_ND, *runs = ctx.saved_tensors
        needs_y, needs_x, *_ = ctx.needs_input_grad
        grad_y = grad_x = None
        if needs_y:
            grad_y = _linear(x_ND, grad_EHD, grad_EH if ctx.with_sum else None, *runs)
        if needs_x:
            grad_x = _linear(y_NH, grad_EHD.transpose(1, 2), None, *runs)
        return grad_y, grad_x, None, *(None for _ in runs)


_linear, _outer = fast_apply(_Linear, is_operator=True), fast_apply(_Outer, is_operator=True)

_HOST = torch.Tag.cudagraph_unsafe
_RUNS = "Tensor end, Tensor expert, Tensor? is_after, Tensor? is_idle"
# The first two operators read their last tensor on the host, which a CUDA graph would not repeat.
for _name, _schema, _tags in (
    ("grouped_linear", "(Tensor x, Tensor weight, Tensor? bias, Tensor end) -> Tensor", _HOST),
    ("grouped_outer", "(Tensor y, Tensor x, bool with_sum, Tensor end) -> (Tensor, Tensor)", _HOST),
    ("linear_by_offsets", f"(Tensor x, Tensor weight, Tensor? bias, {_RUNS}) -> Tensor", ()),
    ("outer_by_offsets", f"(Tensor y, Tensor x, bool with_sum, {_RUNS}) -> (Tensor, Tensor)", ()),
):
    torch.library.define(f"{_NAMESPACE}::{_name}", _schema, tags=_tags)


@torch.library.impl(f"{_NAMESPACE}::grouped_linear", "CompositeExplicitAutograd")
def _linear_of_runs(
    x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor
) -> Tensor:
    """Compute a product for each run, into slices of one result."""
    y_NH = _linear_of_shapes(x_ND, weight_EHD, bias_EH, end_E)
    sizes = sizes_of_runs(end_E, x_ND)
    if not x_ND.is_cpu:  # A CPU casts the experts that have rows, other devices all at once.
        weight_EHD = weight_EHD.to(x_ND.dtype)
        bias_EH = None if bias_EH is None else bias_EH.to(x_ND.dtype)
    weights = weight_EHD.transpose(1, 2).unbind()
    biases = len(weights) * [None] if bias_EH is None else bias_EH.unbind()
    *outputs, rest = y_NH.split(sizes)
    for x, weight, bias, y, size in zip(
        x_ND.split(sizes), weights, biases, outputs, sizes, strict=False
    ):
        if size and bias is not None:
            torch.addmm(bias.to(x.dtype), x, weight.to(x.dtype), out=y)
        elif size:
            torch.mm(x, weight.to(x.dtype), out=y)
    rest.zero_()
    return y_NH


@torch.library.impl(f"{_NAMESPACE}::grouped_outer", "CompositeExplicitAutograd")
def _outer_of_runs(
    y_NH: Tensor, x_ND: Tensor, with_sum: bool, end_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute a product and a sum for each run, into slices of two results."""
    product_EHD, total_EH = _outer_of_shapes(y_NH, x_ND, with_sum, end_E)
    sizes = sizes_of_runs(end_E, x_ND)
    runs = zip(
        y_NH.split(sizes),
        x_ND.split(sizes),
        product_EHD.unbind(),
        total_EH.unbind(),
        sizes,
        strict=False,
    )
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
    """Return the number of rows of each expert, and of those after the last run.

    The host waits for a GPU's. On meta all experts have equally many.
    """
    rows, experts = x_ND.shape[0], end_E.shape[0]
    ends = (
        [rows * (expert + 1) // experts for expert in range(experts)]
        if end_E.is_meta
        else end_E.tolist()
    )
    return [end - start for start, end in itertools.pairwise([0, *ends, rows])]


def multiplies_by_offsets(x_ND: Tensor, *widths: int) -> bool:
    """Tell if torch's grouped_mm multiplies rows by matrices of these widths without a wait.

    ``torch.nn.functional.grouped_mm`` has kernels for CUDA devices of capability 9 and 10 alone, in
    bfloat16, and from CUDA 13.3 on in float16. Its fallback for others copies the offsets to the
    host. Widths must be multiples of 16 bytes. The last offset may equal the number of rows, as in
    torch's own tests.
    """
    cuda, dtype = torch.version.cuda, autocast_dtype(x_ND) or x_ND.dtype
    if not x_ND.is_cuda or cuda is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    has_kernel = dtype == torch.bfloat16 or tuple(map(int, cuda.split(".")[:2])) >= (13, 3)
    fits = x_ND.numel() > 0 and all(
        width > 0 and width % 8 == 0 for width in (x_ND.shape[1], *widths)
    )
    # Fake tensors may be on a GPU where there is none.
    if not (has_kernel and fits and torch.cuda.is_available()):
        return False
    return torch.cuda.get_device_capability(x_ND.device)[0] in (9, 10)


def _linear_by_offsets(
    x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, *of_rows: Any
) -> Tensor:
    """Compute all products at once on a GPU, without a wait for the lengths."""
    end_E, expert_N, is_after_N1, _ = of_rows
    _check_devices(x_ND, weight_EHD, bias_EH, end_E)
    weight_EHD = weight_EHD.to(x_ND.dtype)
    if not (weight_EHD.is_contiguous() or weight_EHD.transpose(1, 2).is_contiguous()):
        weight_EHD = weight_EHD.contiguous()
    y_NH = None
    if x_ND.shape[1]:  # Else there is a bias alone, as in spread_over_rows.
        y_NH = nn.functional.grouped_mm(x_ND.contiguous(), weight_EHD.transpose(1, 2), offs=end_E)
    if bias_EH is not None:
        bias_NH = bias_EH.to(x_ND.dtype).index_select(0, expert_N)
        y_NH = bias_NH if y_NH is None else y_NH.add_(bias_NH)
    assert y_NH is not None
    # grouped_mm does not write rows after the last run.
    return y_NH if is_after_N1 is None else y_NH.masked_fill_(is_after_N1, 0)


def _outer_by_offsets(
    y_NH: Tensor, x_ND: Tensor, with_sum: bool, *of_rows: Any
) -> tuple[Tensor, Tensor]:
    """Compute all products and sums at once on a GPU, without a wait for the lengths."""
    end_E, expert_N, is_after_N1, is_idle_E11 = of_rows
    experts = end_E.shape[0]
    y_NH, x_ND = y_NH.contiguous(), x_ND.contiguous()
    if x_ND.shape[1] == 0:
        product_EHD = y_NH.new_empty(experts, y_NH.shape[1], 0)
    else:
        product_EHD = nn.functional.grouped_mm(y_NH.t(), x_ND, offs=end_E)
        # grouped_mm does not write the products of experts without rows.
        product_EHD.masked_fill_(_are_idle(end_E) if is_idle_E11 is None else is_idle_E11, 0)
    if not with_sum:
        return product_EHD, y_NH.new_empty(experts, 0)
    # The sums are a product, since sums by atomic operations would differ from run to run.
    is_of_EN = torch.eq(torch.arange(experts, device=end_E.device).unsqueeze(1), expert_N)
    if is_after_N1 is not None:
        is_of_EN = is_of_EN.masked_fill(is_after_N1.t(), False)
    return product_EHD, is_of_EN.to(y_NH.dtype) @ y_NH


torch.library.impl(f"{_NAMESPACE}::linear_by_offsets", "CompositeExplicitAutograd")(
    _linear_by_offsets
)
torch.library.impl(f"{_NAMESPACE}::outer_by_offsets", "CompositeExplicitAutograd")(
    _outer_by_offsets
)


def _check_devices(*tensors: Tensor | None) -> None:
    """Check that tensors are on one device.

    torch does not check it for products with ``out=``, whose results nobody would write then.

    Raises:
        RuntimeError: if they are on several devices.
    """
    devices = [tensor.device for tensor in tensors if tensor is not None]
    if any(device != devices[0] for device in devices):
        raise RuntimeError(
            "Rows, experts and routing are on different devices "
            f"({', '.join(sorted(set(map(str, devices))))}): move the model and its inputs to one "
            "device; weights on the meta device have no values."
        )


def _linear_of_shapes(
    x_ND: Tensor, weight_EHD: Tensor, bias_EH: Tensor | None, end_E: Tensor, *of_rows: Any
) -> Tensor:
    """Return an empty result of :class:`_Linear`.

    Raises:
        RuntimeError: if the number of experts, or devices, do not fit.
    """
    if weight_EHD.shape[0] != end_E.shape[0]:
        raise RuntimeError(
            f"The rows are routed to {end_E.shape[0]} experts, but there are {weight_EHD.shape[0]}."
        )
    # The lengths may be on the CPU while all else is on a GPU.
    _check_devices(x_ND, weight_EHD, bias_EH, None if end_E.is_cpu else end_E)
    return x_ND.new_empty(x_ND.shape[0], weight_EHD.shape[1])


def _outer_of_shapes(
    y_NH: Tensor, x_ND: Tensor, with_sum: bool, end_E: Tensor, *of_rows: Any
) -> tuple[Tensor, Tensor]:
    """Return empty results of :class:`_Outer`.

    Raises:
        RuntimeError: if devices do not fit.
    """
    _check_devices(x_ND, y_NH, None if end_E.is_cpu else end_E)
    experts, height = end_E.shape[0], y_NH.shape[1]
    return y_NH.new_empty(experts, height, x_ND.shape[1]), y_NH.new_empty(
        experts, height if with_sum else 0
    )


def _flops(first_shape: Any, second_shape: Any, *_: Any, **__: Any) -> int:
    """Return the number of operations of both kinds of products, if all rows are in runs."""
    return 2 * first_shape[0] * first_shape[1] * second_shape[1]


for _names, _fake, _function in (
    (("grouped_linear", "linear_by_offsets"), _linear_of_shapes, _Linear),
    (("grouped_outer", "outer_by_offsets"), _outer_of_shapes, _Outer),
):
    for _name in _names:
        torch.library.register_fake(f"{_NAMESPACE}::{_name}", _fake)
        torch.library.register_autograd(
            f"{_NAMESPACE}::{_name}", _function.backward, setup_context=_function.setup_context
        )
        register_flop_formula(getattr(_operators, _name))(_flops)
