"""After training: from whatever holds an expert model to the model in memory."""

import argparse
import copy
import logging
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor, nn

from ..convert.blocks import moe_layers, unwrapped
from ..info import check_registered
from ..model_config import (
    Preprocessing,
    get_pretrained_cfg,
    preprocessing,
    set_pretrained_cfg,
    shown,
    state_preprocessing,
)
from .quick_init import quick_init
from .stated import SOURCE_PREFIXES, Blueprint, check_arguments, read_config

_logger = logging.getLogger(__name__)

#: What a folder of timm's may call its weights, the first of which is taken; the first two are the Hub's.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
#: What train.py writes to its folder, the best checkpoint first.
_CHECKPOINTS = ("model_best.pth.tar", "last.pth.tar", "tmp.pth.tar")
#: What other frameworks put before the names of a model's weights.
_WRAPPERS = ("model", "net", "network", "backbone", "module", "timm_model", "_orig_mod")
_DEFAULT = "timm's default"
#: What a guess of the preprocessing would get wrong.
_GUESSED = ("mean", "std", "crop_pct", "interpolation")


@dataclass(frozen=True)
class ModelSpec:
    """What the user states of the model of a file; it goes before what the file says.

    Attributes:
        name: registered model name, or ``local-dir:`` or ``hf-hub:`` name of a folder whose config.json describes the
            model; for files that hold weights alone, or were trained from such a folder.
        num_classes: size of the classifier.
        kwargs: further arguments of ``timm.create_model``, as in timm's ``--model-kwargs``.
        preprocessing: how images are prepared for it.
    """

    name: str | None = None
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)

    def args(self) -> dict[str, Any]:
        """The arguments of ``timm.create_model`` that are stated."""
        return {**({} if self.num_classes is None else {"num_classes": self.num_classes}), **self.kwargs}


def load_source(source: nn.Module | str | Path, spec: ModelSpec | None = None, use_ema: bool = False) -> nn.Module:
    """The model that a source holds, with the preprocessing it was trained with in its config.

    A file is loaded as it is or not at all: every tensor of the model is in it, and none is left over (but that a dense
    network's weights become those of each expert, of which the log tells). What it states leads to no other file and to
    no request, see :mod:`timm_moe.checkpoints.stated`.

    Args:
        source: a model; a train.py checkpoint or a safetensors file; a folder with config.json and weights, as path or
            ``local-dir:`` name; or an ``hf-hub:`` name.
        spec: what the user states of it.
        use_ema: take the EMA weights of a train.py checkpoint; of anything else, what there is, with a warning.

    Raises:
        FileNotFoundError: if there is nothing by that name.
        ValueError: if the file is damaged, needs code to be read, does not say its model, states more than it may, has
            no EMA weights when asked for them, or does not fit its model; or if the model takes no images as stated.
    """
    spec = spec or ModelSpec()
    if use_ema and (isinstance(source, nn.Module) or not Path(source).is_file()):
        told = f"This {type(source).__name__}" if isinstance(source, nn.Module) else source
        _logger.warning(f"{told} has one kind of weights, which are taken: EMA weights are in train.py's checkpoints.")
    if isinstance(source, nn.Module):
        return _with_preprocessing(source, spec.preprocessing)
    path = Path(str(source).removeprefix("local-dir:"))
    if str(source).startswith("hf-hub:"):
        return _load_folder(str(source), spec)
    if path.is_dir() or str(source).startswith("local-dir:"):
        return _load_folder(f"local-dir:{path}", spec)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a file nor a folder; a repository on the Hub is written hf-hub:user/name."
        )
    return _load_file(path, spec, use_ema)


def _with_preprocessing(model: nn.Module, stated: Preprocessing) -> nn.Module:
    """The model, or where something is stated a copy of it with the same weights and another config."""
    if not stated.stated():
        return model
    model = copy.copy(unwrapped(model))
    state_preprocessing(model, stated.stated())
    return model


# --- files


