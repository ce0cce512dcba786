"""How an unmodified train.py gets its callbacks. The only place that touches timm's training objects.

timm's ``create_scheduler_v2`` is where every timm training script states its optimizer, epochs and updates per epoch.
It is wrapped so that the optimizer also gets the averaging that the experts it trains were created with. Its
``create_optimizer_v2`` tells biases and matrices by their number of dimensions, of which stacked ones have one more: it
is told what they are. Its ``TrainingTask`` is where the loss is computed: every task adds the losses of the routers in
it, and compares each member of an ensemble with the targets.
"""

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm.task
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import PlateauLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask, TrainingTask
from timm.utils import unwrap_model
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..convert import expert_parameters
from ..layers import EwaMlp, MemberLoss, MoeMlp
from . import aux_loss
from .ewa import UPDATES, ExpertWeightAveraging, is_primary, trained_layers

_logger = logging.getLogger(__name__)
_scheduler_signature = inspect.signature(create_scheduler_v2)
_optimizer_signature = inspect.signature(create_optimizer_v2)

#: timm's tasks with a teacher; older versions have fewer.
_DISTILLATION_TASKS: list[Any] = [
    getattr(timm.task, name)
    for name in ("LogitDistillationTask", "FeatureDistillationTask", "TokenDistillationTask")
    if hasattr(timm.task, name)
]
#: Averagings that were attached here, not by the user, with the updates per epoch of their run.
_attached: "weakref.WeakKeyDictionary[ExpertWeightAveraging, int]" = weakref.WeakKeyDictionary()
_warned: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
_stepped: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


@functools.wraps(create_optimizer_v2)
def _create_optimizer_v2(*args: Any, **kwargs: Any) -> Optimizer:
    call = _optimizer_signature.bind(*args, **kwargs)
    model = call.arguments["model_or_params"]
    stacked = expert_parameters(model) if isinstance(model, nn.Module) else {}
    if not stacked:
        return create_optimizer_v2(*args, **kwargs)
    if "muon" in call.arguments.get("opt", "").lower():
        # It would orthogonalise the biases of all experts as one matrix, and small weights of all experts as another.
        call.arguments["fallback_list"] = [*call.arguments.get("fallback_list", ()), *stacked]
        if is_primary():
            _logger.info("Muon leaves the experts to its fallback, since their matrices are stacked.")
    with _undecayed(model, {name for name, parameter in stacked.items() if parameter.ndim == 2}):
        return create_optimizer_v2(*call.args, **call.kwargs)


@contextmanager
def _undecayed(model: nn.Module, names: set[str]) -> Iterator[None]:
    """Let ``model.no_weight_decay()`` name these parameters too, as long as this lasts."""
    attributes, own = vars(model), getattr(model, "no_weight_decay", set)
    before = attributes.get("no_weight_decay")
    attributes["no_weight_decay"] = lambda: {*own(), *names}
    try:
        yield
    finally:
        del attributes["no_weight_decay"]  # the method of its class stands again
        if before is not None:
            attributes["no_weight_decay"] = before


@functools.wraps(create_scheduler_v2)
def _create_scheduler_v2(*args: Any, **kwargs: Any) -> Any:
    lr_scheduler, num_epochs = create_scheduler_v2(*args, **kwargs)
    arguments = _scheduler_signature.bind(*args, **kwargs).arguments
    _attach_averaging(arguments["optimizer"], int(num_epochs), arguments.get("updates_per_epoch", 0))
    return lr_scheduler, num_epochs


def _attach_averaging(optimizer: Optimizer, num_epochs: int, updates_per_epoch: int) -> None:
    trained = trained_layers(optimizer, MoeMlp.alive)
    layers = [layer for layer in trained if layer.share_rate]
    earlier = ExpertWeightAveraging.of(optimizer)
    if not layers and any(isinstance(layer, EwaMlp) for layer in trained) and is_primary():
        _logger.info("EWA: share_rate is 0, so the experts are trained without averaging.")
    if not layers or not num_epochs * updates_per_epoch or (earlier and earlier not in _attached):
        return
    if earlier:  # another scheduler for the same optimizer: another run, unless nothing was trained yet
        earlier.remove()
        if earlier.started:
            optimizer.param_groups[0][UPDATES] = 0
    averaging = ExpertWeightAveraging(nn.ModuleList(layers), optimizer, total_updates=num_epochs * updates_per_epoch)
    _attached[averaging] = updates_per_epoch


def _with_router_losses(call: Any) -> Any:
    """Let every training task add the routers' losses to its loss, however its forward ends."""

    @functools.wraps(call)
    @torch.compiler.disable(recursive=False)  # timm 1.0.23 compiles the whole task; this is not for the graph
    def call_and_add(self: TrainingTask, *args: Any, **kwargs: Any) -> Any:
        with aux_loss.gathering(self):
            result = call(self, *args, **kwargs)
        return aux_loss.with_auxiliary_loss(self, result)

    return call_and_add


