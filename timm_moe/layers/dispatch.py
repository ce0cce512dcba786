"""Who moves the rows: how many an expert takes, in which order they queue, to the experts and back.

Shape suffixes: T rows, D width, E experts, K choices of a row, G groups, S rows of a group, N rows at the experts.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .scripting import checked_in_trace

ROUNDINGS: dict[str, Callable[[float], int]] = {"ceil": math.ceil, "round": round, "floor": math.floor}


class Routing(NamedTuple):
    """Which rows each expert gets, and how its outputs come back.

    Attributes:
        order: (N,) the row that stands at each place of the experts' input; first those of expert 0, then of expert 1,
            ... A row stands there as often as it is kept by an expert.
        sizes: number of places of each expert, E integers that sum to N.
        place: (T, K) where in ``order`` each choice of a row stands; N for one that was dropped.
        weight: (T, K) factor of each choice's output; None for all ones, if nothing was dropped.
    """

    order: Tensor
    sizes: list[int]
    place: Tensor
    weight: Tensor | None


class Queue(NamedTuple):
    """Where the choices of the rows stand in line.

    Attributes:
        rank_GSK: place of each choice in the line of its expert within its group, from 0.
        length_GE: choices in each line.
    """

    rank_GSK: Tensor
    length_GE: Tensor


def expert_capacity(
    choices: int, num_experts: int, capacity_factor: float, rounding: str = "ceil", multiple_of: int = 4
) -> int:
    """Rows that an expert takes of a group, ``choices * capacity_factor / num_experts`` rounded (V-MoE, section 2.3).

    Args:
        choices: rows of the group times choices of a row.
        num_experts: E.
        capacity_factor: 1 suffices exactly if the choices are spread evenly.
        rounding: ``"ceil"``, ``"round"`` (half to even) or ``"floor"``.
        multiple_of: round up further to a multiple of this.

    Raises:
        ValueError: if the capacity would be below 1.
    """
    if isinstance(choices, Tensor):  # in a trace, where a number would be that of the traced batch for ever
        capacity = getattr(torch, rounding)(choices.double() * capacity_factor / num_experts).long()
        return -(-checked_in_trace()(capacity) // multiple_of) * multiple_of
    capacity = ROUNDINGS[rounding](choices * capacity_factor / num_experts)
    if capacity < 1:
        raise ValueError(
            f"capacity_factor={capacity_factor} leaves no place: {choices} choices over {num_experts} experts give a "
            f"capacity of {capacity}, below 1."
        )
    return math.ceil(capacity / multiple_of) * multiple_of


def at_most(capacity: int, rows: int) -> int:
    """The smaller of two numbers, which in a trace are tensors."""
    return torch.minimum(capacity, torch.as_tensor(rows)) if isinstance(capacity, Tensor) else min(capacity, rows)


def queue(expert_GSK: Tensor, num_experts: int, priority_GS: Tensor | None = None) -> Queue:
    """Line up the choices: all first choices in row order, then all second choices, ... (V-MoE, algorithm 1).

    Args:
        expert_GSK: chosen experts, the first choice first.
        num_experts: E.
        priority_GS: if given, rows with a higher value go first, equal ones in row order (batch priority routing,
            algorithm 2).
    """
    groups, rows, choices = expert_GSK.shape
    if priority_GS is not None:
        visit_GSK = priority_GS.argsort(dim=1, descending=True, stable=True).unsqueeze(2).expand_as(expert_GSK)
        expert_GSK = expert_GSK.gather(1, visit_GSK)
    expert_GN = expert_GSK.transpose(1, 2).reshape(groups, choices * rows)
    sorted_GN, order_GN = expert_GN.sort(dim=1, stable=True)
    length_GE = expert_GN.new_zeros(groups, num_experts).scatter_add_(1, expert_GN, torch.ones_like(expert_GN))
    start_GE = length_GE.cumsum(1) - length_GE
    place_GN = torch.arange(rows * choices, device=expert_GN.device).expand_as(expert_GN)
    rank_GN = torch.empty_like(expert_GN).scatter_(1, order_GN, place_GN - start_GE.gather(1, sorted_GN))
    rank_GSK = rank_GN.view(groups, choices, rows).transpose(1, 2)
    if priority_GS is not None:
        rank_GSK = torch.empty_like(rank_GSK).scatter_(1, visit_GSK, rank_GSK)
    return Queue(rank_GSK, length_GE)


def assign(expert_GSK: Tensor, weight_GSK: Tensor, line: Queue, capacity: int) -> Routing:
    """Give each choice that is within the capacity its place at its expert.

    In eager mode the places are exactly the rows that are kept; reading their number waits for the device. Under
    torch.compile or a trace, and on the meta device, every expert has ``capacity`` places in each group, used or not,
    so that all shapes are known beforehand. What comes back from the experts is the same.

    Args:
        expert_GSK: chosen experts.
        weight_GSK: their weights.
        line: from :func:`queue`.
        capacity: choices that an expert takes of each group; rows of a group for all.
    """
    groups, rows, _ = expert_GSK.shape
    num_experts = line.length_GE.shape[1]
    if _needs_fixed_shapes(expert_GSK):
        places_EG = torch.full_like(line.length_GE.T, capacity)
        sizes = [groups * capacity] * num_experts
    else:
        places_EG = line.length_GE.T.clamp(max=capacity)
        sizes = places_EG.sum(1).tolist()
    start_EG = (places_EG.flatten().cumsum(0) - places_EG.flatten()).view(num_experts, groups)
    start_GSK = start_EG.T.gather(1, expert_GSK.flatten(1)).view_as(expert_GSK)
    place_GSK = torch.where(line.rank_GSK < capacity, start_GSK + line.rank_GSK, sum(sizes))
    row_GSK = torch.arange(groups * rows, device=expert_GSK.device).view(groups, rows, 1).expand_as(expert_GSK)
    # What is dropped meets in one more place, which is cut off.
    order = row_GSK.new_zeros(sum(sizes) + 1).scatter_(0, place_GSK.flatten(), row_GSK.flatten())[:-1]
    return Routing(order, sizes, place_GSK.flatten(0, 1), weight_GSK.flatten(0, 1))


def _needs_fixed_shapes(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta


def dispatch(x_TD: Tensor, routing: Routing) -> Tensor:
    """The experts' input: row i of the result is row ``routing.order[i]`` of ``x_TD``, zero at a place without use."""
    if not _needs_fixed_shapes(x_TD):
        if not torch.is_grad_enabled():
            return x_TD.index_select(0, routing.order)
        may_drop = routing.weight is not None
        return _Dispatch.apply(x_TD, routing.order, routing.place, may_drop)
    # What compiles well; and torch 2.6 compiles the backward of an index_select that repeats rows wrongly for CPUs.
    choices = routing.place.shape[1]
    source = x_TD.unsqueeze(1).expand(-1, choices, -1).reshape(-1, x_TD.shape[1])
    places = x_TD.new_zeros(routing.order.shape[0] + 1, x_TD.shape[1])  # the last is for what is dropped
    return places.index_copy(0, routing.place.flatten(), source)[:-1]


