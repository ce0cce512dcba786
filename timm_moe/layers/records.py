"""What routers have to say of their training forwards, kept until someone adds their losses to the training loss."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: torch 2.6 has no such function.
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


class RouterRecord(NamedTuple):
    """What a router has to say of one forward in training.

    Attributes:
        losses: mean over the groups of each of its losses by name, without their weights, detached.
        weighted_loss: their weighted sum, to be added to the training loss; None if all weights are 0.
        load: (E,) number of choices that went for each expert, dropped ones included.
        dropped: () number of choices that found no place.
        finite: () whether all logits were finite numbers.
    """

    losses: dict[str, Tensor]
    weighted_loss: Tensor | None
    load: Tensor
    dropped: Tensor
    finite: Tensor


class RecordingRouter(nn.Module):
    """Base of the routers that have losses.

    In training, each forward leaves a record, whose losses are pending until someone adds them to the training loss.
    A forward of the model replaces the records of the one before, unless a training task gathers those of several.
    Once the losses were added, no more records are taken until the next forward of the model begins, so that what
    gradient checkpointing repeats in backward does not count. Where nobody announces forwards, because the model itself
    is not called, records gather until their losses are added.

    Attributes:
        loss_weights: weight of each loss by name; those without one are not computed.
        records: of the last forward of the model in training, in the order of the calls of this router.
        pending: whether their losses wait to be added.
        gathering: whether a task wants the records of all forwards until it ends.
        announced: whether :meth:`begin_forward` was called since the last optimizer step.
        discarded: whether pending losses were replaced by those of another forward since the last optimizer step.
    """

    def __init__(self, loss_weights: dict[str, float]):
        super().__init__()
        self.loss_weights = loss_weights
        self._reset()

    def _reset(self) -> None:
        self.records: list[RouterRecord] = []
        self.pending = self.gathering = self.announced = self.discarded = False

    def begin_forward(self) -> None:
        """A forward of the model begins: take its records, if it is one in training."""
        if self.is_recording():
            if not self.gathering:
                self.discarded = self.discarded or self.has_pending_losses()
                self.records = []
            self.pending = self.announced = True

    def begin_task(self) -> None:
        """A training task begins: forget the records before it, and gather."""
        self.forget()
        self.gathering = True

    def forget(self) -> None:
        """Forget the records."""
        self.records = []
        self.pending = False

    def is_recording(self) -> bool:
        """Whether this is training, with gradients.

        Raises:
            RuntimeError: in training, where the losses would be lost: in a trace or export, under nn.DataParallel.
        """
        if not self.training:
            return False
        if torch.jit.is_tracing():
            raise RuntimeError("TorchScript would lose the routers' losses: trace the model in eval mode.")
        if _is_exporting():
            raise RuntimeError("torch.export would lose the routers' losses: export the model in eval mode.")
        if getattr(self, "_is_replica", False):
            raise RuntimeError("nn.DataParallel would lose the routers' losses: train with DistributedDataParallel.")
        return torch.is_grad_enabled()

    def record(self, losses: dict[str, Tensor], load: Tensor, dropped: Tensor, finite: Tensor) -> None:
        """Take a record; arguments as :class:`RouterRecord` has them, but the losses with their gradients."""
        if not self.pending:
            if self.announced:
                return  # Only this is left out in a repetition: checkpointing wants to see all else computed again.
            self.records = []
            self.pending = True
        weighted = [self.loss_weights[name] * loss for name, loss in losses.items()]
        record = RouterRecord(
            losses={name: loss.detach() for name, loss in losses.items()},
            weighted_loss=sum(weighted[1:], start=weighted[0]) if weighted else None,
            load=load,
            dropped=dropped,
            finite=finite,
        )
        # Without anything to add, nobody may ever come for the records, so they must not pile up.
        self.records = [*self.records, record] if _have_gradient([record]) else [record]

    def has_pending_losses(self) -> bool:
        """Whether losses with a gradient wait to be added."""
        return self.pending and _have_gradient(self.records)

    def __getstate__(self) -> dict[str, Any]:  # for a deep copy or a pickle, to which no graph must be tied
        return {**self.__dict__, "records": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()


def _have_gradient(records: list[RouterRecord]) -> bool:
    return any(record.weighted_loss is not None and record.weighted_loss.requires_grad for record in records)


def begin_forward(module: nn.Module, *args: Any) -> None:
    """Forward pre-hook of a model: announces its forward to the routers in it."""
    for router in module.modules():
        if isinstance(router, RecordingRouter):
            router.begin_forward()
