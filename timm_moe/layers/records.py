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

    In training, each forward leaves a record. Records gather until their losses are added; from then on none is taken
    until :meth:`begin_forward` is called, where a forward of the model begins, so that what gradient checkpointing
    repeats in backward does not count. A router whose forwards nobody announces takes a new record after the last ones
    were added.

    Attributes:
        loss_weights: weight of each loss by name; those without one are not computed.
        records: of the training forwards since the last ones were added, oldest first.
        added: whether their losses were added to a training loss.
        announced: whether :meth:`begin_forward` is called for the forwards since the last optimizer step.
    """

    def __init__(self, loss_weights: dict[str, float]):
        super().__init__()
        self.loss_weights = loss_weights
        self.clear_records()

    def clear_records(self) -> None:
        """Forget all records."""
        self.records: list[RouterRecord] = []
        self.added = True  # nothing is left to add
        self.announced = False

    def begin_forward(self) -> None:
        """A forward of the model begins: take records, if it is one in training."""
        if self.is_recording():
            if self.added or not self.loss_weights:
                self.records = []
                self.added = False
            self.announced = True

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
        if self.added:
            if self.announced:
                return  # Only this is left out in a repetition: checkpointing wants to see all else computed again.
            self.records = []
            self.added = False
        weighted = [self.loss_weights[name] * loss for name, loss in losses.items()]
        self.records.append(
            RouterRecord(
                losses={name: loss.detach() for name, loss in losses.items()},
                weighted_loss=sum(weighted[1:], start=weighted[0]) if weighted else None,
                load=load,
                dropped=dropped,
                finite=finite,
            )
        )

    def __getstate__(self) -> dict[str, Any]:  # for a deep copy or a pickle, to which no graph must be tied
        return {**self.__dict__, "records": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.clear_records()


def begin_forward(module: nn.Module, *args: Any) -> None:
    """Forward pre-hook of a model: announces its forward to the routers in it."""
    for router in module.modules():
        if isinstance(router, RecordingRouter):
            router.begin_forward()
