"""Layouts of a model's folder.

There are timm's layout, that of Hugging Face transformers, and a state dict of the model's own
class.

``write`` puts the files of a model into an empty folder, ``read`` loads them in eval mode and
raises ValueError if a tensor differs from the written one.
"""

import copy
import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from torch import Tensor, nn

from ..checkpoints.building import first_problem
from ..checkpoints.description import ENTRY
from ..checkpoints.image_settings import own_numbering
from ..console import describe, shown
from ..convert.expert_layers import moe_layers
from ..model_config import (
    change_pretrained_cfg,
    classes_of,
    get_pretrained_cfg,
    is_of_timm,
    model_input_size,
    moved_class,
    records_arguments,
    renamed_class,
    stated_names,
    untold_args,
)
from ..quick_init import quick_init
from .history import History, digest, public
from .options import ModelOptions

_logger = logging.getLogger(__name__)

#: Files of a model; without its config.json the weights mean nothing.
FILES = ("model.safetensors", "config.json")


@dataclass
class TimmFormat:
    """Layout that ``timm.create_model("local-dir:FOLDER", pretrained=True)`` reads."""

    model: nn.Module
    history: History
    entries: dict[str, Any]  # of config.json, beside timm's own
    model_args: dict[str, Any]  # of timm.create_model, beside what timm has recorded
    loader: str  # name of the reader for error messages
    library = "timm"

    def write(self, folder: Path) -> None:
        """Write the model's files and let go of the model.

        Raises:
            ValueError: if an argument of the model has no form in JSON.
        """
        stated: Any = dict(
            model_config=self.entries, model_args={**untold_args(self.model), **self.model_args}
        )
        try:
            with self.model.register_state_dict_post_hook(_separate):
                save_for_hf(self.model, str(folder), **stated, safe_serialization=True)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            drop_second_num_classes(config)
            _write_config(folder, config, self.history)
        except (TypeError, ValueError) as error:  # of json
            raise ValueError(
                "An argument of the model cannot be written to config.json: state a value in "
                "model_args that JSON has, or save the state_dict() of the model, or of "
                f"timm_moe.to_dense(model), instead ({describe(error)})."
            ) from error
        del self.model  # it need not stay in memory beside the one that is read

    def read(self, folder: Path) -> nn.Module:
        """Load the model as timm does; raise ValueError unless it is the written one."""
        return load_checked(folder, self.loader)


@dataclass
class TransformersFormat:
    """Layout that ``from_pretrained`` of a class of Hugging Face transformers reads."""

    model: Any
    history: History
    entries: dict[str, Any]
    library = "transformers"

    def write(self, folder: Path) -> None:
        """Write the model's files by its own ``save_pretrained``."""
        self.model.save_pretrained(folder, max_shard_size=sys.maxsize)  # in one file
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _write_config(folder, {**config, **self.entries}, self.history)

    def read(self, folder: Path) -> nn.Module:
        """Load the model as transformers does; raise ValueError unless it is the written one."""
        model = type(self.model).from_pretrained(folder, local_files_only=True).eval()
        _require_equal(
            self.model.state_dict(), model.state_dict(), f"{type(model).__name__}.from_pretrained"
        )
        return model


@dataclass
class StateDictFormat:
    """Layout that ``model.load_state_dict(load_file("FOLDER/model.safetensors"))`` reads.

    Its config.json names the class in words that neither timm nor transformers takes for a model of
    its own.
    """

    model: nn.Module
    history: History
    entries: dict[str, Any]
    library = "pytorch"

    def write(self, folder: Path) -> None:
        """Write the model's state dict, and a config.json that names its class."""
        state_dict = self.model.state_dict()
        _separate(self.model, state_dict, "", None)
        save_file(state_dict, folder / "model.safetensors", metadata={"format": "pt"})
        path = architecture_of(self.model)
        library = "torchvision" if path.startswith("torchvision.") else self.library
        # timm looks up the part of an architecture before a dot. Without model_type, transformers
        # looks for a model's name in that of the folder.
        stated = {"architecture": f"class {path}", "model_type": "state_dict", "library": library}
        _write_config(folder, {**stated, **self.entries}, self.history)

    def read(self, folder: Path) -> nn.Module:
        """Load a copy of the model; raise ValueError unless its tensors are the written ones."""
        tensors = load_file(folder / "model.safetensors")
        _require_equal(self.model.state_dict(), tensors, "safetensors")
        model = copy.deepcopy(self.model)
        model.load_state_dict(tensors)
        return model.eval()


Format = TimmFormat | TransformersFormat | StateDictFormat


