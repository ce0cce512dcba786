"""Routings: the rows that each expert gets, and the way of the outputs back.

Shape suffixes: T rows, E experts, K choices of a row, N slots of the experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """The rows that each expert gets where rows choose experts, and the way of the outputs back.

    Shapes do not depend on the choices, so a routing is made without a wait for the device. It
    holds what is computed once for a layer. A field is None where its values follow from the
    others.

    Attributes:
        token_indices: (N,) row of the input in each slot of the experts' input, in the order of the
            experts. An unused slot holds any row.
        offsets: (E,) end of each expert's slots; None with ``slots_per_expert``. Slots past the
            last end are padding, whose outputs are zero.
        slots: (T, K) slot of each choice of a row; None if each row has one slot and each slot one
            row.
        gates: (T, K) factor of each choice's output; None if all are one.
        slots_per_expert: number of slots of each expert, used or not, if all have equally many;
            else None.
        is_dropped: (T, K) whether a choice is beyond the capacity of its expert; None if nothing
            can be dropped.
        chosen: (T, K) expert of each choice before capacities drop some; None if the slots tell it.
        is_full: whether it is known that no slot is past the last end.
    """

    token_indices: Tensor
    offsets: Tensor | None = None
    slots: Tensor | None = None
    gates: Tensor | None = None
    slots_per_expert: int | None = None
    is_dropped: Tensor | None = None
    chosen: Tensor | None = None
    is_full: bool = False

    def experts(self) -> Tensor:
        """Return the expert of each choice, (T, K), and E for one that is dropped or not made."""
        if self.slots is None:
            expert_N = _expert_of_slots(self)
            return (
                torch.empty_like(expert_N).index_copy_(0, self.token_indices, expert_N).unsqueeze(1)
            )
        expert_TK = (
            _expert_of(self, self.slots) if self.chosen is None else self.chosen.contiguous()
        )
        return (
            expert_TK
            if self.is_dropped is None
            else expert_TK.masked_fill(self.is_dropped, self.num_experts())
        )

    def weights(self) -> Tensor | None:
        """Return the factors of the outputs of :meth:`experts`, (T, K), or None if all are one.

        They are zero for dropped choices.
        """
        if self.gates is None or self.is_dropped is None:
            return self.gates
        return self.gates.masked_fill(self.is_dropped, 0)

    def num_experts(self) -> int:
        """Return E."""
        return _num_experts(self)

    def for_all_rows(self, rows: int) -> "Routing":
        """Return the routing of every row, where this one has one entry for each image.

        Args:
            rows: number of rows of an image.
        """

        def spread(of_images: Tensor | None) -> Any:
            """Map (B, K) to (B rows, K), with all first choices first in memory."""
            return (
                None
                if of_images is None
                else of_images.t().unsqueeze(2).expand(-1, -1, rows).flatten(1).t()
            )

        row = torch.arange(rows, device=self.token_indices.device)
        slots = (
            None
            if self.slots is None
            else (self.slots.t().unsqueeze(2) * rows + row).flatten(1).t()
        )
        return Routing(
            token_indices=(self.token_indices.unsqueeze(1) * rows + row).flatten(),
            offsets=None if self.offsets is None else self.offsets * rows,
            slots=slots,
            gates=spread(self.gates),
            slots_per_expert=(
                None if self.slots_per_expert is None else self.slots_per_expert * rows
            ),
            is_dropped=spread(self.is_dropped),
            chosen=spread(self.chosen),
            is_full=self.is_full,
        )


class ChosenRows(NamedTuple):
    """The rows that each expert gets where experts choose rows, and the way of the outputs back.

    A row may have none, one or several experts.

    Attributes:
        token_indices: (N,) row of the input in each slot, as in :class:`Routing`.
        slots: (N,) all slots, row by row.
        starts: (T,) place in ``slots`` where the slots of each row begin.
        gates: (N,) factor of each slot's output.
        rows: T. It is asked of no tensor, so that a trace needs none of what it does not use.
        offsets: see :class:`Routing`.
        slots_per_expert: see :class:`Routing`.
        is_full: see :class:`Routing`.
    """

    token_indices: Tensor
    slots: Tensor
    starts: Tensor
    gates: Tensor
    rows: int
    offsets: Tensor | None = None
    slots_per_expert: int | None = None
    is_full: bool = False

    def experts(self) -> Tensor:
        """Return the experts of each row, (T, E); E stands for those that did not choose it."""
        expert_N = _expert_of_slots(self)
        table = expert_N.new_full((self.rows * self.num_experts(),), self.num_experts())
        return table.scatter(0, self._place(expert_N), expert_N).view(self.rows, -1)

    def weights(self) -> Tensor:
        """Return the factors of the outputs of :meth:`experts`, (T, E), zero where none chose."""
        place_N = self._place(_expert_of_slots(self))
        table = self.gates.new_zeros(self.rows * self.num_experts())
        return table.scatter(0, place_N, self.gates).view(self.rows, -1)

    def num_experts(self) -> int:
        """Return E."""
        return _num_experts(self)

    def _place(self, expert_N: Tensor) -> Tensor:
        """Return the place of each slot in a table (T, E) that is flattened."""
        return self.token_indices * self.num_experts() + expert_N


AnyRouting = Routing | ChosenRows


def _num_experts(routing: AnyRouting) -> int:
    """Return E."""
    if routing.offsets is not None:
        return routing.offsets.shape[0]
    return routing.token_indices.shape[0] // (routing.slots_per_expert or 1)


def _expert_of(routing: AnyRouting, slot: Tensor) -> Tensor:
    """Return the expert that each slot belongs to."""
    if routing.offsets is None:
        return slot // (routing.slots_per_expert or 1)
    return (slot.unsqueeze(-1) >= routing.offsets).sum(-1)


def _expert_of_slots(routing: AnyRouting) -> Tensor:
    """Return the expert of all slots in their order, (N,)."""
    token_N = routing.token_indices
    return _expert_of(routing, torch.arange(token_N.shape[0], device=token_N.device))
