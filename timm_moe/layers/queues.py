"""Choices become a routing: queues and capacities of the experts.

Shape suffixes: T rows, E experts, K choices of a row, G groups, S rows of a group, C rows that an
expert takes of a group, N slots of the experts.
"""

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .functional import Mode, current_mode
from .routing import Routing

#: Ways to round n / d for whole numbers n >= 0 and d. ONNX truncates quotients of negative numbers,
#: so these formulas have none.
ROUNDINGS: dict[str, Callable[[int, int], int]] = {
    "ceil": lambda n, d: (n + d - 1) // d,
    "round": lambda n, d: (2 * n + d - 1 + n // d % 2) // (2 * d),
    "floor": lambda n, d: n // d,
}


def images_of_group(batch: int, group_images: int, is_training: bool) -> int:
    """Return the number of images of each group of a batch.

    Args:
        batch: number of images of the batch.
        group_images: wanted number of images of a group. In eval mode a batch that it does not
            divide is one group.
        is_training: whether this is training.

    Raises:
        ValueError: if ``group_images`` does not divide the batch in training.
    """
    if group_images == 1:
        return 1
    if isinstance(batch, Tensor):  # in a trace, where the answer would be that for the traced batch
        return group_images + (batch - group_images) * (batch % group_images).clamp(max=1)
    if batch % group_images == 0:
        return group_images
    if is_training:
        allowed = [str(number) for number in range(1, batch + 1) if batch % number == 0]
        raise ValueError(
            f"group_images={group_images} does not divide the batch of {batch} images; "
            f"{', '.join(allowed)} would."
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
    """Return the number of rows that an expert takes of a group (V-MoE, section 2.4).

    It is ``choices * capacity_factor / num_experts``, rounded.

    Args:
        choices: number of rows of the group times number of choices of a row.
        num_experts: E.
        capacity_factor: 1 suffices exactly if the choices are spread evenly.
        rounding: ``"ceil"``, ``"round"`` (half to even) or ``"floor"``.
        multiple_of: the capacity is then rounded up to a multiple of this.
        most: largest number of rows of the group that may come to an expert, and so largest
            capacity.

    Raises:
        ValueError: if the capacity would be below 1. A trace cannot refuse a batch, so it takes 1.
    """
    # Sizes must follow from integers, since torch.compile may make a symbol of a float. It warns of
    # cached functions, so it gets the plain one.
    fraction = _fraction.__wrapped__ if torch.compiler.is_compiling() else _fraction
    numerator, denominator = fraction(capacity_factor)
    capacity = ROUNDINGS[rounding](choices * numerator, denominator * num_experts)
    # It is a tensor in a trace, where a number would remain the one of the traced batch.
    if isinstance(capacity, Tensor):
        capacity = capacity.clamp(min=1)
    elif capacity < 1:
        raise ValueError(
            f"capacity_factor={capacity_factor} leaves no place: {choices} choices over "
            f"{num_experts} experts give a capacity of {capacity}, below 1. It must be at least "
            f"{num_experts}/{choices}."
        )
    capacity = ROUNDINGS["ceil"](capacity, multiple_of) * multiple_of
    if most is None:
        return capacity
    return (
        torch.minimum(capacity, torch.as_tensor(most))
        if isinstance(capacity, Tensor)
        else min(capacity, most)
    )


@functools.cache
def _fraction(number: float) -> tuple[int, int]:
    fraction = Fraction(number).limit_denominator(10**6)
    return fraction.numerator, fraction.denominator


def has_equal_slots(device: torch.device, mode: Mode) -> bool:
    """Tell if each expert has equally many slots where the capacity is known before the choices.

    The experts then compute batched products, and the host waits for no count. A CPU has nothing to
    wait for, so there an expert computes its own rows alone. So does an exported program, since a
    capacity would limit its batch sizes.
    """
    return device.type != "cpu" and mode in (Mode.EAGER, Mode.COMPILED)


def equal_runs(
    num_experts: int, slots_per_expert: int, device: torch.device, mode: Mode
) -> dict[str, Any]:
    """Return fields of a routing whose experts have equally many slots, all used.

    Args:
        num_experts: E.
        slots_per_expert: number of slots of an expert.
        device: device of the routing.
        mode: mode of the call.
    """
    if has_equal_slots(device, mode):
        return {"slots_per_expert": slots_per_expert}
    offsets = torch.arange(1, num_experts + 1, device=device) * slots_per_expert
    return {"offsets": offsets, "is_full": True}


def partition(row_T: Tensor, num_experts: int, mode: Mode) -> Routing:
    """Give each expert its part of the rows in their order.

    The first ``T % E`` experts get one row more.

    Args:
        row_T: rows in some order.
        num_experts: E.
        mode: mode of the call.
    """
    rows = row_T.shape[0]
    quotient, remainder = rows // num_experts, rows % num_experts  # torch.compile knows no divmod
    if not has_equal_slots(row_T.device, mode):
        number_E = torch.arange(1, num_experts + 1, device=row_T.device)
        end_E = number_E * quotient + number_E.clamp(max=remainder)
        return Routing(row_T, end_E, is_full=True)
    if not remainder:
        return Routing(row_T, slots_per_expert=quotient)
    # The later parts leave their last slot empty.
    each, later = quotient + 1, num_experts - remainder
    place_N = torch.arange(num_experts * each, device=row_T.device)
    first, rest = place_N[: remainder * each], place_N[remainder * each :]
    slot_T = torch.cat([first, rest.view(later, each)[:, :quotient].flatten()])
    token_indices = torch.zeros_like(place_N).index_copy_(0, slot_T, row_T)
    slot_of_row_T = torch.empty_like(row_T).index_copy_(0, row_T, slot_T)
    return Routing(token_indices, slots=slot_of_row_T.unsqueeze(1), slots_per_expert=each)


class Queues(NamedTuple):
    """The choices lined up at the experts.

    Attributes:
        rank: (G, S, K) position of each choice at its expert, from 1, since slot 0 is spare where
            experts have equally many slots.
        load_first: (G, E) number of first choices of each expert.
        load: (G, E) number of all choices.
    """

    rank: Tensor
    load_first: Tensor
    load: Tensor


def queue(
    expert_GSK: Tensor, num_experts: int, priority_GS: Tensor | None = None, mode: Mode = Mode.EAGER
) -> Queues:
    """Line up the choices at their experts (V-MoE, algorithm 1).

    First come all first choices in row order, then all second choices, and so on.

    Args:
        expert_GSK: expert of each choice.
        num_experts: E.
        priority_GS: rows with a higher priority go first, equal ones in row order (batch priority
            routing, algorithm 2); None for row order.
        mode: mode of the call.
    """
    groups, rows, choices = expert_GSK.shape
    visit_GKS = None
    expert_GKS = expert_GSK.transpose(1, 2)
    if priority_GS is not None:
        visit_GS = largest(priority_GS, rows, mode)
        visit_GKS = visit_GS.unsqueeze(1).expand_as(expert_GKS)
        expert_GKS = expert_GKS.gather(2, visit_GKS)
    expert_GN = expert_GKS.reshape(groups, choices * rows)
    number_E = torch.arange(num_experts, device=expert_GSK.device)
    # GPUs add up fast over the last dimension, which is contiguous.
    count_EGN = (expert_GN == number_E.view(-1, 1, 1)).cumsum(2, dtype=torch.int32)
    rank_GKS = count_EGN.gather(0, expert_GN.unsqueeze(0)).view(groups, choices, rows)
    if visit_GKS is not None:
        rank_GKS = torch.empty_like(rank_GKS).scatter_(2, visit_GKS, rank_GKS)
    count_GEN = count_EGN.transpose(0, 1)
    if not choices * rows:
        nothing_GE = count_GEN.new_zeros(groups, num_experts)
        return Queues(rank_GKS.transpose(1, 2), nothing_GE, nothing_GE)
    # The last entry of a slice is taken, since torch.export would take a computed index for a
    # constant.
    return Queues(rank_GKS.transpose(1, 2), count_GEN[..., :rows][..., -1], count_GEN[..., -1])


def largest(x: Tensor, count: int, mode: Mode) -> Tensor:
    """Return the places of the largest entries of the last dimension, the largest first.

    Equal entries keep their order.
    """
    if mode is Mode.ONNX:  # It has no stable sort, but its topk takes the first of equal entries.
        return x.topk(count, -1).indices
    return x.argsort(dim=-1, descending=True, stable=True)[..., :count]


def assign(
    expert_GSK: Tensor,
    gate_GSK: Tensor,
    queues: Queues,
    capacity: int | None = None,
    mode: Mode = Mode.EAGER,
    may_wait: bool = False,
) -> Routing:
    """Give each choice a slot of its expert, if it is within the expert's capacity in its group.

    With a capacity, on a GPU, every expert gets equally many slots, so that shapes are known
    without a wait for the device. Its first slot is spare, for what is dropped. Where the host may
    wait and over three quarters of the slots would be unused, only used slots are made. Without a
    capacity there are as many slots as choices, and ``offsets`` ends those of each expert.

    Args:
        expert_GSK: expert of each choice.
        gate_GSK: factor of each choice's output.
        queues: places of the choices in the queues of the experts.
        capacity: number of choices of a group that an expert takes; None for all.
        mode: mode of the call.
        may_wait: the host may wait for the device.
    """
    groups, rows, choices = expert_GSK.shape
    num_experts, num_slots = queues.load.shape[1], expert_GSK.numel()
    expert_GKS, rank_GKS = expert_GSK.transpose(1, 2), queues.rank.transpose(1, 2)
    is_dropped_GKS: Tensor | None = None
    offsets = of_expert = None
    if capacity is not None:
        is_dropped_GKS = rank_GKS > capacity
        most = groups * num_experts * capacity + 1
        if has_equal_slots(expert_GSK.device, mode) and not (may_wait and most > 4 * num_slots + 1):
            of_expert = groups * capacity + 1
    if capacity is not None and is_dropped_GKS is not None and of_expert is not None:
        num_slots = num_experts * of_expert
        place_GKS = rank_GKS
        if groups > 1:
            first_G = torch.arange(groups, device=rank_GKS.device) * capacity
            place_GKS = rank_GKS + first_G.view(-1, 1, 1)
        slot_GKS = torch.add(place_GKS.masked_fill(is_dropped_GKS, 0), expert_GKS, alpha=of_expert)
    else:
        size_EG = queues.load.t()
        if capacity is not None:
            size_EG = size_EG.clamp(max=capacity)
            if mode is Mode.EAGER:
                num_slots = min(num_slots, most)
        end_EG = size_EG.flatten().cumsum(0).view(num_experts, groups)
        before_GE = (end_EG - size_EG - 1).t()
        before_GN = before_GE.gather(1, expert_GKS.reshape(groups, choices * rows))
        slot_GKS = before_GN.view(groups, choices, rows) + rank_GKS
        # Dropped choices share the last slot, which is free: the kept ones are fewer than all
        # choices and at most G E C, so fewer than num_slots.
        if is_dropped_GKS is not None:
            slot_GKS = slot_GKS.masked_fill(is_dropped_GKS, num_slots - 1)
        offsets = end_EG[:, -1]
    row_GKS = (
        torch.arange(groups * rows, device=slot_GKS.device)
        .view(groups, 1, rows)
        .expand_as(slot_GKS)
    )
    slot_N = slot_GKS.flatten()
    token_indices = slot_N.new_zeros(num_slots).scatter_(0, slot_N, row_GKS.flatten())

    def of_rows(x_GKS: Tensor) -> Tensor:
        return x_GKS.transpose(0, 1).flatten(1).t()

    is_dropped_TK = None if is_dropped_GKS is None else of_rows(is_dropped_GKS)
    return Routing(
        token_indices,
        offsets,
        of_rows(slot_GKS),
        gate_GSK.flatten(0, 1),
        of_expert,
        is_dropped_TK,
        chosen=expert_GSK.flatten(0, 1),
        is_full=capacity is None,
    )


def routing_to(
    expert_TK: Tensor,
    weight_TK: Tensor,
    num_experts: int,
    is_chosen_TK: Tensor | None = None,
) -> Routing:
    """Send every row to its chosen experts and drop nothing.

    Args:
        expert_TK: expert of each choice, an integer in [0, E). In each row all are different, and
            the first is the one that the row prefers, as the report shows it.
        weight_TK: factor of each expert's output, with its gradient.
        num_experts: E.
        is_chosen_TK: which of the choices are made, where rows go to different numbers of experts,
            at most K, as in top-p routing. By default all are. :meth:`Routing.experts` has E for
            the others. In eager mode on a CPU they cost nothing; elsewhere the experts' input has
            T K rows, whose number is known without a wait for the device.

    Raises:
        ValueError: if the tensors are not of one shape (T, K), the experts are no integers, or
            ``is_chosen_TK`` is not boolean.
    """
    if expert_TK.ndim != 2 or expert_TK.shape != weight_TK.shape or expert_TK.is_floating_point():
        raise ValueError(
            "A routing needs integers and their weights of one shape (T, K), got "
            f"{expert_TK.dtype} {tuple(expert_TK.shape)} and {tuple(weight_TK.shape)}."
        )
    mode = current_mode()
    if is_chosen_TK is None:
        queues = queue(expert_TK[None], num_experts, mode=mode)
        return assign(expert_TK[None], weight_TK[None], queues, mode=mode)

    if is_chosen_TK.shape != expert_TK.shape or is_chosen_TK.dtype != torch.bool:
        raise ValueError(
            f"is_chosen_TK must be boolean, of shape {tuple(expert_TK.shape)}, got "
            f"{is_chosen_TK.dtype} {tuple(is_chosen_TK.shape)}."
        )
    # The other choices line up behind those of the last expert, in slots that no expert computes.
    expert_TK = expert_TK.masked_fill(~is_chosen_TK, num_experts)
    weight_TK = weight_TK.masked_fill(~is_chosen_TK, 0)
    queues = queue(expert_TK[None], num_experts + 1, mode=mode)
    routing = assign(expert_TK[None], weight_TK[None], queues, mode=mode)
    offsets, slots = routing.offsets, routing.slots
    assert offsets is not None
    assert slots is not None
    routing = routing._replace(offsets=offsets[:-1], is_full=False)
    is_on_host = expert_TK.is_cpu and type(expert_TK) is Tensor  # with values, as no fake tensor
    if mode is not Mode.EAGER or not is_on_host:
        return routing
    num_slots = min(int(is_chosen_TK.sum()) + 1, expert_TK.numel())
    return routing._replace(
        token_indices=routing.token_indices[:num_slots],
        slots=slots.clamp(max=num_slots - 1),
    )
