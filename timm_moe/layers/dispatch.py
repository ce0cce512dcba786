"""The dispatcher: queues and capacities of experts, and the way of rows to the experts and back.

Shape suffixes: T rows, D width, E experts, K choices of a row, G groups, S rows of a group, N slots of the experts.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .functional import in_plain_operators

#: Round n / d for whole numbers n >= 0 and d; ONNX truncates quotients of negative numbers.
ROUNDINGS: dict[str, Callable[[int, int], int]] = {
    "ceil": lambda n, d: (n + d - 1) // d,
    "round": lambda n, d: (2 * n + d - 1 + n // d % 2) // (2 * d),
    "floor": lambda n, d: n // d,
}


class Routing(NamedTuple):
    """The rows that each expert gets, and the way of its outputs back.

    Shapes do not depend on the choices, so a routing is made without a wait for the device.

    Attributes:
        token_indices: (N,) row of the input in each slot of the experts' input, in the order of the experts. A row
            appears once for each expert that keeps it. Slots past the last offset are padding; their outputs are zero.
        offsets: (E,) end of each expert's slots.
        slots: (T, K) slot of each choice of a row; at or after ``offsets[-1]`` for a dropped choice.
        gates: (T, K) factor of each choice's output, zero for a dropped choice; None for all ones.
        capacity: C, if each expert has C slots, used or not, so that expert e begins at slot C e; else None. A slot
            that is not used holds some row, and no choice has it; gates, even of ones, keep it from getting a gradient.
    """

    token_indices: Tensor
    offsets: Tensor
    slots: Tensor
    gates: Tensor | None
    capacity: int | None = None

    def experts(self) -> Tensor:
        """(T, K) the expert of each choice, E for a dropped one."""
        return (self.slots.unsqueeze(-1) >= self.offsets).sum(-1)


def images_of_group(batch: int, group_images: int | None, is_training: bool) -> int:
    """Size of the groups of a batch: ``group_images``; in eval mode the batch if they do not divide it; or by default.

    Raises:
        ValueError: if they do not divide the batch in training.
    """
    if group_images is None or group_images == 1 or batch % group_images == 0:
        return group_images or batch
    if is_training:
        allowed = [str(number) for number in range(1, batch + 1) if batch % number == 0]
        raise ValueError(
            f"group_images={group_images} does not divide the batch of {batch} images; {', '.join(allowed)} would."
        )
    return batch


def expert_capacity(
    choices: int,
    num_experts: int,
    capacity_factor: float,
    rounding: str = "ceil",
    multiple_of: int = 4,
    most: int | None = None,
) -> int:
    """Rows that an expert takes of a group, ``choices * capacity_factor / num_experts`` rounded (V-MoE, section 2.3).

    Args:
        choices: rows of the group times choices of a row.
        num_experts: E.
        capacity_factor: 1 suffices exactly if the choices are spread evenly.
        rounding: ``"ceil"``, ``"round"`` (half to even) or ``"floor"``.
        multiple_of: round up further to a multiple of this.
        most: rows of the group that may come to an expert; the capacity is no larger.

    Raises:
        ValueError: if the capacity would be below 1. (A trace, which cannot refuse a batch, takes 1 then.)
    """
    # In whole numbers: torch.compile may make a symbol of a float, and no size can follow from that.
    factor = Fraction(capacity_factor).limit_denominator(10**6)
    capacity = ROUNDINGS[rounding](choices * factor.numerator, factor.denominator * num_experts)
    if isinstance(capacity, Tensor):  # in a trace, where a number would remain the size of the traced batch
        capacity = capacity.clamp(min=1)
    elif capacity < 1:
        raise ValueError(
            f"capacity_factor={capacity_factor} leaves no place: {choices} choices over {num_experts} experts give a "
            f"capacity of {capacity}, below 1."
        )
    capacity = ROUNDINGS["ceil"](capacity, multiple_of) * multiple_of
    if most is None:
        return capacity
    return torch.minimum(capacity, torch.as_tensor(most)) if isinstance(capacity, Tensor) else min(capacity, most)


def queue(expert_GSK: Tensor, num_experts: int, priority_GS: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Line up the choices: all first choices in row order, then all second choices, ... (V-MoE, algorithm 1).

    With priorities, rows of a higher one go first, equal ones in row order (batch priority routing, algorithm 2).

    Returns:
        (G, S, K) position of each choice in the queue of its expert, from 0, and (G, E) choices in each queue.
    """
    groups, rows, choices = expert_GSK.shape
    if priority_GS is not None:
        if torch.onnx.is_in_onnx_export():  # which has no stable sort, but a topk that takes the first of equal ones
            visit_GS = priority_GS.topk(rows, dim=1).indices
        else:
            visit_GS = priority_GS.argsort(dim=1, descending=True, stable=True)
        visit_GSK = visit_GS.unsqueeze(2).expand_as(expert_GSK)
        expert_GSK = expert_GSK.gather(1, visit_GSK)
    expert_GN = expert_GSK.transpose(1, 2).reshape(groups, choices * rows)
    rank_GN, length_GE = _ranks(expert_GN, num_experts)
    rank_GSK = rank_GN.view(groups, choices, rows).transpose(1, 2)
    if priority_GS is not None:
        rank_GSK = torch.empty_like(rank_GSK).scatter_(1, visit_GSK, rank_GSK)
    return rank_GSK, length_GE


