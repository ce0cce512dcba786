"""Hooks in timm, for its unmodified train.py: the only module that changes objects of timm.

========================  =========================================================================
changed                   what the change does
========================  =========================================================================
``create_model``          notes a model's arguments on it, as timm itself does since 1.0.31
``create_optimizer_v2``   leaves the experts to the fallback of Muon
``param_groups_*``        excludes the experts' biases and norm scales from weight decay
``create_scheduler_v2``   gives the optimizer its averaging: it knows epochs and updates per epoch;
                          begins the statistics anew; logs which experts are routed, and how
``Scheduler.step``        tells where a resumed run starts, and ends an epoch of routing statistics
``update_summary``        writes the experts' statistics to a file beside the epoch's line
``adaptive_clip_grad``    clips every expert as a network of its own
``TrainingTask``          adds the router losses, and compares ensemble members with the targets
``build_model_with_cfg``  builds a class with experts where an entrypoint of this package asks
========================  =========================================================================

Every optimizer step is preceded by :func:`timm_moe.training.step.before_step`.
"""

import functools
import inspect
import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import timm
import timm.scheduler
from timm.models import create_model, load_model_config_from_hf, parse_model_name
from timm.optim import (
    create_optimizer_v2,
    param_groups_layer_decay,
    param_groups_weight_decay,
)
from timm.scheduler import create_scheduler_v2
from timm.task import (
    ClassificationTask,
    FeatureDistillationTask,
    LogitDistillationTask,
    TokenDistillationTask,
    TrainingTask,
)
from timm.utils import adaptive_clip_grad, update_summary
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..convert.expert_layers import described, expert_biases, expert_ids
from ..convert.wrappers import unwrapped
from ..layers import EwaMlp, MemberLoss, MoeMlp
from ..layers.living import living, register
from ..model_config import records_arguments
from ..training import epoch_log, router_losses
from ..training.averaging import ExpertWeightAveraging, forget_updates
from ..training.optimizers import (
    are_frozen,
    forget_warnings,
    has_stepped,
    is_first_time,
    is_primary,
    layers_of_trained_experts,
    parameter_ids,
    trained_layers,
)
from ..training.step import before_step

_logger = logging.getLogger(__name__)

#: Calls that undo each change of timm. The list is empty where the hooks are not installed.
_undo: list[Callable[[], Any]] = []


# --- optimizer and clipping


@functools.wraps(create_optimizer_v2)
def _create_optimizer_v2(*args: Any, **kwargs: Any) -> Optimizer:
    """Create an optimizer that treats the experts' stacked parameters as those of networks."""
    call = inspect.signature(create_optimizer_v2).bind(*args, **kwargs)
    optimizer = create_optimizer_v2(*args, **kwargs)
    # Muon would orthogonalise the biases of all experts as one matrix, and so their weights where
    # these are small.
    is_muon = "muon" in call.arguments.get("opt", "").lower()
    if is_muon and _leave_experts_to_fallback(optimizer) and is_primary():
        _logger.info("Muon leaves the experts to its fallback, since their matrices are stacked.")
    return optimizer


def _leave_experts_to_fallback(optimizer: Optimizer) -> bool:
    """Move experts to groups of Muon's fallback, unless a group says who trains it.

    Returns:
        Whether there were such experts.
    """
    stacked = expert_ids(living(MoeMlp))
    has_experts = False
    for group in list(optimizer.param_groups):
        is_experts = [id(parameter) in stacked for parameter in group["params"]]
        if not any(is_experts) or not group.keys().isdisjoint(("use_fallback", "use_muon")):
            continue
        has_experts = True
        if all(is_experts):
            group["use_fallback"] = True
            continue
        of_experts = {**group, "use_fallback": True}
        is_others = [not each for each in is_experts]
        for name in group.keys() & {"params", "param_names"}:
            of_experts[name] = list(itertools.compress(group[name], is_experts))
            group[name] = list(itertools.compress(group[name], is_others))
        optimizer.add_param_group(of_experts)
    return has_experts


