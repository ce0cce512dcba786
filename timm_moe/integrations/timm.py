"""timm, hooked: how an unmodified train.py gets its callbacks. The only module that changes objects of timm's.

timm's ``create_scheduler_v2`` is where every timm training script states its optimizer, epochs and updates per epoch.
It is wrapped so that the optimizer also gets the averaging that the experts it trains were created with. Its
``create_optimizer_v2`` tells biases and matrices by their number of dimensions, of which stacked ones have one more: it
is told what they are, and a model that says so divides the rates (``model.scale_learning_rates(optimizer)``). Its
``update_summary`` writes a line of an epoch: what the experts did in it stands in a file beside. Its ``TrainingTask``
is where the loss is computed: every task adds the losses of the routers in it, and compares each member of an ensemble
with the targets. Its ``build_model_with_cfg`` is what every entrypoint of a model calls: it builds the class with
experts where an entrypoint of this package asks for it.
"""

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import timm.task
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import PlateauLRScheduler, create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask, TrainingTask
from timm.utils import adaptive_clip_grad, update_summary
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..convert.blocks import expert_parameters, sharing, unwrapped
from ..layers import EwaMlp, MemberLoss, MoeMlp, WeakRegistry
from ..training import averaging, epoch_log, router_losses
from ..training.averaging import (
    UPDATES,
    ExpertWeightAveraging,
    is_primary,
    layers_of_trained_experts,
    living_layers,
)

_logger = logging.getLogger(__name__)
_scheduler_signature = inspect.signature(create_scheduler_v2)
_optimizer_signature = inspect.signature(create_optimizer_v2)
_summary_signature = inspect.signature(update_summary)

#: timm's tasks with a teacher; older versions have fewer.
_DISTILLATION_TASKS: list[Any] = [
    getattr(timm.task, name)
    for name in ("LogitDistillationTask", "FeatureDistillationTask", "TokenDistillationTask")
    if hasattr(timm.task, name)
]
_warned: WeakRegistry[Optimizer] = WeakRegistry()
#: Those that timm made a scheduler for.
_scheduled: WeakRegistry[Optimizer] = WeakRegistry()
#: What takes the hooks off again, the last one first; empty where they are not installed.
_undo: list[Callable[[], None]] = []


@functools.wraps(create_optimizer_v2)
def _create_optimizer_v2(*args: Any, **kwargs: Any) -> Optimizer:
    model = _optimizer_signature.bind(*args, **kwargs).arguments["model_or_params"]
    optimizer = _create_optimizer_of_experts(*args, **kwargs)
    scale_learning_rates = (
        getattr(unwrapped(model), "scale_learning_rates", None) if isinstance(model, nn.Module) else None
    )
    if scale_learning_rates is not None:
        scale_learning_rates(optimizer)
    return optimizer


def _create_optimizer_of_experts(*args: Any, **kwargs: Any) -> Optimizer:
    """timm's optimizer, told what the stacked parameters of experts are."""
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
    _scheduled.add(arguments["optimizer"])
    _attach_averaging(arguments["optimizer"], int(num_epochs), arguments.get("updates_per_epoch", 0))
    return lr_scheduler, num_epochs


@functools.wraps(update_summary)
def _update_summary(*args: Any, **kwargs: Any) -> None:
    update_summary(*args, **kwargs)
    arguments = _summary_signature.bind(*args, **kwargs).arguments
    for optimizer in list(_scheduled)[-1:]:  # that of the run that began last
        epoch_log.write_epoch(Path(arguments["filename"]).parent, arguments["epoch"], optimizer)


