"""Statistics of a router over its training forwards."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

#: Largest number of records that are kept before they are summed.
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


class RouterRecord(NamedTuple):
    """Losses and statistics of one training forward of a router.

    The properties are computed when someone asks for them.

    Attributes:
        losses: mean over the groups of each loss by name, without its weight, detached.
        weighted_loss: weighted sum of the losses, for the training loss; None if there are no
            weights, of a frozen router, and in the totals.
        load_GE: (G, E) number of choices of each expert in each group, dropped choices included.
        capacity: number of choices of a group that an expert takes; None if nothing is dropped.
    """

    losses: dict[str, Tensor]
    weighted_loss: Tensor | None
    load_GE: Tensor
    capacity: int | None

    @property
    def load(self) -> Tensor:
        """Number of choices of each expert, (E,), dropped choices included."""
        return self.load_GE.sum(0)

    @property
    def dropped(self) -> Tensor:
        """Number of choices beyond the capacities, ()."""
        if self.capacity is None:
            return self.load_GE.new_zeros(())
        return (self.load_GE - self.capacity).clamp(min=0).sum()


@dataclass
class Sums:
    """Sums over a number of forwards, on the router's device.

    Attributes:
        forwards: number of those with each loss, by its name.
        losses: sum of each loss by name.
        load: (E,) number of choices of each expert.
        dropped: number of choices beyond the capacities.
    """

    forwards: Counter[str]
    losses: dict[str, Tensor]
    load: Tensor | int = 0
    dropped: Tensor | int = 0

    @classmethod
    def over(cls, records: list[RouterRecord]) -> "Sums":
        """Sum over records, of which there is at least one."""
        forwards = Counter(name for record in records for name in record.losses)
        losses = {
            name: torch.stack([each.losses[name] for each in records if name in each.losses]).sum()
            for name in forwards
        }
        sums = cls(forwards, losses)
        by_capacity: dict[int | None, list[Tensor]] = {}
        for record in records:
            by_capacity.setdefault(record.capacity, []).append(record.load_GE)
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
            losses={name: float(loss) / self.forwards[name] for name, loss in self.losses.items()},
            dropped=int(self.dropped) / choices,
            load=(load / choices).tolist(),
        )


class RouterTotals:
    """Sums over the training forwards of one router, for each reader.

    Records are kept, and summed when there are :data:`KEPT` of them or someone asks for a sum, so
    that a forward needs no sum.

    Attributes:
        forwards: all records, one for each call of the router.
        lost: forwards since the last optimizer step whose losses were dropped, as another forward
            began.
        untrained: sums of losses that were taken since the last optimizer step, and that no
            backward has reached; each is an object of its own.
        is_last_trained: whether backward has reached the sum that was taken last. Compiled code
            reads it, so it is no search for an object, which would be compiled for each one.
    """

    def __init__(self) -> None:
        self.forwards = self.lost = 0
        self.untrained: set[object] = set()
        self.is_last_trained = True
        self._last_sum: object = None
        self._kept: list[RouterRecord] = []
        self._sums: dict[Reader, Sums] = {}

    def take(self, sum_of_losses: object) -> None:
        """Note that a sum of losses was taken."""
        self.untrained.add(sum_of_losses)
        self._last_sum = sum_of_losses
        self.is_last_trained = False

    def reach(self, sum_of_losses: object) -> None:
        """Note that backward reaches a sum of losses that was taken."""
        self.untrained.discard(sum_of_losses)
        if sum_of_losses is self._last_sum:
            self.is_last_trained = True

    def end_step(self) -> None:
        """Forget what was lost or not trained before a step of the router's optimizer."""
        self.lost = 0
        self.untrained.clear()
        self.is_last_trained = True

    def add(self, record: RouterRecord) -> None:
        """Add a record, whose tensors nobody changes, and which holds no graph."""
        self.forwards += 1
        self._kept.append(record)
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

    def summary(self, reader: Reader) -> RoutingSummary | None:
        """Return the means over the forwards since a reader's sums began; None without forwards."""
        self._sum_up()
        sums = self._sums.get(reader)
        return None if sums is None else sums.summary()

    def begin(self, reader: Reader) -> None:
        """Begin the sums of a reader anew."""
        self._sum_up()
        self._sums.pop(reader, None)