def _load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    checkpoint = read_checkpoint(path)
    _require_checksums(path)
    train_args = _training_args(checkpoint)
    state_dict = _state_dict(checkpoint, path, use_ema)
    name = spec.name or _stated_name(train_args, path)
    blueprint = _blueprint(name, spec)
    try:
        stated = {name: value for name, value in _model_args(train_args).items() if name not in spec.args()}
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"The arguments of train.py in {path} are damaged: {describe(error)}") from error
    check_arguments(blueprint.architecture, stated, path)
    args = {**stated, **spec.args()}
    _require_possible(args, path.stat().st_size, path)
    try:
        with quick_init():
            model = _create(blueprint, args)
    except Exception as error:  # arguments may end in anything
        raise _not_created(name, error) from error
    state_dict = _unwrapped(state_dict, model, path)
    if not model.state_dict().keys() <= state_dict.keys():  # what a dense checkpoint lacks, as routers, stays as drawn
        model = _create(blueprint, args)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"The weights in {path} do not fit {name}: {first_problem(error)}") from error
    _warn_of_untrained_routers(model, state_dict, path, name)
    origins = dict.fromkeys(preprocessing(model), f"the config of {name}")
    try:
        origins |= dict.fromkeys(state_preprocessing(model, train_args), "train.py's arguments")
    except Exception as error:
        raise ValueError(f"The arguments of train.py in {path} are damaged: {describe(error)}") from error
    _prepare(model, spec, origins, str(path))
    if not train_args and blueprint == Blueprint(name) and "." not in name:
        _warn_of_guess(path, name, [key for key in _GUESSED if origins[key] != "stated"])
    _forget_class_names(model)
    return model


def _forget_class_names(model: nn.Module) -> None:
    """Take away those of the folder or repository that training began from: the checkpoint's may be others."""
    names = ("label_names", "label_descriptions")
    set_pretrained_cfg(model, {key: value for key, value in get_pretrained_cfg(model).items() if key not in names})


def _stated_name(train_args: dict[str, Any], path: Path) -> str:
    """The model that a checkpoint names; it must be one that timm creates without looking elsewhere."""
    name = train_args.get("model")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} does not say which model it belongs to: name it with --model.")
    if name.startswith(SOURCE_PREFIXES) or ":" in name or "/" in name:
        prefix, described = ("hf-hub:", "NAME") if name.startswith(("hf-hub:", "hf_hub:")) else ("local-dir:", "FOLDER")
        raise ValueError(
            f"{path} states that its model is described in {shown(name)[1:-1]}, where no file may lead: say yourself "
            f"where it is, with --model {prefix}{described}."
        )
    return name


def _blueprint(name: str, spec: ModelSpec) -> Blueprint:
    """What describes a model of a name that the user states or that is registered."""
    if name.startswith(SOURCE_PREFIXES):
        folder = _described_in(name)
        try:
            return read_config(folder / "config.json", overridden=spec.args())
        except Exception as error:
            raise _not_created(name, error) from error
    check_registered(name)
    return Blueprint(name)


def _warn_of_untrained_routers(model: nn.Module, state_dict: Mapping[str, Tensor], path: Path, name: str) -> None:
    learned = [f"{path}.router." for path, layer in moe_layers(model).items() if layer.router.state_dict()]
    if learned and not any(name.startswith(tuple(learned)) for name in state_dict):
        _logger.warning(
            f"{path} holds a dense model: the routers of {name} are untrained, and its experts all copies of one, so "
            "what is measured or written is no trained expert model."
        )


def _warn_of_guess(source: Path | str, architecture: str, guessed: Sequence[str]) -> None:
    if guessed:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in guessed)
        _logger.warning(
            f"{source} does not say how images were prepared in its training; what timm has for {architecture} is a "
            f"guess: state {flags}."
        )


def _unwrapped(state_dict: dict[str, Tensor], model: nn.Module, path: Path) -> dict[str, Tensor]:
    """The model's weights where another framework keeps them as a part of its own, as Lightning's ``model.``."""
    own = {name.partition(".")[0] for name in model.state_dict()}
    parts = {}
    for prefix in (f"{wrapper}." for wrapper in _WRAPPERS if wrapper not in own):
        part = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        parts[prefix] = clean_state_dict(part)  # it may have been compiled
    found = [prefix for prefix, part in parts.items() if own <= {name.partition(".")[0] for name in part}]
    if not found:
        return state_dict
    if len(found) > 1:
        raise ValueError(
            f"{path} holds several models, under {' and '.join(found)}: write the weights of one to their own file."
        )
    (prefix,) = found
    others = [name for name in state_dict if not name.startswith(prefix)]
    left = f"; not taken: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}" if others else ""
    _logger.info(f"{path} holds the model's weights under {prefix[:-1]}{left}.")
    return parts[prefix]