def layout_of(
    model: nn.Module, settings: ModelOptions, history: History, method: str | None
) -> Format:
    """Return the layout of a model, and write what the user states to the model's config.

    Args:
        model: the exporter's own.
        settings: the user's statements.
        history: of the weights.
        method: how experts become one network; None if they stay experts.

    Raises:
        ValueError: if an option has no meaning for such a model, or names do not fit its classes.
    """
    if is_of_timm(model):
        if not hasattr(model, "num_classes"):
            raise ValueError(
                f"This {type(model).__name__} was made by features_only=True, which config.json "
                "cannot state: save its state_dict(), or that of to_dense(model)."
            )
        loader = "timm with timm_moe" if method is None else "Stock timm"
        return TimmFormat(
            model, history, _describe(model, settings, history), settings.model_args or {}, loader
        )
    is_foreign = not is_of_transformers(model)
    of_timm = ("model_args", "label_descriptions", "problem_type")
    for name in (*of_timm, *(["label_names"] if is_foreign else [])):
        if getattr(settings, name) is not None:
            raise ValueError(
                f"{name} has no meaning for this {type(model).__name__}, which timm did not make."
            )
    entries = {"license": settings.license} if settings.license else {}
    if is_foreign:
        return StateDictFormat(model, history, entries)
    config: Any = model.config
    if settings.label_names is not None:
        names = _checked_labels(config.num_labels, settings.label_names)["label_names"]
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    return TransformersFormat(model, history, entries)


def _describe(model: nn.Module, settings: ModelOptions, history: History) -> dict[str, Any]:
    """Write the licence to a timm model's config.

    Returns:
        The entries of config.json on the classes and the outputs.
    """
    entries, cfg = stated_labels(model, settings), get_pretrained_cfg(model)
    origin: Any = getattr(model, "origin", None)
    # The licence in the config of a model without a folder is that of timm's weights.
    has_config = origin is not None and not origin.is_file
    license = settings.license or (cfg.get("license") if has_config else history.base_license)
    if settings.license and history.base_license not in (None, settings.license):
        _logger.warning(
            f"You state the licence {settings.license}, but the pretrained weights have "
            f"{history.base_license}: make sure that it allows that."
        )
    # The entries that are taken out may be those of the weights that training began from.
    change_pretrained_cfg(
        model, tag=None, license=license or None, label_names=None, label_descriptions=None
    )
    if not records_arguments():  # such a version of timm does not write what the model has become
        change_pretrained_cfg(
            model,
            input_size=model_input_size(model),
            num_classes=model.num_classes,
            custom_load=False,
        )
    problem_type = settings.problem_type or getattr(model, "problem_type", None)
    if problem_type is not None:
        entries["problem_type"] = problem_type
    return entries


def stated_labels(model: nn.Module, settings: ModelOptions) -> dict[str, Any]:
    """Return the entries of config.json that name the classes.

    They are the user's, or else the model's own.

    Raises:
        ValueError: if there is another number of names, or a source that names its classes itself
            has one of them under another number.
    """
    if settings.label_names is not None:
        if numbering := own_numbering(model):
            _logger.warning(f"The model was trained {numbering}: names must be in that order.")
        labels = _checked_labels(
            model.num_classes, settings.label_names, settings.label_descriptions
        )
        _compare_with_source(model, labels["label_names"])
        return labels
    if settings.label_descriptions is not None:
        raise ValueError("label_descriptions are of label_names: state those too.")
    names = stated_names(model)
    if not names:
        return {}
    descriptions = get_pretrained_cfg(model).get("label_descriptions")
    try:
        labels = _checked_labels(model.num_classes, names, descriptions)
    except ValueError as error:
        _logger.warning("The names of classes in the source's config are left out: %s", error)
        return {}
    if getattr(model, "origin", None) is None:  # A model in memory may have a new classifier.
        _logger.warning(
            f"The names of classes are those in the config of this {type(model).__name__}, "
            f"{shown(names)}: state label_names if it was trained on others."
        )
    return labels


def _compare_with_source(model: nn.Module, names: Sequence[str]) -> None:
    """Compare names that the user states with those that a folder or repository has.

    A model in memory may have a new classifier, so the names in its config do not count.
    """
    origin = getattr(model, "origin", None)
    if origin is None:
        return
    source, known = public(origin.place), classes_of(model, names)
    moved, other = moved_class(known, names), renamed_class(known, names)
    if moved is not None:
        raise ValueError(
            f"The names of the classes that you state have {names[moved]!r} as class {moved}, but "
            f"{source} as class {known.index(names[moved])}: leave out --data-dir (label_names=), "
            f"since {source} names its classes itself."
        )
    if other is not None:
        _logger.warning(
            f"{source} has other names of classes than you state: its class {other} is "
            f"{known[other]} and becomes {names[other]}. This is right only if both name the same "
            "class."
        )