def _with_expert_biases(group: Any) -> Any:
    """Let timm group the experts' biases and norm scales as those of the dense network.

    There they have one dimension.
    """

    @functools.wraps(group)
    def param_groups(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(group).bind(*args, **kwargs)
        biases = expert_biases(call.arguments["model"])
        if biases:
            given = {*call.arguments.get("no_weight_decay_list", ())}
            is_excluded = call.arguments.get("weight_decay_exclude_1d", True)
            call.arguments["no_weight_decay_list"] = (
                given | biases if is_excluded else given - biases
            )
        return group(*call.args, **call.kwargs)

    return param_groups


_param_groups_weight_decay = _with_expert_biases(param_groups_weight_decay)
_param_groups_layer_decay = _with_expert_biases(param_groups_layer_decay)


@functools.wraps(adaptive_clip_grad)
def _adaptive_clip_grad(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
    """Clip gradients with each expert as a network of its own."""
    given = [parameters] if isinstance(parameters, Tensor) else parameters
    stacked = expert_ids(living(MoeMlp))
    units: list[Tensor] = []
    for parameter in given:
        if id(parameter) not in stacked or parameter.grad is None:
            units.append(parameter)
            continue
        experts = parameter.detach().unbind(0)
        for expert, gradient in zip(experts, parameter.grad.unbind(0), strict=True):
            expert.grad = gradient  # It shares the memory, so that clipping acts on the stack.
            units.append(expert)
    adaptive_clip_grad(units, *args, **kwargs)


# --- scheduler: averaging and statistics of a run


@functools.wraps(create_scheduler_v2)
def _create_scheduler_v2(*args: Any, **kwargs: Any) -> Any:
    """Create a scheduler, and give its optimizer the averaging of the run."""
    lr_scheduler, num_epochs = create_scheduler_v2(*args, **kwargs)
    arguments = inspect.signature(create_scheduler_v2).bind(*args, **kwargs).arguments
    optimizer = arguments["optimizer"]
    register(optimizer)
    forget_warnings(optimizer)
    trained = trained_layers(parameter_ids(optimizer), living(MoeMlp))
    router_losses.begin_run(trained)
    routed = [layer for layer in trained if not isinstance(layer, EwaMlp)]
    if routed and is_primary():
        _logger.info(f"Routing: {described(routed)}")
    _attach_averaging(optimizer, int(num_epochs), arguments.get("updates_per_epoch", 0))
    return lr_scheduler, num_epochs


def _attach_averaging(optimizer: Optimizer, num_epochs: int, updates_per_epoch: int) -> None:
    """Begin the averaging of a run, unless there is nothing to average or the user began one.

    Frozen experts may come to the optimizer later, so where there are only such, it waits for them.
    """
    trained = layers_of_trained_experts(parameter_ids(optimizer), living(MoeMlp))
    layers = [layer for layer in trained if layer.share_rate]
    if not trained:
        layers = [layer for layer in living(MoeMlp) if layer.share_rate and are_frozen([layer])]
    if not layers:
        if any(isinstance(layer, EwaMlp) for layer in trained) and is_primary():
            _logger.info("EWA: share_rate is 0, so the experts are trained without averaging.")
        return

    earlier = ExpertWeightAveraging.of(optimizer)
    is_of_user = earlier is not None and not isinstance(earlier, _RunAveraging)
    if is_of_user or not num_epochs * updates_per_epoch:
        return
    # Another scheduler for the same optimizer is another run, unless nothing was trained yet.
    if earlier is not None:
        earlier.remove()
        if earlier.started:
            forget_updates(optimizer)
    # The run begins at update 0, unless the optimizer's state holds a count.
    averaging = _RunAveraging(layers, optimizer, num_epochs, updates_per_epoch)
    if not averaging.updates and has_stepped(optimizer):
        averaging.seek(0)


class _RunAveraging(ExpertWeightAveraging):
    """Averaging of a run of timm's scheduler.

    It averages all experts with a share rate that the optimizer trains. ``layers`` are those that
    it trains now, or frozen ones; others may be added. Frozen experts may be those of another
    model, as a teacher, so the optimizer's state has no count before it trains some.
    """

    def __init__(
        self,
        layers: Iterable[MoeMlp],
        optimizer: Optimizer,
        num_epochs: int,
        updates_per_epoch: int,
    ):
        super().__init__(
            nn.ModuleList(layers), optimizer, total_updates=num_epochs * updates_per_epoch
        )
        self.updates_per_epoch = updates_per_epoch
        self._updates_before = self.updates  # at the end of the last epoch
        self._has_begun = False  # the scheduler has followed a step

    def layers(self) -> list[MoeMlp]:
        """Return all living expert layers with a share rate."""
        return [layer for layer in living(MoeMlp) if layer.share_rate]

    def _validate(self, model: nn.Module, optimizer: Optimizer, layers: list[MoeMlp]) -> None:
        if layers:
            super()._validate(model, optimizer, layers)

    def _write_count(self) -> None:
        if self.has_experts:
            super()._write_count()

    def end_epoch(self, optimizer: Optimizer) -> None:
        """Warn once of an epoch with far fewer optimizer steps than ``updates_per_epoch``.

        The caller may have counted batches where several make a step.
        """
        updates, before = self.updates, self._updates_before
        self._updates_before = updates
        taken = updates - before
        is_whole = before % self.updates_per_epoch == 0  # A resumed run may begin amid an epoch.
        is_trained = self.started and self.has_experts
        is_short = is_trained and is_whole and 0 < taken <= self.updates_per_epoch / 2
        if is_short and is_first_time(optimizer, "short epoch"):
            _logger.warning(
                f"EWA: an epoch took {taken} optimizer steps, but create_scheduler_v2 was given "
                f"updates_per_epoch={self.updates_per_epoch}, so the share rate's schedule will "
                "not reach its end: count the optimizer's steps, not the batches."
            )

    def begin_at(self, updates: int) -> None:
        """Take the position of the scheduler for the start of the run, before the first step.

        It overrides a count that came with the optimizer: train.py leaves out the rest of the
        epoch in which a recovery file was written, and another batch size makes other updates.
        """
        if not self.started and updates and updates % self.updates_per_epoch == 0:
            self.seek(updates)  # runs start with an epoch
            self._updates_before = updates

    def begin_anew(self, updates: int) -> None:
        """Take the position of the scheduler after the first step, if the count is ahead of it.

        Then the count came with the optimizer, but the scheduler began anew, as with train.py's
        ``--resume FILE --start-epoch 0``. train.py states no position before that run. A loop that
        numbers its steps from 0, as Swin's, is one behind the count, and did not begin anew.
        """
        if self.started and not self._has_begun:
            self._has_begun = True
            if 0 < updates < self.updates - 1:
                self.seek(updates)
                self._updates_before = updates - 1  # before the first step


def _at_scheduler_step(method: Any, position: str) -> Any:
    """Let the averaging start where train.py starts a scheduler, and log the routing of each epoch.

    train.py steps the scheduler before the first epoch of a resumed run. That position is where the
    averaging continues. Without a scheduler the count in the optimizer's state is used.

    Args:
        method: the scheduler's ``step`` or ``step_update``.
        position: name of the method's first argument.
    """

    @functools.wraps(method)
    def observe_and_call(self: Any, *args: Any, **kwargs: Any) -> None:
        averaging = ExpertWeightAveraging.of(self.optimizer)
        is_epoch = position == "epoch"
        if is_epoch:
            router_losses.log_epoch(self.optimizer)
        else:
            register(self.optimizer)  # Its run is the one that trains.
        if isinstance(averaging, _RunAveraging):
            reached = args[0] if args else kwargs[position]
            averaging.begin_at(reached * averaging.updates_per_epoch if is_epoch else reached)
            if is_epoch:
                averaging.end_epoch(self.optimizer)
            else:
                averaging.begin_anew(reached)
        method(self, *args, **kwargs)

    return observe_and_call


@functools.wraps(update_summary)
def _update_summary(*args: Any, **kwargs: Any) -> None:
    """Write an epoch's line to summary.csv, and the experts' statistics to a file beside it."""
    update_summary(*args, **kwargs)
    arguments = inspect.signature(update_summary).bind(*args, **kwargs).arguments
    for optimizer in living(Optimizer)[-1:]:  # the optimizer of the run that trained last
        epoch_log.write_epoch(Path(arguments["filename"]).parent, arguments["epoch"], optimizer)
        # With --sched none no scheduler has ended the epoch.
        router_losses.log_epoch(optimizer)


# --- training tasks


def _with_router_losses(call: Any) -> Any:
    """Let every training task add the router losses to its loss, however its forward ends."""

    @functools.wraps(call)
    def call_and_add(self: TrainingTask, *args: Any, **kwargs: Any) -> Any:
        with router_losses.collecting_losses(self) as layers:
            result = call(self, *args, **kwargs)
        loss = router_losses.take_losses(layers)
        if loss is None:  # This is no training, or a task within this one added the losses.
            return result
        return {**result, "loss": result["loss"] + loss, "auxiliary_loss": loss.detach()}

    return call_and_add


def _with_member_loss(init: Any) -> Any:
    """Let the criterion of a task see each member of its model's ensemble.

    A task with another loss is refused, since a teacher's outputs may broadcast against a student's
    members without an error.
    """

    @functools.wraps(init)
    def init_and_wrap(self: Any, *args: Any, **kwargs: Any) -> None:
        # The first argument of a task is its model, that of a distillation the student.
        model = unwrapped(inspect.signature(init).bind(self, *args, **kwargs).args[1])
        is_ensemble = hasattr(model, "forward_members")
        multi_label = getattr(self, "multi_label", False)
        if is_ensemble and (multi_label or not isinstance(self, ClassificationTask)):
            raise ValueError(
                f"{type(self).__name__} cannot train an ensemble such as {type(model).__name__}, "
                "whose members each learn one class for each image: take a ClassificationTask. A "
                "distillation may have it as the teacher."
            )
        init(self, *args, **kwargs)
        if is_ensemble:
            self.criterion = MemberLoss(self.criterion)

    return init_and_wrap


# --- models


@functools.wraps(create_model)
def _create_model(model_name: str, *args: Any, **kwargs: Any) -> nn.Module:
    """Create a model and note its arguments on it; wanted before timm 1.0.31."""
    model = create_model(model_name, *args, **kwargs)
    arguments = inspect.signature(create_model).bind(model_name, *args, **kwargs).arguments
    source, location = parse_model_name(model_name)
    saved: dict[str, Any] = {}
    if source == "hf-hub":
        saved = load_model_config_from_hf(location, cache_dir=arguments.get("cache_dir"))[2]
    elif source == "local-dir":
        saved = json.loads(Path(location, "config.json").read_text("utf-8")).get("model_args", {})
    given = {
        name: value for name, value in arguments.get("kwargs", {}).items() if value is not None
    }
    model._model_args = {**saved, **given}  # type: ignore[assignment]
    return model


def build_instead(
    entrypoint: Callable[..., nn.Module],
    class_instead: Callable[[type[nn.Module]], type[nn.Module]],
    variant: str,
    **kwargs: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    """Let an entrypoint of timm build a model of another class and name.

    Args:
        entrypoint: the entrypoint.
        class_instead: returns the other class for timm's own.
        variant: the other name.
        kwargs: arguments of the entrypoint.

    Returns:
        The model, and the arguments that the entrypoint gave to timm's builder.

    Raises:
        RuntimeError: if the entrypoint did not call timm's builder.
    """
    require_installed()
    calls: list[dict[str, Any]] = []

    def build(builder: Any, stock_class: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        calls.append(kwargs)
        return builder(class_instead(stock_class), variant, *args, **kwargs)

    model = entrypoint(**kwargs, timm_moe_build=build)
    if not calls:
        raise RuntimeError(
            f"timm {timm.__version__} did not build {variant} with experts: install a version of "
            "timm that docs/compatibility.md names."
        )
    return model, calls[0]


def _with_another_build(builder: Any) -> Any:
    """Let timm's ``build_model_with_cfg`` take an argument that builds the model instead."""

    @functools.wraps(builder)
    def build_model(
        model_cls: Any, variant: str, *args: Any, timm_moe_build: Any = None, **kwargs: Any
    ) -> Any:
        if timm_moe_build is None:
            return builder(model_cls, variant, *args, **kwargs)
        return timm_moe_build(builder, model_cls, *args, **kwargs)

    return build_model


def add_module(module: ModuleType) -> None:
    """Make a module that exists in memory only known to Python.

    Then timm's registry and pickle can look it up.
    """
    sys.modules[module.__name__] = module


# --- the hooks in place


def wrap_functions() -> None:
    """Wrap timm's functions wherever they are, also in a script that already imported them."""
    wrappers: list[Any] = [
        _create_optimizer_v2,
        _param_groups_weight_decay,
        _param_groups_layer_decay,
        _create_scheduler_v2,
        _adaptive_clip_grad,
        _update_summary,
    ]
    if not records_arguments():
        wrappers.append(_create_model)
    others = [module for name, module in list(sys.modules.items()) if name != __name__]
    for module, wrapper in itertools.product(others, wrappers):
        if getattr(module, "__dict__", {}).get(wrapper.__name__) is wrapper.__wrapped__:
            _replace(module, wrapper.__name__, wrapper)


def _wrapped_methods() -> Iterator[tuple[Any, str, Any]]:
    """Yield the owner of each method or builder to wrap, its name, and its wrapper."""
    # Entrypoints look the builder up in their own module, so it is wrapped in each of them.
    for name, module in list(sys.modules.items()):
        is_public = name.startswith("timm.models.") and not name.startswith("timm.models._")
        if is_public and hasattr(module, "build_model_with_cfg"):
            yield module, "build_model_with_cfg", _with_another_build
    for method, position in (("step", "epoch"), ("step_update", "num_updates")):
        wrap = functools.partial(_at_scheduler_step, position=position)
        for scheduler_class in _scheduler_classes():
            if method in vars(scheduler_class):
                yield scheduler_class, method, wrap
    yield TrainingTask, "__call__", _with_router_losses
    distillations = (LogitDistillationTask, FeatureDistillationTask, TokenDistillationTask)
    for task in (ClassificationTask, *distillations):
        yield task, "__init__", _with_member_loss


def _scheduler_classes() -> list[type]:
    """Return timm's classes of schedulers, with their bases."""
    public = [each for each in vars(timm.scheduler).values() if isinstance(each, type)]
    return list(dict.fromkeys(base for each in public for base in each.__mro__))


def _replace(owner: Any, name: str, new: Any) -> None:
    """Set an attribute of timm, and remember the old one."""
    _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    setattr(owner, name, new)


def install() -> None:
    """Put the hooks in place, unless they are.

    If that fails, :func:`uninstall` takes off those that are there.
    """
    if _undo:
        return
    wrap_functions()
    for owner, name, wrap in _wrapped_methods():
        _replace(owner, name, wrap(getattr(owner, name)))
    _undo.append(register_optimizer_step_pre_hook(before_step).remove)


def uninstall() -> None:
    """Take the hooks off again."""
    while _undo:
        _undo.pop()()


def require_installed() -> None:
    """Refuse to make a model where the hooks are not in place.

    The package may have failed to load, but timm cannot forget the names that it registered.

    Raises:
        ImportError: if the hooks are not in place.
    """
    if not _undo:
        raise ImportError(
            "timm_moe could not be loaded, as a warning said, or its hooks were taken off: its "
            "models would train without them."
        )