# --- folders and repositories


def _load_folder(name: str, spec: ModelSpec) -> nn.Module:
    blueprint = _blueprint(name, spec)
    try:
        weights = _weights_file(name)
        state_dict = _state_dict(read_checkpoint(weights), weights, use_ema=False)
        _require_checksums(weights)
        args = {"num_classes": (blueprint.pretrained_cfg or {}).get("num_classes"), **blueprint.args, **spec.args()}
        _require_possible(args, weights.stat().st_size, "config.json")
        with quick_init():
            model = _create(blueprint, spec.args())
        _load_exactly(model, _unwrapped(state_dict, model, weights), len(state_dict))
    except Exception as error:  # a damaged folder may end in anything
        raise _not_created(name, error) from error
    described = blueprint.pretrained_cfg or {}
    origins = {key: "its config.json" if key in described else _DEFAULT for key in preprocessing(model)}
    _prepare(model, spec, origins, name)
    _warn_of_guess(name, blueprint.architecture, [key for key in _GUESSED if origins[key] == _DEFAULT])
    return model


def _load_exactly(model: nn.Module, state_dict: dict[str, Tensor], held: int) -> None:
    """Load weights none of which is missing, changed to fit, or, of the number that the file holds, left over."""
    own = model.state_dict()
    for name, tensor in own.items():
        if name not in state_dict:
            raise ValueError(f"the weights hold no {name}, which the model has.")
        if state_dict[name].shape != tensor.shape:
            sizes = [tuple(shape) for shape in (state_dict[name].shape, tensor.shape)]
            raise ValueError(f"the weights hold {name} of shape {sizes[0]}, the model one of {sizes[1]}.")
    for name in state_dict:
        if name not in own:
            raise ValueError(f"the weights hold {name}, which the model has not.")
    if held > len(state_dict):
        raise ValueError("the weights hold more than the model's.")
    model.load_state_dict(state_dict)


def _described_in(name: str) -> Path:
    """The folder of a ``local-dir:`` name, or the one to which a repository's config.json was fetched."""
    if name.startswith("hf-hub:"):
        try:
            return _fetch(name, "config.json").parent
        except Exception as error:
            raise _not_created(name, error) from error
    folder = Path(name.removeprefix("local-dir:"))
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(_without_config(folder))
    return folder


def _without_config(folder: Path) -> str:
    checkpoint = next((name for name in _CHECKPOINTS if (folder / name).is_file()), None)
    if checkpoint is not None:
        return f"The folder {folder} is one of train.py's: name the checkpoint in it, {folder / checkpoint}."
    weights = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if weights is not None:
        return f"The folder {folder} has no config.json: name the weights, {folder / weights}, and their --model."
    return f"The folder {folder} has no config.json, so it holds no timm model."


def _weights_file(name: str) -> Path:
    if name.startswith("hf-hub:"):
        for file in _WEIGHTS[:2]:
            try:
                return _fetch(name, file)
            except LocalEntryNotFoundError:  # of the Hub that cannot be asked
                raise
            except EntryNotFoundError:
                continue
        raise ValueError(f"it has no {' or '.join(_WEIGHTS[:2])}.")
    folder = Path(name.removeprefix("local-dir:"))
    named = [folder / file for file in _WEIGHTS if (folder / file).is_file()]
    others = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".pth", ".bin"))
    if not named and len(others) != 1:
        raise ValueError(f"it has no {_WEIGHTS[0]}.")
    return (named or others)[0]


def _fetch(name: str, file: str) -> Path:
    """A file of a repository that the user named, from the Hub or from what was fetched before."""
    repo_id, _, revision = name.removeprefix("hf-hub:").partition("@")
    return Path(hf_hub_download(repo_id, file, revision=revision or None))


# --- for all of them


def _create(blueprint: Blueprint, args: dict[str, Any]) -> nn.Module:
    """A model without its weights: of what is described, and of arguments that go before it."""
    described = {
        "num_classes": (blueprint.pretrained_cfg or {}).get("num_classes")
    }  # 0 too, for which ViMoE takes 1000
    given = {option: value for option, value in {**described, **blueprint.args, **args}.items() if value is not None}
    model = timm.create_model(blueprint.architecture, pretrained_cfg=blueprint.pretrained_cfg, **given)
    if not hasattr(model, "_model_args"):  # older versions of timm (1.0.26) do not keep them
        model._model_args = given  # type: ignore[assignment]
    return model


