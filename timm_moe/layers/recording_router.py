"""Records of routers: their losses in training forwards, and statistics.

The losses wait until someone adds them to the training loss. CONTRIBUTING.md has the rules: "When a
router's loss is taken, added, dropped, told of".
"""

import warnings
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from .balancing_bias import BalancingBias
from .functional import Mode, current_mode
from .living import find
from .router import Router
from .router_totals import KEPT, RouterRecord, RouterTotals

#: Number of records whose losses wait at which a router warns. No model calls a router so often for
#: one loss.
MANY_WAITING = 256
#: What to do where nobody adds losses.
_UNADDED = (
    "Where routers are not to be trained, call eval() on them, use torch.no_grad(), or freeze them "
    "with requires_grad_(False); else add timm_moe.auxiliary_loss(model) to the loss after each "
    "forward."
)

#: Tracker that is never entered: it is only asked whether backward is running.
_tracker = ModuleTracker()


def in_backward() -> bool:
    """Tell if backward is running, as when gradient checkpointing repeats a forward.

    Compiled code cannot ask this, so there the answer is no.
    """
    return not torch.compiler.is_compiling() and _tracker.is_bw


class Begun(Enum):
    """Event to which a router's records belong, since the last step of its optimizer.

    Attributes:
        NOTHING: a part of the model was called by itself. Records gather until someone takes them.
        FORWARD: a forward of the model. The next one drops the records that wait.
        TASK: a training task. The records of all of its forwards gather.
    """

    NOTHING = "nothing"
    FORWARD = "forward"
    TASK = "task"