class _RunAveraging(ExpertWeightAveraging):
    """The averaging of a run that timm's scheduler states: of all experts with a share rate that the optimizer trains.

    Args:
        layers: some that it trains now; others may be added.
        optimizer: of the run.
        num_epochs: of the run.
        updates_per_epoch: optimizer steps of an epoch.

    Attributes:
        updates_per_epoch: as given.
        begun: whether training has begun: a gradient has come, be it one for which a GradScaler skips the step.
    """

    def __init__(self, layers: Iterable[MoeMlp], optimizer: Optimizer, num_epochs: int, updates_per_epoch: int):
        super().__init__(nn.ModuleList(layers), optimizer, total_updates=num_epochs * updates_per_epoch)
        self.updates_per_epoch = updates_per_epoch
        self.begun = False
        self._first_gradients = [
            stacked.register_post_accumulate_grad_hook(self._begin) for _, stacked in self._experts_due(optimizer)[:1]
        ]

    def _begin(self, stacked: Tensor) -> None:
        self.begun = True
        for handle in self._first_gradients:
            handle.remove()

    def remove(self) -> None:
        super().remove()
        for handle in self._first_gradients:
            handle.remove()

    def layers(self) -> list[MoeMlp]:
        return [layer for layer in living_layers if sharing(layer)[0]]

    def seek_start(self, updates: int) -> None:
        """A scheduler is at this update, which is where the run starts, if training has not begun."""
        if not self.begun and updates % self.updates_per_epoch == 0:  # runs start with an epoch
            self.seek(updates)


def _attach_averaging(optimizer: Optimizer, num_epochs: int, updates_per_epoch: int) -> None:
    trained = layers_of_trained_experts(optimizer, living_layers)
    layers = [layer for layer in trained if sharing(layer)[0]]
    earlier = ExpertWeightAveraging.of(optimizer)
    if not layers and any(isinstance(layer, EwaMlp) for layer in trained) and is_primary():
        _logger.info("EWA: share_rate is 0, so the experts are trained without averaging.")
    if not layers or not num_epochs * updates_per_epoch or (earlier and not isinstance(earlier, _RunAveraging)):
        return
    if earlier:  # another scheduler for the same optimizer: another run, unless nothing was trained yet
        earlier.remove()
        if earlier.started:
            optimizer.param_groups[0][UPDATES] = 0
    _RunAveraging(layers, optimizer, num_epochs, updates_per_epoch)


