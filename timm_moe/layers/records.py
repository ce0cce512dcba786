"""What routers have to say of their training forwards, kept until someone adds their losses to the training loss."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from .router import Router

#: torch 2.6 has no such function.
is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


#: Never entered; it knows whether backward is running.
_tracker = ModuleTracker()
#: Calls whose losses are kept where nobody announces forwards: those of several forwards of the deepest models whose
#: blocks share a router.
MOST_WAITING = 256


def in_backward() -> bool:
    """Whether this is run by backward, as the forwards that gradient checkpointing repeats.

    What is compiled cannot ask.
    """
    return not torch.compiler.is_compiling() and _tracker.is_bw


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


class RecordingRouter(Router):
    """Base of the routers that have losses.

    In training, each forward leaves a record, whose losses wait until someone adds them to the training loss. A forward
    of the model replaces the records of the one before, unless a training task gathers those of several. What gradient
    checkpointing repeats in backward does not count. Once the losses were added, no more records are taken until the
    next forward of the model begins. Where nobody announces forwards, because the model itself is not called, records
    gather until their losses are added; those that wait in vain are forgotten with a warning.

    Attributes:
        loss_weights: weight of each loss by name; those without one are not computed.
        records: of the last forward of the model in training, in the order of the calls of this router.
        phase: what comes of the next record, see below.
        discarded: whether losses that waited were replaced by those of another forward since the last optimizer step.
        waited: number of records that were there at the last step of an optimizer which does not train this router.
    """

    #: Of ``phase``. The next record is the first of a new list, as nobody announced a forward since the last step; ...
    ANEW = "anew"
    #: ... is one more of those that nobody announced; ...
    UNANNOUNCED = "unannounced"
    #: ... is one more of the model's forward; ...
    FORWARD = "forward"
    #: ... is one more of all forwards of a training task; ...
    TASK = "task"
    #: ... is not taken, as the losses were added.
    ADDED = "added"

    phase: str

    def __init__(self, num_experts: int, loss_weights: dict[str, float]):
        super().__init__(num_experts)
        self.loss_weights = loss_weights
        self._reset()

    def _reset(self) -> None:
        self.discarded = False
        self.forget()

    def begin_forward(self) -> None:
        """A forward of the model begins: take its records, if it is one in training."""
        if self.phase != self.TASK and self.is_recording() and not in_backward():
            self.discarded = self.discarded or self.has_pending_losses()
            self.forget()
            self.phase = self.FORWARD

    def begin_task(self) -> None:
        """A training task begins: forget the records before it, and gather."""
        self.forget()
        self.phase = self.TASK

    def end_task(self) -> None:
        """The training task has ended; another forward replaces its records."""
        if self.phase == self.TASK:
            self.phase = self.FORWARD if self.records else self.ANEW

    def forget(self) -> None:
        """Forget the records."""
        self.records: list[RouterRecord] = []
        self.phase = self.ANEW
        self.waited = 0

    def is_pending(self) -> bool:
        """Whether there are records whose losses were not added yet."""
        return len(self.records) > 0 and self.phase not in (self.ANEW, self.ADDED)

    def has_pending_losses(self) -> bool:
        """Whether losses with a gradient wait to be added."""
        return self.is_pending() and _have_gradient(self.records)

    def end_waiting(self) -> None:
        """The losses were added."""
        self.phase = self.ANEW if self.phase == self.UNANNOUNCED else self.ADDED

    def see_step(self) -> None:
        """An optimizer steps that trains this router."""
        if self.phase != self.UNANNOUNCED:
            self.phase = self.ANEW
        self.discarded = False

    def see_another_step(self) -> None:
        """An optimizer steps that does not train this router: what its last step saw waiting waits in vain."""
        if self.phase == self.UNANNOUNCED and self.has_pending_losses():
            if self.waited:
                self._forget_oldest(self.waited)
            self.waited = len(self.records)

    def _forget_oldest(self, number: int) -> None:
        self.records = self.records[number:]
        self.waited = max(self.waited - number, 0)
        warnings.warn(
            "Nobody adds the losses of routers in a model that is in training mode, so they are forgotten. Where "
            "routers are not to be trained, call eval() on them or freeze them with requires_grad_(False); else add "
            "timm_moe.auxiliary_loss(model) to the loss after each forward.",
            stacklevel=3,
        )

    def is_recording(self) -> bool:
        """Whether this is training, with gradients.

        Raises:
            RuntimeError: in training, where the losses would be lost: in a trace or export, under nn.DataParallel.
        """
        if not self.training:
            return False
        if torch.jit.is_tracing():
            raise RuntimeError("TorchScript would lose the routers' losses: trace the model in eval mode.")
        if is_exporting():
            raise RuntimeError("torch.export would lose the routers' losses: export the model in eval mode.")
        if getattr(self, "_is_replica", False):
            raise RuntimeError("nn.DataParallel would lose the routers' losses: train with DistributedDataParallel.")
        return torch.is_grad_enabled()

    def record(self, losses: dict[str, Tensor], load: Tensor, dropped: Tensor, finite: Tensor) -> None:
        """Take a record; arguments as :class:`RouterRecord` has them, but the losses with their gradients.

        Raises:
            RuntimeError: in a repetition of what ran without gradients, where there was nothing to record.
        """
        # Only this is left out in a repetition: checkpointing wants to see all else computed again.
        if in_backward():
            if losses and not self.records:
                raise RuntimeError(
                    "Reentrant gradient checkpointing loses the routers' losses: give it use_reentrant=False."
                )
            return
        if self.phase == self.ADDED:
            return  # what was compiled cannot ask whether it is a repetition
        if self.phase == self.ANEW:
            self.forget()
            self.phase = self.UNANNOUNCED
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
        if len(self.records) > MOST_WAITING and self.phase == self.UNANNOUNCED:
            self._forget_oldest(1)

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