class RecordingRouter(Router):
    """Base class of routers with losses; CONTRIBUTING.md says when a record is taken.

    Args:
        num_experts: E.
        loss_weights: weight of each loss by name. Subclasses compute only losses that are here.
        bias_rate: rate of a bias that balances the experts; 0 for no bias.

    Attributes:
        balancing_bias: bias that the recorded loads move, for the choice of subclasses; or None.
        records: records whose losses wait, in the order of the calls.
        begun: event to which they belong.
        passed_by: number of records that waited at the last step of an optimizer that does not
            train the router.
        added: whether losses were added since that event began. Later records of the same forward
            or task are then repetitions.
        totals: statistics of the records whose losses were added, or that an optimizer's step took
            since they had none.
    """

    records: list[RouterRecord]

    def __init__(self, num_experts: int, loss_weights: dict[str, float], bias_rate: float = 0.0):
        super().__init__(num_experts)
        self.balancing_bias = BalancingBias(num_experts, bias_rate) if bias_rate else None
        self.loss_weights = loss_weights
        self.totals = RouterTotals()
        self.forget()

    def is_recording(self) -> bool:
        """Tell if this is training, with gradients.

        Raises:
            RuntimeError: if this is training and its losses would be lost.
        """
        if not self.training:
            return False
        self._check_can_record()
        return torch.is_grad_enabled()

    def _check_can_record(self) -> None:
        """Raise RuntimeError in a trace or export, and under nn.DataParallel."""
        mode = current_mode()
        if mode.is_plain:
            raise RuntimeError(
                "TorchScript would lose the routers' losses: trace the model in eval mode."
            )
        if mode is Mode.EXPORTED:
            raise RuntimeError(
                "torch.export would lose the routers' losses: export the model in eval mode."
            )
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel would lose the routers' losses: train with "
                "DistributedDataParallel."
            )

    def record(
        self,
        losses: dict[str, Tensor],
        load_GE: Tensor,
        capacity: int | None = None,
    ) -> None:
        """Take a record; ``forward`` calls this where :meth:`is_recording`.

        Args:
            losses: each loss in ``loss_weights`` by name, without its weight: its mean over the
                groups, with its gradient.
            load_GE: (G, E) number of choices of each expert in each group.
            capacity: number of choices of a group that an expert takes; None for all.

        Raises:
            ValueError: if a loss has no weight or is no scalar, a weight has no loss, or
                ``load_GE`` has another shape.
            RuntimeError: if backward repeats a forward that ran without gradients, so that nothing
                was recorded.
        """
        if load_GE.dim() != 2 or load_GE.shape[1] != self.num_experts:
            raise ValueError(
                f"The load that {type(self).__name__} records has the shape "
                f"{tuple(load_GE.shape)}, not (groups, {self.num_experts} experts)."
            )
        self._check_losses(losses)
        # A frozen router keeps its bias, and is not to be balanced by the layers before it either.
        parameters = list(self.parameters())
        is_trained = any(parameter.requires_grad for parameter in parameters)
        due = losses if is_trained or not parameters else {}
        bias = self.balancing_bias if is_trained else None
        # In a repetition only the record is left out, not the losses, since checkpointing expects
        # the same operators again.
        if in_backward():
            if (due or bias is not None) and not (self.records or self.added):
                raise RuntimeError(
                    "Reentrant gradient checkpointing loses the routers' losses and loads: give it "
                    "use_reentrant=False."
                )
            return
        if bias is not None:
            bias.count(load_GE.sum(0))
        # Compiled code does not look at the state: with other values it would be compiled to
        # another graph, and checkpointing fails. It cannot tell a repetition in backward from a
        # forward either, so `waiting` ignores its repetitions.
        if not torch.compiler.is_compiling() and self.added and self.begun is not Begun.NOTHING:
            # A part of the model is called by itself after the losses of a forward were added.
            self._begin(Begun.TASK if self.begun is Begun.TASK else Begun.NOTHING)
        weighted = [self.loss_weights[name] * loss for name, loss in due.items()]
        record = RouterRecord(
            losses={name: loss.detach() for name, loss in losses.items()},
            weighted_loss=sum(weighted[1:], start=weighted[0]) if weighted else None,
            load_GE=load_GE.detach(),
            capacity=capacity,
        )
        records = [*self.records, record]
        # Records without losses may never be taken, so only the last ones are kept.
        self.records = records if _has_gradient(record) else records[-KEPT:]
        if not torch.compiler.is_compiling() and len(self.records) == MANY_WAITING:
            warnings.warn(
                f"The losses of {MANY_WAITING} calls of a router wait, and so their graphs stay in "
                f"memory. {_UNADDED}",
                stacklevel=2,
            )

    def _check_losses(self, losses: dict[str, Tensor]) -> None:
        """Raise ValueError unless the losses are scalars, and those that have weights."""
        for name in losses.keys() - self.loss_weights.keys():
            raise ValueError(
                f"The loss {name!r} has no weight: give {type(self).__name__} one in loss_weights."
            )
        for name in self.loss_weights.keys() - losses.keys():
            raise ValueError(
                f"{type(self).__name__} records no loss {name!r}, and loss_weights has one: record "
                "it in every forward, as zero where it has no part."
            )
        for name, loss in losses.items():
            if loss.ndim:
                raise ValueError(
                    f"The loss {name!r} that {type(self).__name__} records has the shape "
                    f"{tuple(loss.shape)}: take its mean."
                )

    def forget(self) -> None:
        """Forget the losses and the loads of the balancing bias that an earlier run left.

        Statistics stay.
        """
        self.end_step()
        if self.balancing_bias is not None:
            self.balancing_bias.load = None

    def drop(self) -> None:
        """Drop the losses that wait, on purpose."""
        self.records = []

    def _begin(self, what: Begun) -> None:
        """Drop the records, as another event begins."""
        self.records = []
        self.added = False
        self.passed_by = 0
        self.begun = what

    def begin_forward(self) -> None:
        """Drop the losses that wait as the model begins a training forward; keep them in a task."""
        if in_backward():
            return
        if self.begun is not Begun.TASK:
            self._note_lost()
            self._begin(Begun.FORWARD)
        elif self.added:  # The task adds the losses of each forward by itself.
            self._begin(Begun.TASK)

    def begin_task(self) -> None:
        """Drop the losses that wait, and gather from now on."""
        self._note_lost()
        self._begin(Begun.TASK)

    def _note_lost(self) -> None:
        """Count a forward whose losses are dropped, unless it was another optimizer's."""
        if self.has_pending_losses() and not self.passed_by:
            self.totals.lost += 1

    def end_task(self) -> None:
        """Stop gathering: another forward replaces the records of the task."""
        self.begun = Begun.FORWARD if self.records or self.added else Begun.NOTHING

    def waiting(self) -> list[RouterRecord]:
        """Return the records that wait.

        There are none in eval mode, where losses of an earlier training forward are not due.
        """
        # No backward repeats a forward before it has reached the sum of the added losses. Earlier
        # sums may be those of batches that were left out.
        are_repetitions = (
            self.added and self.begun in (Begun.FORWARD, Begun.TASK) and self.totals.is_last_trained
        )
        return self.records if self.training and not are_repetitions else []

    def take(self) -> list[RouterRecord]:
        """Return the records that wait, whose losses are added now, and clear the list."""
        if not self.training:
            return []
        records = self.waiting()
        self.records = []
        self.added = self.added or len(records) > 0
        self.passed_by = 0
        return records

    def has_pending_losses(self) -> bool:
        """Tell if losses with a gradient wait."""
        return any(map(_has_gradient, self.waiting()))

    def end_step(self) -> None:
        """Clear the state as an optimizer that trains this router steps.

        The caller has looked for pending losses.
        """
        self._begin(Begun.NOTHING)
        self.totals.end_step()

    def end_other_step(self) -> None:
        """Note that an optimizer steps that does not train this router.

        Records that no forward began are dropped with a warning, since nobody seems to add them,
        if the router has run again since such a step.
        """
        if not self.has_pending_losses():
            return
        if 0 < self.passed_by < len(self.records) and self.begun is Begun.NOTHING:
            self._begin(Begun.NOTHING)
            warnings.warn(
                f"Nobody adds the losses of routers, so they are forgotten. {_UNADDED}",
                stacklevel=2,
            )
        else:
            self.passed_by = len(self.records)

    # A copy or a pickle must hold no graph.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "records": [], "totals": RouterTotals()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "totals": RouterTotals()})
        self.forget()


def _has_gradient(record: RouterRecord) -> bool:
    """Tell if a record has a loss that trains a parameter."""
    return record.weighted_loss is not None and record.weighted_loss.requires_grad


def begin_forward(module: nn.Module, *args: Any) -> None:
    """Tell all routers of a model that a training forward begins.

    Either the model or the router itself may be in eval mode. This is a forward pre-hook of the
    model.
    """
    is_training = module.training and torch.is_grad_enabled()
    for router in find(RecordingRouter, module):
        if router.is_recording() or is_training:
            router.begin_forward()