@functools.wraps(adaptive_clip_grad)
def _adaptive_clip_grad(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    stacked = {id(parameter) for layer in living_layers for _, parameter in layer.named_expert_parameters()}
    units = [part for p in given for part in (_experts_of(p) if id(p) in stacked else [p])]
    adaptive_clip_grad(units, *args, **kwargs)


def _experts_of(stacked: Tensor) -> list[Tensor]:
    """Each expert's part of a stacked parameter, (...) of (E, ...), with its part of the gradient; memory is shared."""
    if stacked.grad is None:
        return []
    parts = list(stacked.detach().unbind(0))
    for part, gradient in zip(parts, stacked.grad.unbind(0), strict=True):
        part.grad = gradient
    return parts


def _with_router_losses(call: Any) -> Any:
    """Let every training task add the routers' losses to its loss, however its forward ends."""

    @functools.wraps(call)
    @torch.compiler.disable(recursive=False)  # timm 1.0.23 compiles the whole task; this is not for the graph
    def call_and_add(self: TrainingTask, *args: Any, **kwargs: Any) -> Any:
        with router_losses.gathering(self):
            result = call(self, *args, **kwargs)
        return router_losses.with_auxiliary_loss(self, result)

    return call_and_add


def _with_member_loss(init: Any) -> Any:
    """Let the criterion of a task see each member of its model's ensemble."""

    @functools.wraps(init)
    def init_and_wrap(self: ClassificationTask, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _is_ensemble(model) and getattr(self, "multi_label", False):
            raise ValueError(
                f"{type(self).__name__} cannot train an ensemble such as {type(unwrapped(model)).__name__}: its "
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
                f"{type(self).__name__} cannot train an ensemble such as {type(unwrapped(student_model)).__name__}: "
                "a teacher's outputs are not compared with each member's. It can be the teacher."
            )
        init(self, student_model, *args, **kwargs)

    return refuse_or_init


def _is_ensemble(model: nn.Module) -> bool:
    return hasattr(unwrapped(model), "forward_members")


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
            router_losses.log_epoch(self.optimizer)
        averaging = ExpertWeightAveraging.of(self.optimizer)
        if isinstance(averaging, _RunAveraging):
            reached = args[0] if args else kwargs[position]
            averaging.seek_start(reached * averaging.updates_per_epoch if position == "epoch" else reached)
        method(self, *args, **kwargs)

    return observe_and_call


@torch.compiler.disable  # the step of an optimizer may be compiled
def _warn_without_averaging(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Say once that experts are trained which nothing averages, though they have a share rate."""
    if not living_layers or optimizer in _warned:
        return
    averaged = {id(layer) for averaging in ExpertWeightAveraging.during(optimizer) for layer in averaging.layers()}
    left_out = [layer for layer in living_layers if sharing(layer)[0] and id(layer) not in averaged]
    names = [layer.path or "an expert layer" for layer in layers_of_trained_experts(optimizer, left_out)]
    if names:
        _warned.add(optimizer)
        _logger.warning(
            "EWA: nothing averages the experts that this optimizer trains, as their share rate asks for (those in "
            f"{', '.join(names)}). Make a timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=...), pass "
            "updates_per_epoch to timm's create_scheduler_v2, or give Hugging Face's Trainer or Lightning an "
            "ExpertCallback of timm_moe.integrations. If you call average_experts_ yourself, want none, or train "
            "adapters, set share_rate=0."
        )
    elif any(map(_is_flat, left_out)) and _has_flat_parameters(optimizer):
        _warned.add(optimizer)
        _logger.warning(
            "EWA: nothing averages the experts, since FullyShardedDataParallel holds them in flat pieces: take "
            "fully_shard (FSDP2) with timm_moe.expert_placement, or set share_rate=0."
        )


def _is_flat(layer: MoeMlp) -> bool:
    return not any(isinstance(stacked, nn.Parameter) for _, stacked in layer.named_expert_parameters())


def _has_flat_parameters(optimizer: Optimizer) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where it was not imported nobody uses it
    flat = getattr(fsdp, "FlatParameter", ())
    return any(isinstance(parameter, flat) for group in optimizer.param_groups for parameter in group["params"])


@torch.compiler.disable
def _refuse_dense_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise ValueError if an optimizer is that of a dense model, by its parameters or by the state that was loaded."""
    for layer in living_layers:
        replaced = {id(parameter) for parameter in layer.replaced}
        if replaced:
            _refuse_replaced(optimizer, layer, replaced)
    for layer in layers_of_trained_experts(optimizer, living_layers):
        for _, stacked in layer.named_expert_parameters():
            state = optimizer.state.get(stacked) or {}  # ZeroRedundancyOptimizer has None for other processes' parts
            moment = state.get("exp_avg", state.get("momentum_buffer"))
            if moment is not None and moment.shape == stacked.shape[1:]:
                raise ValueError(
                    "The optimizer's state that was loaded is that of a dense model, not of its experts: begin with a "
                    "new one (train.py --no-resume-opt)."
                )


def _refuse_replaced(optimizer: Optimizer, layer: MoeMlp, replaced: set[int]) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    frozen = not any(stacked.requires_grad for _, stacked in layer.named_expert_parameters())
    if held & replaced and not frozen and not layers_of_trained_experts(optimizer, [layer]):
        raise ValueError(
            f"This optimizer is older than the experts in {layer.path}: it holds the dense weights whose place they "
            "took, and would leave them untrained. Make it anew from the model's parameters, after convert_to_moe."
        )


@dataclass
class _Request:
    """What the next model that timm builds shall be.

    Attributes:
        class_instead: of a class that timm names, the one to build, or None if that is but a part of the model.
        variant: name of the model.
        stated: to be filled with what timm's builder is given.
        open: whether it was not built yet.
    """

    class_instead: Callable[[type[nn.Module]], type[nn.Module] | None]
    variant: str
    stated: dict[str, Any]
    open: bool = True


_requested: ContextVar[_Request | None] = ContextVar("requested", default=None)


@contextmanager
def building_instead(
    class_instead: Callable[[type[nn.Module]], type[nn.Module] | None], variant: str
) -> Iterator[dict[str, Any]]:
    """In the block an entrypoint of timm's builds a model of another class, and does all else as ever.

    Args:
        class_instead: of a class that timm names, the one to build, or None to let timm build it as a part.
        variant: name of the model to build.

    Yields:
        What the entrypoint gives to timm's builder, once it has.

    Raises:
        ImportError: as :func:`require_installed`.
        RuntimeError: at the end, if the entrypoint did not come by timm's builder.
    """
    require_installed()
    request = _Request(class_instead, variant, {})
    token = _requested.set(request)
    try:
        yield request.stated
    finally:
        _requested.reset(token)
    if request.open:
        raise RuntimeError(f"timm {timm.__version__} did not build {variant} with experts.")


def _building_what_is_requested(build: Any) -> Any:
    """timm's ``build_model_with_cfg``, or what another package has put in its place."""

    @functools.wraps(build)
    def build_requested(model_cls: Any, variant: str, *args: Any, **kwargs: Any) -> Any:
        request = _requested.get()
        instead = request.class_instead(model_cls) if request is not None and request.open else None
        if request is None or instead is None:
            return build(model_cls, variant, *args, **kwargs)
        request.open = False  # what is built meanwhile is a part of the model
        request.stated.update(kwargs)
        return build(instead, request.variant, *args, **kwargs)

    return build_requested


def _wrap_builders() -> None:
    """In the modules of timm's models, whose entrypoints look the builder up where they stand."""
    for name, module in list(sys.modules.items()):
        if name.startswith("timm.models.") and not name.startswith("timm.models._"):
            build = vars(module).get("build_model_with_cfg")
            if build is not None:
                _replace(module, "build_model_with_cfg", _building_what_is_requested(build))


def add_module(module: ModuleType) -> None:
    """Make a module that exists in memory only one that Python, and so timm's registry and pickle, can look up."""
    sys.modules[module.__name__] = module


#: timm's functions that are wrapped, wherever they stand.
_WRAPPED = (
    (create_optimizer_v2, _create_optimizer_v2),
    (create_scheduler_v2, _create_scheduler_v2),
    (adaptive_clip_grad, _adaptive_clip_grad),
    (update_summary, _update_summary),
)


def wrap_factories() -> None:
    """Put the wrapped functions wherever timm's own stand, also in a script that already imported them."""
    here = sys.modules[__name__]
    for module in list(sys.modules.values()):
        for original, wrapper in _WRAPPED:
            name = original.__name__
            if module is not here and getattr(module, "__dict__", {}).get(name) is original:
                _replace(module, name, wrapper)


def _replace(owner: Any, name: str, new: Any) -> None:
    _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def install() -> None:
    """Put the hooks in place, all of them or, if that fails, none; nothing is done where they are already."""
    if _undo:
        return
    try:
        _install()
    except BaseException:
        uninstall()
        raise


def require_installed() -> None:
    """Raise ImportError where this package failed to load: timm cannot forget the names that it had registered."""
    if not _undo:
        raise ImportError(
            "timm_moe could not be loaded, as a warning said, or its hooks were taken off: its models would train "
            "without them."
        )


def _install() -> None:
    wrap_factories()
    _wrap_builders()
    for scheduler_class in (Scheduler, PlateauLRScheduler):  # those that define the two methods
        for name, position in (("step", "epoch"), ("step_update", "num_updates")):
            _replace(scheduler_class, name, _at_scheduler_step(getattr(scheduler_class, name), position))
    _replace(TrainingTask, "__call__", _with_router_losses(TrainingTask.__call__))
    _replace(ClassificationTask, "__init__", _with_member_loss(ClassificationTask.__init__))
    for task_class in _DISTILLATION_TASKS:
        _replace(task_class, "__init__", _without_members(task_class.__init__))
    for hook in (averaging.before_step, _warn_without_averaging, _refuse_dense_optimizer, router_losses.before_step):
        _undo.append(register_optimizer_step_pre_hook(hook).remove)


def uninstall() -> None:
    """Take the hooks off again."""
    while _undo:
        _undo.pop()()
