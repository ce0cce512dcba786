"""Rows go to the experts, and the experts' outputs back to the rows.

Shape suffixes: T rows, D width, K choices of a row, N slots of the experts, M as below.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .functional import fast_apply
from .routing import AnyRouting, ChosenRows, Routing


def dispatch(x_TD: Tensor, routing: AnyRouting, dtype: torch.dtype | None = None) -> Tensor:
    """Return the experts' input, (N, D), whose row i is row ``token_indices[i]`` of ``x_TD``.

    Args:
        x_TD: the rows.
        routing: the routing.
        dtype: type to which the rows are cast first; None for their own. Gradients of the slots are
            summed in the type of ``x_TD``.
    """
    token_N = routing.token_indices
    if isinstance(routing, ChosenRows):
        return _to_experts(x_TD, token_N, routing.slots, routing.starts, dtype)
    slots = routing.slots
    # The derivative sums the slots of each row.
    if slots is not None and _sums_in_one_pass(x_TD, routing):
        starts_T = torch.arange(0, slots.numel(), slots.shape[1], device=slots.device)
        return _to_experts(x_TD, token_N, slots.flatten(), starts_T, dtype)
    return _to_experts(x_TD, token_N, _slots_by_choice(routing), None, dtype)


def combine(y_ND: Tensor, routing: AnyRouting) -> Tensor:
    """Sum the experts' outputs for each row, weighted by the gates: (N, D) -> (T, D).

    A row whose choices were all dropped, or that no expert chose, is zero.
    """
    token_N = routing.token_indices
    if isinstance(routing, ChosenRows):
        y_ND = y_ND * routing.gates.to(y_ND.dtype).unsqueeze(1)
        return _to_rows(y_ND, token_N, routing.slots, routing.starts, None)
    gates = None if routing.gates is None else routing.gates.to(y_ND.dtype)
    if routing.slots is None:  # Each slot belongs to one row.
        y_ND = y_ND if gates is None else y_ND * gates.view(-1, 1)
        return _to_rows(y_ND, token_N, None, None, None)
    if gates is not None and _sums_in_one_pass(y_ND, routing):
        return _weighted_sum(y_ND, gates, token_N, routing.slots)
    # Where experts have different numbers of slots, all dropped choices share one past the last
    # offset, whose output is zero.
    is_dropped_M1 = None
    if routing.slots_per_expert is not None and routing.is_dropped is not None:
        is_dropped_M1 = routing.is_dropped.t().reshape(-1, 1)
    y_MD = _to_rows(y_ND, token_N, _slots_by_choice(routing), None, is_dropped_M1)
    if routing.slots.shape[1] == 1:
        return y_MD if gates is None else y_MD * gates
    y_KTD = y_MD.unflatten(0, routing.slots.shape[::-1])
    if gates is not None:
        y_KTD = y_KTD * gates.t().contiguous().unsqueeze(2)
    # Without the dtype a GPU's autocast would sum to float32, unlike a dense network's output.
    return y_KTD.sum(0, dtype=y_KTD.dtype)


def _sums_in_one_pass(rows: Tensor, routing: Routing) -> bool:
    """Tell if one ``embedding_bag`` sums the K slots of each row.

    On a CPU this saves passes over memory. A compiler fuses the passes by itself.
    """
    has_choices = routing.slots is not None and routing.slots.shape[1] > 1
    return (
        has_choices
        and rows.is_cpu
        and routing.slots_per_expert is None
        and not torch.compiler.is_compiling()
    )


def _slots_by_choice(routing: Routing) -> Tensor | None:
    """Return the slots of all first choices, then of all second ones, and so on, (K T,)."""
    return None if routing.slots is None else routing.slots.t().flatten()


# Below are autograd functions, since the derivatives of torch's own operators add rows by atomic
# operations on GPUs, in an order that changes from run to run. M is K T where rows have K slots,
# else T.


def _written(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Write values into new rows, in place in eager mode.

    torch 2.11 compiles what an autograd function wrote in place to a constant, whose gradient is
    zero.
    """
    return (
        rows.index_copy(0, index, values)
        if torch.compiler.is_compiling()
        else rows.index_copy_(0, index, values)
    )