def _ranks(expert_GN: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Position of each choice in the queue of its expert, and the lengths of the queues."""
    if in_plain_operators():  # at E times the memory
        is_for_GNE = (expert_GN.unsqueeze(2) == torch.arange(num_experts, device=expert_GN.device)).long()
        return ((is_for_GNE.cumsum(1) - 1) * is_for_GNE).sum(2), is_for_GNE.sum(1)
    sorted_GN, order_GN = expert_GN.sort(dim=1, stable=True)
    length_GE = expert_GN.new_zeros(expert_GN.shape[0], num_experts)
    length_GE = length_GE.scatter_add_(1, expert_GN, torch.ones_like(expert_GN))
    start_GE = length_GE.cumsum(1) - length_GE
    slot_GN = torch.arange(expert_GN.shape[1], device=expert_GN.device).expand_as(expert_GN)
    return torch.empty_like(expert_GN).scatter_(1, order_GN, slot_GN - start_GE.gather(1, sorted_GN)), length_GE


def routing_to(expert_TK: Tensor, weight_TK: Tensor, num_experts: int) -> Routing:
    """Send every row to its chosen experts and drop nothing, so that no queue is needed.

    Args:
        expert_TK: integers in [0, E), in each row all different.
        weight_TK: factors of the experts' outputs, with their gradients.
        num_experts: E.

    Raises:
        ValueError: if the two are not of one shape (T, K), or the experts no integers.
    """
    if in_plain_operators():
        return assign(expert_TK[None], weight_TK[None], *queue(expert_TK[None], num_experts), expert_TK.shape[0])
    if expert_TK.ndim != 2 or expert_TK.shape != weight_TK.shape or expert_TK.is_floating_point():
        raise ValueError(
            "A routing needs integers and their weights of one shape (T, K), got "
            f"{expert_TK.dtype} {tuple(expert_TK.shape)} and {tuple(weight_TK.shape)}."
        )
    sorted_N, choice_N = expert_TK.flatten().sort(stable=True)
    slot_N = torch.empty_like(choice_N)
    slot_N.scatter_(0, choice_N, torch.arange(choice_N.shape[0], device=expert_TK.device))
    offsets = torch.searchsorted(sorted_N, torch.arange(num_experts, device=expert_TK.device), right=True)
    return Routing(choice_N // expert_TK.shape[1], offsets, slot_N.view_as(expert_TK), weight_TK)


def has_equal_slots(device: torch.device) -> bool:
    """Tell if each expert has equally many slots where the capacity is known before the choices.

    The experts then compute batched products, and the host waits for no count. A CPU has nothing to wait for: there an
    expert computes its own rows alone. So does an exported program, since a capacity would limit its batch sizes.
    """
    return device.type != "cpu" and not torch.compiler.is_exporting()


def assign(
    expert_GSK: Tensor, gate_GSK: Tensor, rank_GSK: Tensor, length_GE: Tensor, capacity: int, may_wait: bool = False
) -> Routing:
    """Give each choice that is within the capacity of its expert in each group a slot of the expert.

    On a GPU each expert has equally many slots, unless the host may wait and three quarters would be unused.
    """
    groups, rows, _ = expert_GSK.shape
    num_experts = length_GE.shape[1]
    num_slots, most = expert_GSK.numel(), groups * num_experts * capacity + 1  # with one for all that is dropped
    is_padded = has_equal_slots(expert_GSK.device) and not (may_wait and most > 4 * num_slots + 1)
    if is_padded:
        num_slots = most
    elif not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        num_slots = min(num_slots, most)
    kept_EG = torch.full_like(length_GE.T, capacity) if is_padded else length_GE.T.clamp(max=capacity)
    start_EG = (kept_EG.flatten().cumsum(0) - kept_EG.flatten()).view(num_experts, groups)
    slot_GSK = start_EG.T.gather(1, expert_GSK.flatten(1)).view_as(expert_GSK) + rank_GSK
    is_kept_GSK = rank_GSK < capacity
    slot_GSK = torch.where(is_kept_GSK, slot_GSK, num_slots - 1)  # after the experts' slots, if anything is dropped
    gate_GSK = torch.where(is_kept_GSK, gate_GSK, 0)
    row_GSK = torch.arange(groups * rows, device=expert_GSK.device).view(groups, rows, 1).expand_as(expert_GSK)
    token_indices = row_GSK.new_zeros(num_slots).scatter_(0, slot_GSK.flatten(), row_GSK.flatten())
    offsets, of_expert = kept_EG.sum(1).cumsum(0), groups * capacity if is_padded else None
    return Routing(token_indices, offsets, slot_GSK.flatten(0, 1), gate_GSK.flatten(0, 1), of_expert)


def dispatch(x_TD: Tensor, routing: Routing) -> Tensor:
    """The experts' input: row i of the result is row ``routing.token_indices[i]`` of ``x_TD``."""
    return _move(x_TD, routing.token_indices, routing.slots, None, True)


def combine(y_ND: Tensor, routing: Routing) -> Tensor:
    """(T, D): the sum of the experts' outputs for each row, weighted by the gates; zero if all choices were dropped."""
    return _move(y_ND, routing.token_indices, routing.slots, routing.gates, False)


def _move(*args: Any) -> Tensor:
    return (_Move.apply if torch.is_grad_enabled() else _Move.forward)(*args)  # the latter is faster


def _weighted_sum(rows: Tensor, index_MK: Tensor, weight_MK: Tensor | None) -> Tensor:
    """(M, D): for each line of indices the sum of the rows at these indices, each times its weight."""
    weight_MK = None if weight_MK is None else weight_MK.to(rows.dtype)
    # One kernel, which a CPU does in one pass. To start it takes a GPU's host longer than one or two simple ones.
    is_simple = index_MK.shape[1] == 1 and (weight_MK is None or not rows.is_cpu)
    if not is_simple and not torch.compiler.is_compiling():  # a compiler makes one loop of what follows
        return nn.functional.embedding_bag(index_MK, rows, mode="sum", per_sample_weights=weight_MK)
    picked = [rows.index_select(0, index) for index in index_MK.unbind(1)]
    if weight_MK is not None:
        picked = [weight * row for weight, row in zip(weight_MK.unsqueeze(2).unbind(1), picked, strict=True)]
    return sum(picked[1:], start=picked[0])


class _Move(torch.autograd.Function):
    """Moves rows to the experts, each times its gate, or sums the slots of each row, each times its gate.

    Each of the two is the other's derivative. The derivatives of torch's own operators add rows by atomic operations on
    GPUs, in an order that changes from run to run.
    """

    @staticmethod
    def forward(rows: Tensor, index_N: Tensor, slot_TK: Tensor, gate_TK: Tensor | None, to_experts: bool) -> Tensor:
        if not to_experts:
            return _weighted_sum(rows, slot_TK, gate_TK)
        if gate_TK is None:
            return rows.index_select(0, index_N)
        gate_N = gate_TK.new_zeros(index_N.shape[0]).scatter(0, slot_TK.flatten(), gate_TK.flatten())
        return _weighted_sum(rows, index_N.unsqueeze(1), gate_N.unsqueeze(1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, *routing, ctx.to_experts = inputs
        ctx.save_for_backward(*routing, rows if ctx.needs_input_grad[3] else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index_N, slot_TK, gate_TK, rows = ctx.saved_tensors
        grad_TK = None
        if rows is not None:  # the product of each row with each of its slots
            x_TD, y_ND = (rows, grad) if ctx.to_experts else (grad, rows)
            grad_TK = torch.linalg.vecdot(x_TD.index_select(0, index_N), y_ND)[slot_TK].to(gate_TK.dtype)
        return _move(grad, index_N, slot_TK, gate_TK, not ctx.to_experts), None, None, grad_TK, None