def _checked_labels(
    num_classes: Any,
    label_names: Sequence[str],
    label_descriptions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the entries of config.json for class names.

    Raises:
        ValueError: if the names do not fit the number of classes.
    """
    names = [label_names] if isinstance(label_names, str) else list(label_names)
    if len(names) != num_classes:
        raise ValueError(
            f"There are {len(names)} names of classes, but the model has {num_classes} classes."
        )
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"The name of a class must be a text, got {name!r}.")
    descriptions = dict(label_descriptions or {})
    for name, text in descriptions.items():
        if name not in names or not isinstance(text, str):
            raise ValueError(
                f"label_descriptions must hold texts by names of classes, got {name!r}: {text!r}."
            )
    return {"label_names": names, **({"label_descriptions": descriptions} if descriptions else {})}


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model has the ``save_pretrained`` of transformers.

    transformers is not imported for this.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def architecture_of(model: nn.Module) -> str:
    """Return timm's name of a model, or the path of its class.

    Of a class of transformers itself it is the name alone, without the module.
    """
    if is_of_timm(model):
        return get_pretrained_cfg(model)["architecture"]
    module, name = type(model).__module__, type(model).__qualname__
    if is_of_transformers(model) and module.startswith("transformers."):
        return name
    return f"{module}.{name}"


def drop_second_num_classes(config: dict[str, Any]) -> None:
    """Move ``num_classes`` out of the ``model_args`` of a config.json.

    transformers rejects it there, where timm states it twice.
    """
    args = config.get("model_args") or {}
    if "num_classes" in args:
        config["num_classes"] = args.pop("num_classes")


def load_checked(folder: Path, loader: str) -> nn.Module:
    """Load a folder with timm, in eval mode.

    Raises:
        ValueError: unless the model's tensors are those of the file, bit for bit.
    """
    try:
        # A training that goes on draws what it would have drawn.
        with torch.random.fork_rng([]), quick_init():
            model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except Exception as error:
        raise ValueError(
            f"{loader} cannot load the exported weights; {_remedy(folder)}: {first_problem(error)}"
        ) from error
    saved = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name in saved and saved[name].ndim < tensor.ndim and moe_layers(model):
            raise ValueError(
                f"{loader} loads a model with experts in {name}, since the model's own code makes "
                "them: tell the name of its dense form by note_dense_form, as CONTRIBUTING.md "
                'shows under "Add an expert", or save the state_dict() of timm_moe.to_dense(model).'
            )
        if name not in saved or not torch.equal(tensor, saved[name].to(tensor)):
            raise ValueError(
                f"{loader} does not load {name} as it was saved; state what was changed since "
                "creation in model_args."
            )
    return model


def _remedy(folder: Path) -> str:
    """Say what mends a folder whose weights do not fit its config.json."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    classes, named = config.get("num_classes"), config.get("pretrained_cfg", {}).get("classifier")
    weights = load_file(folder / "model.safetensors")
    for classifier in [named] if isinstance(named, str) else named or ():
        rows = len(weights.get(f"{classifier}.weight", ()))
        if rows not in (0, classes):  # The user replaced the module.
            return (
                f"{classifier} has {rows} outputs, but model.num_classes is {classes}: call "
                f"model.reset_classifier({rows}), or set model.num_classes = {rows}"
            )
    return (
        "state missing arguments in model_args; modules that were replaced, fused, split or pruned "
        "since the model's creation have none, so export before that, or save the state_dict() of "
        "the model, or of timm_moe.to_dense(model)"
    )


def _require_equal(written: Mapping[str, Tensor], read: Mapping[str, Tensor], loader: str) -> None:
    """Raise ValueError unless a reader returns the names and values that were written.

    Their type may be a wider one.
    """
    for name in read.keys() - written.keys():
        raise ValueError(f"{loader} gives the model a tensor {name} that it did not have.")
    for name, tensor in written.items():
        if name not in read or not torch.equal(tensor, read[name].to(tensor.device, tensor.dtype)):
            raise ValueError(
                f"{loader} does not load {name} ({tensor.dtype}) as it was saved; use one type, by "
                "model.float() say."
            )


def _write_config(folder: Path, config: dict[str, Any], history: History) -> None:
    """Write config.json after the other files, and give them its mode.

    safetensors closes its files to other users.
    """
    config[ENTRY] = {**history.to_config(), "weights": digest(folder)}
    text = json.dumps(config, indent=2, allow_nan=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    for file in folder.iterdir():
        shutil.copymode(folder / "config.json", file)


def _separate(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Copy the tensors that safetensors refuses.

    These are several names for one memory, as in CoaT, and tensors that are not contiguous.
    """
    seen: set[int] = set()
    for name, tensor in state_dict.items():
        memory = tensor.untyped_storage().data_ptr()
        state_dict[name] = (tensor.clone() if memory in seen else tensor).contiguous()
        seen.add(memory)