def _with_member_loss(init: Any) -> Any:
    """Let the criterion of a task see each member of its model's ensemble."""

    @functools.wraps(init)
    def init_and_wrap(self: ClassificationTask, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _is_ensemble(model) and getattr(self, "multi_label", False):
            raise ValueError(
                f"{type(self).__name__} cannot train an ensemble such as {type(unwrap_model(model)).__name__}: its "
                "members' probabilities are those of one class for each image."
            )
        init(self, model, *args, **kwargs)
        if _is_ensemble(model):
            self.criterion = MemberLoss(self.criterion)

    return init_and_wrap


def _without_members(init: Any) -> Any:
    """Refuse a student that is an ensemble: a teacher's outputs may broadcast against its members' without an error."""

    @functools.wraps(init)
    def refuse_or_init(self: TrainingTask, student_model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _is_ensemble(student_model):
            raise ValueError(
                f"{type(self).__name__} cannot train an ensemble such as {type(unwrap_model(student_model)).__name__}: "
                "a teacher's outputs are not compared with each member's. It can be the teacher."
            )
        init(self, student_model, *args, **kwargs)

    return refuse_or_init


def _is_ensemble(model: nn.Module) -> bool:
    return hasattr(unwrap_model(model), "forward_members")


def _at_scheduler_step(method: Any, position: str) -> Any:
    """Let the averaging start where train.py starts a scheduler by this method, and tell the routing of each epoch.

    After ``--resume`` the count comes with the optimizer's state; after ``--no-resume-opt`` or ``--start-epoch`` that
    call is the only trace of it.

    Args:
        method: of timm's schedulers.
        position: name of its first argument, ``"epoch"`` or ``"num_updates"``.
    """

    @functools.wraps(method)
    def observe_and_call(self: Any, *args: Any, **kwargs: Any) -> None:
        if position == "epoch":
            aux_loss.log_epoch(self.optimizer)
        averaging = ExpertWeightAveraging.of(self.optimizer)
        if averaging is not None and averaging in _attached:
            reached = args[0] if args else kwargs[position]
            updates = reached * _attached[averaging] if position == "epoch" else reached
            if updates % _attached[averaging] == 0:  # runs start with an epoch; else the scaler skipped a first step
                averaging.seek(updates)
        method(self, *args, **kwargs)

    return observe_and_call


@torch.compiler.disable  # the step of an optimizer may be compiled
def _warn_without_averaging(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Say once that experts are trained which nothing averages, though they have a share rate."""
    if not MoeMlp.alive or optimizer in _warned or ExpertWeightAveraging.of(optimizer):
        return
    if any(layer.share_rate for layer in trained_layers(optimizer, MoeMlp.alive)):
        _warned.add(optimizer)
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, as their share rate asks for. Make a "
            "timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=...), or pass updates_per_epoch to timm's "
            "create_scheduler_v2. If you call average_experts_ yourself or want none, set share_rate=0."
        )


@torch.compiler.disable
def _refuse_dense_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error at the first step if an optimizer of experts resumed the state of a dense model's."""
    if not MoeMlp.alive or optimizer in _stepped:
        return
    _stepped.add(optimizer)
    for layer in trained_layers(optimizer, MoeMlp.alive):
        for _, stacked in layer.named_expert_parameters():
            state = optimizer.state.get(stacked, {})
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if moment is not None and moment.shape == stacked.shape[1:]:
                raise ValueError(
                    "The optimizer's state that was loaded is that of a dense model, not of its experts: begin with a "
                    "new one (train.py --no-resume-opt)."
                )


def wrap_factories() -> None:
    """Put the wrapped factories wherever timm's own stand, also in a script that already imported them."""
    here = sys.modules[__name__]
    wrapped = ((create_optimizer_v2, _create_optimizer_v2), (create_scheduler_v2, _create_scheduler_v2))
    for module in list(sys.modules.values()):
        for factory, wrapper in wrapped:
            if module is not here and getattr(module, "__dict__", {}).get(factory.__name__) is factory:
                setattr(module, factory.__name__, wrapper)


def install() -> None:
    """Put the hooks in place; done once, when timm_moe is imported."""
    wrap_factories()
    scheduler_classes: list[Any] = [Scheduler, PlateauLRScheduler]  # those that define the two methods
    for scheduler_class in scheduler_classes:
        scheduler_class.step = _at_scheduler_step(scheduler_class.step, "epoch")
        scheduler_class.step_update = _at_scheduler_step(scheduler_class.step_update, "num_updates")
    TrainingTask.__call__ = _with_router_losses(TrainingTask.__call__)  # type: ignore[method-assign]
    ClassificationTask.__init__ = _with_member_loss(ClassificationTask.__init__)  # type: ignore[method-assign]
    for task_class in _DISTILLATION_TASKS:
        task_class.__init__ = _without_members(task_class.__init__)
    register_optimizer_step_pre_hook(_warn_without_averaging)
    register_optimizer_step_pre_hook(_refuse_dense_state)
    register_optimizer_step_pre_hook(aux_loss.before_step)
