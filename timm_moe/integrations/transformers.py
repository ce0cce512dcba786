"""Hugging Face's Trainer: ``Trainer(callbacks=[ExpertCallback()])`` trains experts.

It trains them as timm's train.py does. A callback of transformers sees neither the loss before the
backward pass, nor a log before it is sent, nor the end of a run that fails. So this module wraps
methods of ``Trainer`` as it is imported; they do nothing more in a Trainer without an
:class:`ExpertCallback`.
"""

import functools
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from ..convert.expert_layers import moe_layers
from ..convert.hooks import check_loaded_layers
from ..training.averaging import ExpertWeightAveraging
from ..training.loop import expert_statistics, start_or_resume
from ..training.router_losses import add_losses, collecting_losses

try:
    import transformers
    from transformers import (
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.core_model_loading import revert_weight_conversion
except ImportError as error:
    raise ImportError(
        "timm_moe.integrations.transformers needs transformers 5 and accelerate: pip install "
        "'timm_moe[transformers]'."
    ) from error


class ExpertCallback(TrainerCallback):
    """Training of the expert layers in the model of a Trainer.

    The experts are averaged after every optimizer step, at the rate and by the schedule that their
    layers were created with, over the steps of the run. A resumed run goes on where it was. An
    optimizer that has its averaging already, since it was given to Trainer so, keeps it. The loss
    holds the weighted router losses, however it is computed: by the model, by label smoothing
    or by ``compute_loss_func``, and with gradient accumulation. ``Trainer.log`` holds the
    statistics of each router since the last log.

    In training an ensemble inside one model, as pBE, has outputs (B, M, C) of M members. Each of
    them is compared with its image's label: the loss, ``compute_loss_func`` too, gets logits (B M,
    C) and each label M times.

    A subclass of Trainer with a ``compute_loss`` of its own that does not call Trainer's adds
    :func:`timm_moe.auxiliary_loss` itself; where it does not, the optimizer's next step raises an
    error. If it divides its loss by ``num_items_in_batch``, it divides the router losses by
    ``current_gradient_accumulation_steps``, since Trainer does not divide again.

    Raises:
        ValueError: as :func:`timm_moe.training.start_averaging`, when training begins.
    """

    #: The averagings that this callback started and that have not ended: of several runs where one
    #: trains within another.
    _averagings: tuple[ExpertWeightAveraging, ...] = ()

    # Runs are not copied, and their averagings have weak references, which cannot be pickled.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_averagings": ()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the averaging of the run."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.end_averaging(optimizer)  # that of a trial that failed
        if moe_layers(model) or not _ensembles(model):
            averaging = start_or_resume(model, optimizer, state.max_steps, state.global_step)
            if averaging is not None:
                self._averagings = (*self._averagings, averaging)

    def end_averaging(self, optimizer: Optimizer) -> None:
        """End the averaging that this callback started for an optimizer, if it did."""
        averaging = ExpertWeightAveraging.of(optimizer)
        if averaging in self._averagings:
            self._averagings = tuple(each for each in self._averagings if each is not averaging)
            averaging.remove()


def _ensembles(model: nn.Module) -> list[Any]:
    """Return the ensembles inside a model.

    Their classes are asked, since wrappers such as torch.compile's pass on attributes of a model.
    """
    return [module for module in model.modules() if hasattr(type(module), "forward_members")]


def _as_images(ensemble: nn.Module, args: Any, logits: Tensor) -> Tensor:
    """Make the logits (B, M, C) of members logits (B M, C) of as many images; a forward hook."""
    return logits.flatten(0, 1)


def load_experts(model: PreTrainedModel, folder: str | Path) -> None:
    """Load a folder of ``save_pretrained`` into a model that was converted by the same options.

    ``from_pretrained`` knows the dense architecture alone, so it refuses such a folder: make the
    model from its config, convert it, then call this.

    Args:
        model: with expert layers.
        folder: holds ``model.safetensors``, or several of its parts.

    Raises:
        FileNotFoundError: if the folder holds no safetensors file.
        RuntimeError: if names or shapes differ from the model's, or other layers have experts.
    """
    whole = Path(folder, "model.safetensors")
    files = [whole] if whole.is_file() else sorted(Path(folder).glob("model-*-of-*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no model.safetensors.")
    state_dict: dict[str, Tensor] = {}
    for file in files:
        state_dict |= load_file(file)
    _take_saved_names(model, state_dict)
    model.load_state_dict(state_dict)


def _take_saved_names(model: Any, state_dict: dict[str, Tensor], *args: Any) -> None:
    """Rename the tensors of ``save_pretrained`` to the names of the model.

    This is a load-state-dict pre-hook. ``save_pretrained`` writes some architectures, as ViT, by
    the names of earlier versions. ``from_pretrained`` knows them, but the resumption of a Trainer
    does not: it loads tensors of the same name, and only warns of the others.
    """
    own = model.state_dict()
    names = {id(tensor): name for name, tensor in own.items()}
    for saved, tensor in revert_weight_conversion(model, own).items():
        name = names.get(id(tensor))
        if name is not None and saved in state_dict:
            state_dict[name] = state_dict.pop(saved)


def _wrap(name: str) -> Any:
    """Wrap a method of Trainer by the function below; a decorator.

    The function gets the method, the trainer and the arguments. Without an ExpertCallback the
    method is called as ever.
    """

    def wrap(function: Any) -> Any:
        method = getattr(Trainer, name, None)
        if method is None:
            raise ImportError(
                f"timm_moe.integrations.transformers does not know the Trainer of transformers "
                f"{transformers.__version__}, which has no {name}: take a version that "
                "docs/generated/versions.md names."
            )

        @functools.wraps(method)
        def call(self: Trainer, *args: Any, **kwargs: Any) -> Any:
            callbacks = self.callback_handler.callbacks
            if any(isinstance(callback, ExpertCallback) for callback in callbacks):
                return function(method, self, *args, **kwargs)
            return method(self, *args, **kwargs)

        setattr(Trainer, name, call)
        return function

    return wrap


@_wrap("compute_loss")
def _add_router_losses(
    compute_loss: Any,
    trainer: Trainer,
    model: nn.Module,
    inputs: dict[str, Any],
    return_outputs: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """Add the router losses to the loss of a batch, and show it the labels of all members."""
    if not model.training:
        return compute_loss(trainer, model, inputs, return_outputs, num_items_in_batch)

    with ExitStack() as hooks:
        layers = hooks.enter_context(collecting_losses(model))
        for ensemble in _ensembles(model):
            members = ensemble.ensemble_size
            hooks.enter_context(ensemble.register_forward_hook(_as_images))
            inputs = {**inputs, "labels": inputs["labels"].repeat_interleave(members, 0)}
            if num_items_in_batch is not None:
                num_items_in_batch = num_items_in_batch * members
        result = compute_loss(trainer, model, inputs, return_outputs, num_items_in_batch)

    loss, *outputs = result if return_outputs else (result,)
    scale = 1.0
    if _is_scaled(trainer, num_items_in_batch):
        scale = 1 / trainer.current_gradient_accumulation_steps
    loss = add_losses(layers, loss, scale)
    return (loss, *outputs) if return_outputs else loss


def _is_scaled(trainer: Any, num_items_in_batch: Tensor | int | None) -> bool:
    """Tell if a loss is divided by the number of accumulated batches before Trainer gets it."""
    is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is not None:
        return is_scaled
    # transformers says it of some trainings only.
    by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
    return by_model or trainer.compute_loss_func is not None


@_wrap("log")
def _log_statistics(
    log: Any,
    trainer: Any,
    logs: dict[str, float],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Add the experts' statistics to a log of training, which alone holds a loss."""
    if "loss" in logs:
        optimizer = trainer.optimizer  # None before a run
        averaging = None if optimizer is None else ExpertWeightAveraging.of(optimizer)
        logs.update(expert_statistics(trainer.model, averaging))
    log(trainer, logs, *args, **kwargs)


@_wrap("train")
def _stop_at_the_end(train: Any, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Stop the averaging when a run ends or fails."""
    try:
        return train(trainer, *args, **kwargs)
    finally:
        optimizer = trainer.optimizer  # None if a run failed before it had one
        for callback in trainer.callback_handler.callbacks:
            if optimizer is not None and isinstance(callback, ExpertCallback):
                callback.end_averaging(optimizer)


@_wrap("_load_from_checkpoint")
@_wrap("_load_best_model")
def _load_saved_names(load: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a Trainer load a checkpoint whose tensors have names of earlier versions."""
    if not isinstance(trainer.model, PreTrainedModel):
        return load(trainer, *args, **kwargs)
    register = trainer.model.register_load_state_dict_pre_hook
    # The conversion's own check comes before these hooks and sees the names of the file, so it is
    # done again with the model's names.
    with register(_take_saved_names), register(check_loaded_layers):
        return load(trainer, *args, **kwargs)