class _ToExperts(torch.autograd.Function):
    """Rows of the slots, (T, D) -> (N, D); the derivative sums the slots of each row."""

    @staticmethod
    def forward(
        x_TD: Tensor,
        token_N: Tensor,
        slot_M: Tensor | None,
        starts_T: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        return (x_TD if dtype is None else x_TD.to(dtype)).index_select(0, token_N)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_TD, *way, _ = inputs
        ctx.rows, ctx.dtype = x_TD.shape[0], x_TD.dtype
        ctx.save_for_backward(*way)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        token_N, slot_M, starts_T = ctx.saved_tensors
        # The experts' outputs for dropped choices get no gradient, so their slots need no mask.
        grad_ND = grad_ND if starts_T is None else grad_ND.to(ctx.dtype)
        grad = _to_rows(grad_ND, token_N, slot_M, starts_T, None)
        if grad.shape[0] != ctx.rows:
            grad = grad.unflatten(0, (-1, ctx.rows)).sum(0, dtype=ctx.dtype)
        return grad.to(ctx.dtype), None, None, None, None


class _ToRows(torch.autograd.Function):
    """Outputs of the choices, (N, D) -> (M, D), zero for dropped ones, or sums of a row's slots."""

    @staticmethod
    def forward(
        y_ND: Tensor,
        token_N: Tensor,
        slot_M: Tensor | None,
        starts_T: Tensor | None,
        is_dropped_M1: Tensor | None,
    ) -> Tensor:
        if slot_M is None:
            return _written(torch.empty_like(y_ND), token_N, y_ND)
        if starts_T is not None:
            return nn.functional.embedding_bag(slot_M, y_ND, starts_T, mode="sum")
        picked_MD = y_ND.index_select(0, slot_M)
        if is_dropped_M1 is None:
            return picked_MD
        if torch.compiler.is_compiling():  # for the reason that _written gives
            return picked_MD.masked_fill(is_dropped_M1, 0)
        return picked_MD.masked_fill_(is_dropped_M1, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        return _to_slots(grad_MD, *ctx.saved_tensors), None, None, None, None


class _ToSlots(torch.autograd.Function):
    """Derivative of :class:`_ToRows`, (M, D) -> (N, D), zero for slots that no choice has."""

    @staticmethod
    def forward(
        grad_MD: Tensor,
        token_N: Tensor,
        slot_M: Tensor | None,
        starts_T: Tensor | None,
        is_dropped_M1: Tensor | None,
    ) -> Tensor:
        if slot_M is None or starts_T is not None:
            return grad_MD.index_select(0, token_N)
        if is_dropped_M1 is not None:
            grad_MD = grad_MD.masked_fill(is_dropped_M1, 0)
        return _written(grad_MD.new_zeros(token_N.shape[0], grad_MD.shape[1]), slot_M, grad_MD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        return _to_rows(grad_ND, *ctx.saved_tensors), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """Sums over the slots of each row, each times its gate, (N, D) -> (T, D).

    It is used on CPUs alone. The derivative of its backward adds rows, in an order that changes on
    GPUs.
    """

    @staticmethod
    def forward(y_ND: Tensor, gate_TK: Tensor, token_N: Tensor, slot_TK: Tensor) -> Tensor:
        return nn.functional.embedding_bag(slot_TK, y_ND, mode="sum", per_sample_weights=gate_TK)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        y_ND, gate_TK, token_N, slot_TK = ctx.saved_tensors
        grad_ND, grad_gate_TK = grad_TD.index_select(0, token_N), None
        if ctx.needs_input_grad[1]:
            grad_gate_TK = torch.linalg.vecdot(grad_ND, y_ND)[slot_TK]
        gate_N = gate_TK.new_zeros(token_N.shape[0]).scatter(
            0, slot_TK.flatten(), gate_TK.flatten()
        )
        return grad_ND * gate_N.unsqueeze(1), grad_gate_TK, None, None


_to_experts, _to_rows, _to_slots = fast_apply(_ToExperts), fast_apply(_ToRows), fast_apply(_ToSlots)
_weighted_sum = fast_apply(_WeightedSum)
