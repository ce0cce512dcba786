"""Statistics of a router over its training forwards."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Largest number of records that are kept before they are summed. It is also the number of training
#: forwards between two searches for NaN in logits, and the log interval of timm's train.py.
KEPT = 50


@dataclass(frozen=True)
class RoutingSummary:
    """Statistics of a router over a number of training forwards.

    Attributes:
        losses: mean of each loss by name, without its weight.
        dropped: fraction of all choices (K for each token) beyond the capacities of their experts.
        load: fraction of all choices that fell on each expert, dropped ones included; they sum to
            1.
    """

    losses: dict[str, float]
    dropped: float
    load: list[float]

    def __str__(self) -> str:
        losses = "".join(f"{name} loss {value:.3g}, " for name, value in self.losses.items())
        mean = sum(self.load) / len(self.load)
        load = " / ".join(f"{share:.1%}" for share in (min(self.load), mean, max(self.load)))
        return f"{losses}dropped {self.dropped:.1%}, share of an expert min/mean/max {load}"


class ForwardStatistics(NamedTuple):
    """Numbers of one training forward, from a :class:`timm_moe.layers.RouterRecord`.

    They hold no graph.
    """

    losses: dict[str, Tensor]
    load_GE: Tensor
    capacity: int | None
    checked: list[Tensor]


class RouterTotals:
    """Sums over the training forwards of one router, on its device.

    Reading them waits for the device. Records are kept, and summed when there are :data:`KEPT` of
    them or someone asks for a sum, so that a forward needs no sum.

    Attributes:
        forwards: records since the sums began, one for each call of the router.
        taken: forwards of the model since then, whose losses are taken together.
        is_complete: whether an epoch has ended, so that the next record begins new sums.
        lost: forwards since the last optimizer step whose losses were dropped, as another forward
            began.
        untrained: sums of losses that were taken since the last optimizer step, and that no
            backward has reached; each is an object of its own.
    """

    def __init__(self) -> None:
        self.lost = 0
        self.untrained: set[object] = set()
        self._begin()

    def _begin(self) -> None:
        self.forwards = self.taken = 0
        self.is_complete = False
        self.losses: dict[str, Tensor] = {}
        self.load: Tensor | int = 0
        self.dropped: Tensor | int = 0
        self._not_finite: Tensor | int = 0  # since the last call of not_finite
        self._kept: list[ForwardStatistics] = []

    def add(self, forward: ForwardStatistics) -> None:
        """Add a forward, whose tensors nobody changes."""
        if self.is_complete:
            self._begin()
        self.forwards += 1
        self._kept.append(forward)
        if len(self._kept) == KEPT:
            self._sum_up()

    def _sum_up(self) -> None:
        """Add the kept records to the sums."""
        kept = self._kept
        self._kept = []
        if not kept:
            return
        for name in kept[0].losses:
            total = torch.stack([forward.losses[name] for forward in kept]).sum()
            self.losses[name] = self.losses.get(name, 0) + total
        by_capacity: dict[int | None, list[Tensor]] = {}
        for forward in kept:
            by_capacity.setdefault(forward.capacity, []).append(forward.load_GE)
        for capacity, loads in by_capacity.items():
            load_GE = torch.cat(loads)
            self.load = self.load + load_GE.sum(0)
            if capacity is not None:
                self.dropped = self.dropped + (load_GE - capacity).clamp(min=0).sum()
        numbers = torch.stack([torch.stack(forward.checked) for forward in kept])
        self._not_finite = self._not_finite + (~numbers.isfinite().all(1)).sum()

    def summary(self) -> RoutingSummary:
        """Return the means over the forwards, of which there is at least one."""
        self._sum_up()
        load = torch.as_tensor(self.load).cpu().double()  # MPS has no float64
        choices = max(load.sum().item(), 1.0)
        return RoutingSummary(
            losses={name: float(total) / self.forwards for name, total in self.losses.items()},
            dropped=int(self.dropped) / choices,
            load=(load / choices).tolist(),
        )

    def not_finite(self) -> tuple[int, int]:
        """Return the number of calls with NaN or Inf in the logits, and of all forwards.

        Both count from the last look, which was at most :data:`KEPT` forwards before.
        """
        self._sum_up()
        bad = int(self._not_finite)
        self._not_finite = 0
        return bad, self.taken % KEPT or KEPT