class _Dispatch(torch.autograd.Function):
    """Rows picked by ``order``, with a backward that picks by ``place``.

    The backward of index_select adds rows up where they came from: by atomic operations on GPUs, in an order that
    changes from run to run.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, order: Tensor, place_TK: Tensor, may_drop: bool) -> Tensor:
        return x_TD.index_select(0, order)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, order, place_TK, ctx.may_drop = inputs
        ctx.save_for_backward(place_TK)
        ctx.save_for_forward(order)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (place_TK,) = ctx.saved_tensors
        if ctx.may_drop:  # one more row for what was dropped
            grad_ND = torch.cat([grad_ND, grad_ND.new_zeros(1, grad_ND.shape[1])])
        choices = [grad_ND.index_select(0, place) for place in place_TK.unbind(1)]
        return sum(choices[1:], start=choices[0]), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent_TD: Tensor, *_: Any) -> Tensor:
        (order,) = ctx.saved_tensors
        return tangent_TD.index_select(0, order)


def combine(outputs: list[Tensor], routing: Routing) -> Tensor:
    """The weighted sum of the experts' outputs for each row, (T, D); zero for a row of which nothing was kept.

    Args:
        outputs: of each expert, in the order of ``routing.order``.
        routing: as the rows were dispatched.
    """
    if torch.is_grad_enabled() and not _needs_fixed_shapes(outputs[0]):
        return _Combine.apply(routing.order, routing.place, routing.weight, *outputs)
    return _weighted_sum(outputs, routing.place, routing.weight)


def _weighted_sum(outputs: Sequence[Tensor], place_TK: Tensor, weight_TK: Tensor | None) -> Tensor:
    if weight_TK is None:
        return torch.cat(list(outputs)).index_select(0, place_TK[:, 0])
    y_ND = torch.cat([*outputs, outputs[0].new_zeros(1, outputs[0].shape[1])])  # the last is what was dropped
    weights = weight_TK.to(y_ND.dtype).unsqueeze(2).unbind(1)
    choices = [weight * y_ND.index_select(0, place) for weight, place in zip(weights, place_TK.unbind(1), strict=True)]
    return sum(choices[1:], start=choices[0])


class _Combine(torch.autograd.Function):
    """The weighted sum, with a backward that picks by ``order``; see :class:`_Dispatch` for why."""

    generate_vmap_rule = True

    @staticmethod
    def forward(order: Tensor, place_TK: Tensor, weight_TK: Tensor | None, *outputs: Tensor) -> Tensor:
        return _weighted_sum(outputs, place_TK, weight_TK)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        order, place_TK, weight_TK, *outputs = inputs
        ctx.sizes = [rows.shape[0] for rows in outputs]
        kept = [] if weight_TK is None else [place_TK, weight_TK]
        if weight_TK is not None and ctx.needs_input_grad[2]:
            kept += outputs
        ctx.save_for_backward(order, *kept)
        ctx.save_for_forward(place_TK, weight_TK, *outputs)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        order, *kept = ctx.saved_tensors
        grads = grad_TD.index_select(0, order).split(ctx.sizes)
        if not kept:
            return None, None, None, *grads
        place_TK, weight_TK, *outputs = kept
        places = sum(ctx.sizes)
        weight_N = weight_TK.new_zeros(places + 1).scatter(0, place_TK.flatten(), weight_TK.flatten())
        weights = weight_N[:places].to(grad_TD.dtype).unsqueeze(1).split(ctx.sizes)
        grad_weight_TK = None
        if ctx.needs_input_grad[2]:
            products = [(grad * rows).sum(1) for grad, rows in zip(grads, outputs, strict=True)]
            grad_weight_N = torch.cat([*products, products[0].new_zeros(1)])
            grad_weight_TK = grad_weight_N[place_TK].to(weight_TK.dtype)
        return None, None, grad_weight_TK, *(grad * weight for grad, weight in zip(grads, weights, strict=True))

    @staticmethod
    def jvp(ctx: Any, _order: Any, _place: Any, tangent_TK: Tensor | None, *tangents: Tensor) -> Tensor:
        place_TK, weight_TK, *outputs = ctx.saved_tensors
        tangent = _weighted_sum(tangents, place_TK, weight_TK)
        return tangent if tangent_TK is None else tangent + _weighted_sum(outputs, place_TK, tangent_TK)
