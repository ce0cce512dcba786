"""Lightning: ``Trainer(callbacks=[ExpertCallback()])`` trains the experts of a LightningModule.

A ``pytorch_lightning.Trainer`` takes the callback, too, if ``lightning`` is installed beside it.
"""

import functools
import inspect
import math
import random
from contextlib import ExitStack
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.optim import Optimizer

from ..convert.expert_layers import moe_layers
from ..training.averaging import ExpertWeightAveraging
from ..training.loop import expert_statistics, start_or_resume
from ..training.optimizers import is_distributed
from ..training.router_losses import add_losses, collecting_losses, drop_losses

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities import rank_zero_warn
except ModuleNotFoundError as error:
    raise ImportError(
        "timm_moe.integrations.lightning needs lightning: pip install 'timm_moe[lightning]'."
    ) from error

__all__ = ["ExpertCallback"]

#: Keys of a checkpoint, for the random state of each process and for the number of optimizer steps
#: of an epoch.
RANDOM_STATES = "timm_moe_random_states"
UPDATES_PER_EPOCH = "timm_moe_updates_per_epoch"
#: Types of devices whose random state torch reads.
_GPUS = ("cuda", "mps", "xpu")


class ExpertCallback(Callback):
    """Training of the expert layers anywhere in a LightningModule.

    - After each optimizer step the experts are averaged, at the share rates and by the schedules
      that their layers were created with, over ``trainer.estimated_stepping_batches`` steps. An
      optimizer that has its averaging already, from ``configure_optimizers``, keeps it.
    - The router losses of all forwards of a ``training_step`` are added to the loss that it
      returns, unless it added :func:`timm_moe.auxiliary_loss` itself. In manual optimization, where
      it calls backward, it has to.
    - At the end of each epoch :func:`timm_moe.training.expert_statistics` goes to the loggers, as
      the mean over the processes.
    - Checkpoints hold the random state of each process, so that a run that is resumed from the end
      of an epoch draws the partitions of its tokens, dropout and the order of its data as if it had
      not been interrupted.

    Raises:
        ValueError: at the start of training, if the number of optimizer steps is unknown, as
            without an end or with Lightning's ``GradientAccumulationScheduler``; and as
            :class:`ExpertWeightAveraging`.
    """

    def __init__(self) -> None:
        self._run = ExitStack()  # what the end of training undoes
        self._fitting = False
        self._failed = False
        self._device = torch.device("cpu")
        self._updates_per_epoch_before: int | None = None  # in the run that is resumed
        self._trial = ExitStack()  # what undoes a trial of a search, as for a learning rate

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Wrap hooks of the module.

        A search for the batch size or the learning rate trains without its callbacks, but calls the
        hooks of the module.
        """
        self._fitting = stage == "fit"
        self._failed = False
        self._updates_per_epoch_before = None
        self._device = trainer.strategy.root_device
        self._run.close()
        self._run.callback(self._trial.close)
        # A second callback would wrap the hooks of the first, and put those back at its end.
        callbacks = [each for each in trainer.callbacks if isinstance(each, ExpertCallback)]
        is_first = callbacks[:1] == [self]
        wrappers = {"on_train_start": self._start, "training_step": _with_router_losses}
        for name, function in wrappers.items():
            if self._fitting and is_first and hasattr(pl_module, name):
                self._wrap(pl_module, name, function)

    def _start(self, pl_module: LightningModule, on_train_start: Any) -> None:
        """Start the averaging of a run, or of a search's trial, which may happen within a run."""
        trainer: Any = pl_module.trainer
        self._trial.close()  # An earlier one may have failed.
        end = self._run if self in trainer.callbacks else self._trial
        for optimizer in trainer.optimizers:
            self._start_averaging(trainer, pl_module, optimizer, end)
        on_train_start()

    def _start_averaging(
        self, trainer: Any, pl_module: LightningModule, optimizer: Optimizer, end: ExitStack
    ) -> None:
        """Start the averaging of one optimizer, until the end of the run or of the trial."""
        total_updates = math.inf
        is_averaged = any(layer.share_rate for layer in moe_layers(pl_module).values())
        # An averaging of the user, or of the run within which a trial happens, stays.
        if is_averaged and ExpertWeightAveraging.of(optimizer) is None:
            if any(hasattr(each, "get_accumulate_grad_batches") for each in trainer.callbacks):
                raise ValueError(
                    "A GradientAccumulationScheduler leaves the number of optimizer steps of the "
                    "run unknown: make timm_moe.ExpertWeightAveraging in configure_optimizers and "
                    "tell it total_updates."
                )
            total_updates = trainer.estimated_stepping_batches
        averaging = start_or_resume(pl_module, optimizer, total_updates, trainer.global_step)
        if averaging is None:
            return
        end.callback(averaging.remove)
        if pl_module.automatic_optimization:
            self._count_in_new_batches(averaging, trainer)
        else:
            rank_zero_warn(
                f"Manual optimization: the share rate reaches its end after {total_updates} steps "
                "of the optimizer. If it takes another number, make timm_moe.ExpertWeightAveraging "
                "in configure_optimizers and tell it total_updates."
            )

    def _count_in_new_batches(self, averaging: ExpertWeightAveraging, trainer: Any) -> None:
        """Multiply the count of a resumed run as its epochs have more or fewer steps than before.

        The batches may be larger or smaller, or the processes others. Where a number of steps ends
        the run, the count stays.
        """
        before, now = self._updates_per_epoch_before, _updates_per_epoch(trainer)
        is_ended_by_steps = averaging.total_updates == trainer.max_steps
        if before and now and before != now and not is_ended_by_steps:
            averaging.seek(round(averaging.updates * now / before))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the statistics of the experts, as means over the processes."""
        averagings = [ExpertWeightAveraging.of(optimizer) for optimizer in trainer.optimizers]
        started = filter(None, averagings)
        averaging = max(started, key=lambda each: each.has_experts, default=None)
        pl_module.log_dict(expert_statistics(pl_module, averaging), sync_dist=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the averaging, and unwrap the hooks of the module."""
        self._run.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Do after an error what :meth:`teardown` does."""
        self._failed = True
        self._run.close()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random state of each process, and the number of steps of an epoch.

        Lightning asks all processes to save.
        """
        own = _random_state(self._device)
        states: list[Any] = [own]
        # After an exception this may be the only process that saves, so it waits for nobody.
        if is_distributed() and not self._failed:
            states = [None] * distributed.get_world_size()
            distributed.all_gather_object(states, own)
        checkpoint[RANDOM_STATES] = states
        checkpoint[UPDATES_PER_EPOCH] = _updates_per_epoch(trainer)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the random state of this process.

        This happens at once, since the optimizers may ask for the data next, which is then
        shuffled.
        """
        self._updates_per_epoch_before = checkpoint.get(UPDATES_PER_EPOCH)
        states = checkpoint.get(RANDOM_STATES)
        if states is None:  # The run had no such callback.
            return
        rank = distributed.get_rank() if is_distributed() else 0
        processes = distributed.get_world_size() if is_distributed() else 1
        if self._fitting and len(states) == processes:
            _set_random_state(states[rank], self._device)
        elif self._fitting:
            rank_zero_warn(
                f"The checkpoint holds the random state of {len(states)} processes and this run "
                f"has {processes}, so it draws other random numbers than the run that it continues."
            )

    def _wrap(self, pl_module: LightningModule, name: str, function: Any) -> None:
        """Replace a hook of the module, and of its copies, by a function.

        Args:
            pl_module: the module.
            name: name of the hook.
            function: takes the module, the hook and the hook's arguments.
        """
        own = vars(pl_module).get(name)  # torch.compile sets such a hook.

        # Lightning reads the arguments from the signature of what is wrapped, one level deep.
        @functools.wraps(inspect.unwrap(own or getattr(type(pl_module), name)))
        def hook(self: LightningModule, *args: Any, **kwargs: Any) -> Any:
            return function(self, own or getattr(type(self), name).__get__(self), *args, **kwargs)

        @self._run.callback
        def unwrap() -> None:
            vars(pl_module).pop(name, None)
            if own is not None:
                vars(pl_module)[name] = own

        vars(pl_module)[name] = MethodType(hook, pl_module)


def _updates_per_epoch(trainer: Any) -> int | None:
    """Return the number of optimizer steps of an epoch; None if it is not known."""
    batches = trainer.num_training_batches
    return None if math.isinf(batches) else math.ceil(batches / trainer.accumulate_grad_batches)


def _with_router_losses(module: LightningModule, step: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a training step; add the router losses to its loss if Lightning calls backward on it."""
    if not module.automatic_optimization:
        return step(*args, **kwargs)
    with collecting_losses(module) as layers:
        output = step(*args, **kwargs)
    if output is None:  # Lightning leaves the batch out.
        drop_losses(layers)
    elif isinstance(output, torch.Tensor):
        return add_losses(layers, output)
    elif isinstance(output, dict) and output.get("loss") is not None:
        return {**output, "loss": add_losses(layers, output["loss"])}
    return output


def _random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of this process's random generators, of types that torch.load allows."""
    legacy: Any = np.random.get_state()
    name, keys, *rest = legacy
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }
    if device.type in _GPUS:
        state[device.type] = getattr(torch, device.type).get_rng_state()
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set this process's random generators to a state of :func:`_random_state`."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type in state:
        getattr(torch, device.type).set_rng_state(state[device.type])