def _not_created(name: str, error: Exception) -> ValueError:
    from_files = " from its config.json and weights" if name.startswith(SOURCE_PREFIXES) else ""
    return ValueError(f"{name} cannot be created{from_files}: {first_problem(error)}")


def _prepare(model: nn.Module, spec: ModelSpec, origins: dict[str, str], name: str) -> None:
    """Write the preprocessing that is stated to the model's config, and tell what holds; completes ``origins``."""
    origins |= dict.fromkeys(state_preprocessing(model, spec.preprocessing.stated()), "stated")
    by_origin: dict[str, list[str]] = {}
    for key, value in preprocessing(model).items():
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        by_origin.setdefault(origins[key], []).append(f"{key} {text}")
    told = "; ".join(f"{', '.join(entries)} ({origin})" for origin, entries in by_origin.items())
    _logger.info(f"Images for {name}: {told}.")


def _training_args(checkpoint: dict[str, Any]) -> dict[str, Any]:
    args = checkpoint.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _require_possible(args: dict[str, Any], size: int, origin: Any) -> None:
    """Raise ValueError if an argument exceeds the bytes of all weights, before room is made for what it states."""
    for name, value in args.items():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float)) and number > size:
                raise ValueError(f"{origin} states {name}={number:g}, too much for weights of {size:,} bytes.")


def first_problem(error: Exception) -> str:
    """The first thing that a load_state_dict complains about, where it lists many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1][:300] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else describe(error)


def describe(error: Exception) -> str:
    """An error in one line of bounded length; its class where it says nothing, or says only a key."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= 500 else text[:500] + " ..."


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The dictionary in a checkpoint file, read without running code of the file.

    Raises:
        ValueError: if the file is damaged, is no checkpoint, or needs code.
    """
    damaged = f"{path} is damaged or not a checkpoint"
    if path.suffix == ".safetensors" and zipfile.is_zipfile(path):
        raise ValueError(f"{path} was written by torch.save and is no safetensors file: rename it to end in .pth.")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        # train.py stores its arguments as a Namespace; everything else must be plain data and tensors.
        with torch.serialization.safe_globals([argparse.Namespace]):
            # Mapped into memory, the optimizer's state in the file is never read.
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        needed = _globals_needed(path)
        if needed:
            raise ValueError(f"{path} runs code when it is read ({', '.join(needed)}), which is refused.") from error
        raise ValueError(f"{damaged}.") from error
    except Exception as error:  # a file that is no checkpoint may end in anything
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        raise ValueError(f"{damaged}.") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint.")
    return checkpoint


def _require_checksums(path: Path) -> None:
    """Raise ValueError if what a zip file holds does not match its checksums, at which torch.load does not look.

    Where all of them are 0, torch.save was told to write none.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            checked = any(record.CRC for record in archive.infolist())
            damaged = archive.testzip() if checked else None
    except Exception as error:  # whatever a damaged directory of a zip file raises
        raise ValueError(f"{path} is damaged or not a checkpoint.") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: {damaged} in it does not match its checksum.")


def _globals_needed(path: Path) -> list[str]:
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # whatever a damaged pickle raises
        return []
    return [name for name in needed if name != "argparse.Namespace"]


def _state_dict(checkpoint: dict[str, Any], path: Path, use_ema: bool) -> dict[str, Tensor]:
    if use_ema:
        if "state_dict_ema" not in checkpoint:
            raise ValueError(f"{path} has no EMA weights; train with --model-ema to get them.")
        state_dict = checkpoint["state_dict_ema"]
    else:
        state_dict = checkpoint.get("state_dict", checkpoint.get("model", checkpoint))
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state_dict.items()
    ):
        raise ValueError(f"{path} has no state dict of tensors.")
    return clean_state_dict(state_dict)


def _model_args(train_args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which train.py created its model, without those that only matter in training."""
    input_size = train_args.get("input_size")
    return {
        "num_classes": train_args.get("num_classes"),
        "in_chans": train_args.get("in_chans") or (input_size[0] if input_size else None),
        "global_pool": train_args.get("gp"),
        **(train_args.get("model_kwargs") or {}),
    }
