"""Statistics of a router over its training forwards."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

#: Largest number of records that are kept before they are summed. It is also the number of training
#: forwards between two searches for NaN in logits, and the log interval of timm's train.py.
KEPT = 50


class Reader(Enum):
    """Reader of the statistics of a router; each has sums of its own.

    Attributes:
        EPOCH: the log of train.py's epochs, and ``experts.json``.
        LOG: :func:`timm_moe.expert_statistics`.
        SUMMARY: :func:`timm_moe.routing_summary`.
    """

    EPOCH = "epoch"
    LOG = "log"
    SUMMARY = "summary"


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


@dataclass
class Sums:
    """Sums over a number of forwards, on the router's device.

    Attributes:
        forwards: their number, one for each call of the router.
        losses: sum of each loss by name.
        load: (E,) number of choices of each expert.
        dropped: number of choices beyond the capacities.
    """

    forwards: int
    losses: dict[str, Tensor]
    load: Tensor | int = 0
    dropped: Tensor | int = 0

    @classmethod
    def over(cls, forwards: list[ForwardStatistics]) -> "Sums":
        """Sum over forwards, of which there is at least one."""
        sums = cls(
            forwards=len(forwards),
            losses={
                name: torch.stack([forward.losses[name] for forward in forwards]).sum()
                for name in forwards[0].losses
            },
        )
        by_capacity: dict[int | None, list[Tensor]] = {}
        for forward in forwards:
            by_capacity.setdefault(forward.capacity, []).append(forward.load_GE)
        for capacity, loads in by_capacity.items():
            load_GE = torch.cat(loads)
            sums.load = sums.load + load_GE.sum(0)
            if capacity is not None:
                sums.dropped = sums.dropped + (load_GE - capacity).clamp(min=0).sum()
        return sums

    def __add__(self, other: "Sums") -> "Sums":
        """Return the sums over the forwards of both."""
        return Sums(
            forwards=self.forwards + other.forwards,
            losses=self.losses
            | {name: self.losses.get(name, 0) + loss for name, loss in other.losses.items()},
            load=self.load + other.load,
            dropped=self.dropped + other.dropped,
        )

    def summary(self) -> RoutingSummary:
        """Return the means; this waits for the device."""
        load = torch.as_tensor(self.load).cpu().double()  # MPS has no float64
        choices = max(load.sum().item(), 1.0)
        return RoutingSummary(
            losses={name: float(total) / self.forwards for name, total in self.losses.items()},
            dropped=int(self.dropped) / choices,
            load=(load / choices).tolist(),
        )


class RouterTotals:
    """Sums over the training forwards of one router, for each reader.

    Records are kept, and summed when there are :data:`KEPT` of them or someone asks for a sum, so
    that a forward needs no sum.

    Attributes:
        forwards: all records, one for each call of the router.
        unchecked: forwards of the model since :meth:`not_finite` was called.
        lost: forwards since the last optimizer step whose losses were dropped, as another forward
            began.
        untrained: sums of losses that were taken since the last optimizer step, and that no
            backward has reached; each is an object of its own.
    """

    def __init__(self) -> None:
        self.forwards = self.unchecked = self.lost = 0
        self.untrained: set[object] = set()
        self._kept: list[ForwardStatistics] = []
        self._sums: dict[Reader, Sums] = {}
        self._not_finite: Tensor | int = 0

    def add(self, forward: ForwardStatistics) -> None:
        """Add a forward, whose tensors nobody changes."""
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
        sums = Sums.over(kept)
        for reader in Reader:
            earlier = self._sums.get(reader)
            self._sums[reader] = sums if earlier is None else earlier + sums
        numbers = torch.stack([torch.stack(forward.checked) for forward in kept])
        self._not_finite = self._not_finite + (~numbers.isfinite().all(1)).sum()

    def summary(self, reader: Reader) -> RoutingSummary | None:
        """Return the means over the forwards since a reader's sums began; None without forwards."""
        self._sum_up()
        sums = self._sums.get(reader)
        return None if sums is None else sums.summary()

    def begin(self, reader: Reader) -> None:
        """Begin the sums of a reader anew."""
        self._sum_up()
        self._sums.pop(reader, None)

    def not_finite(self) -> tuple[int, int]:
        """Return the number of calls with NaN or Inf in the logits, and of all forwards.

        Both count from the last look, which was at most :data:`KEPT` forwards before.
        """
        self._sum_up()
        bad, forwards = int(self._not_finite), self.unchecked
        self._not_finite = self.unchecked = 0
        return bad, forwards
