"""Loading: a file, folder or repository becomes a model in memory."""

import argparse
import copy
import logging
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    check_preprocessing,
    get_pretrained_cfg,
    preprocessing,
    set_pretrained_cfg,
    shown,
    state_preprocessing,
)
from .quick_init import quick_init
from .stated import SOURCE_PREFIXES, Blueprint, check_arguments, read_config

_logger = logging.getLogger(__name__)

#: Names of the weights in a folder in timm's layout, in order of preference; the first two are the Hub's.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
#: Names of train.py's checkpoints, the best first.
_CHECKPOINTS = ("model_best.pth.tar", "last.pth.tar", "tmp.pth.tar")
#: Prefixes that other frameworks put before the names of a model's weights.
_WRAPPERS = ("model", "net", "network", "backbone", "module", "timm_model", "_orig_mod")
_DEFAULT = "timm's default"
#: Preprocessing that a guess would get wrong.
_GUESSED = ("mean", "std", "crop_pct", "interpolation")


@dataclass(frozen=True)
class ModelSpec:
    """The user's statements about a model; they override the file's.

    Attributes:
        name: registered model name, or ``local-dir:`` or ``hf-hub:`` name of a folder whose config.json describes the
            model; for files that hold only weights, or were trained from such a folder.
        num_classes: size of the classifier.
        kwargs: further arguments of ``timm.create_model``, as in timm's ``--model-kwargs``.
        preprocessing: of the images, under timm's names: ``img_size`` in pixels, ``mean`` and ``std`` of pixels from 0
            to 1, ``crop_pct`` as a share of the resized image's side, ``crop_mode``, ``interpolation``.

    Raises:
        ValueError: if the preprocessing is impossible.
    """

    name: str | None = None
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_preprocessing(self.preprocessing)

    def args(self) -> dict[str, Any]:
        """Return the arguments of ``timm.create_model`` that are stated."""
        return {**({} if self.num_classes is None else {"num_classes": self.num_classes}), **self.kwargs}


def load_source(source: nn.Module | str | Path, spec: ModelSpec | None = None, use_ema: bool = False) -> nn.Module:
    """Load the model of a source, with the preprocessing of its training in its config.

    The weights must match the model exactly, with no tensor missing or left over; only a dense network's weights may
    become every expert's, which is logged. A file's statements never lead to another file or to a request, see
    :mod:`timm_moe.checkpoints.stated`.

    Args:
        source: a model; a train.py checkpoint or a safetensors file; a folder with config.json and weights, as path or
            ``local-dir:`` name; or an ``hf-hub:`` name.
        spec: the user's statements about it.
        use_ema: take the EMA weights of a train.py checkpoint; other sources have one kind of weights, with a warning.

    Raises:
        FileNotFoundError: if the source does not exist.
        ValueError: if the file is damaged, runs code when it is read, does not name its model, states more than it may,
            lacks the requested EMA weights, or does not fit its model; or if the model cannot take images as stated.
    """
    spec = spec or ModelSpec()
    if use_ema and (isinstance(source, nn.Module) or not Path(source).is_file()):
        name = f"This {type(source).__name__}" if isinstance(source, nn.Module) else source
        _logger.warning(f"{name} has one kind of weights, which are taken: EMA weights are in train.py's checkpoints.")
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


def _with_preprocessing(model: nn.Module, stated: Mapping[str, Any]) -> nn.Module:
    """Return the model, or if preprocessing is stated a copy with the same weights and another config."""
    if not stated:
        return model
    model = copy.copy(unwrapped(model))
    state_preprocessing(model, stated)
    return model


# --- files


def _load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    checkpoint = read_checkpoint(path)
    _require_checksums(path)
    state_dict = _state_dict(checkpoint, path, use_ema)
    train_args = _training_args(checkpoint)
    name = spec.name or _stated_name(train_args, path)
    blueprint = _blueprint(name, spec)
    with _train_args_of(path):
        stated = {name: value for name, value in _model_args(train_args).items() if name not in spec.args()}
    check_arguments(blueprint.architecture, stated, path)
    args = {**stated, **spec.args()}
    _require_possible(args, path.stat().st_size, path)
    try:
        with quick_init():
            model = _create(blueprint, args)
    except Exception as error:  # arguments may end in anything
        raise _not_created(name, error) from error
    state_dict = _unwrapped(state_dict, model, path)
    if not model.state_dict().keys() <= state_dict.keys():  # a dense checkpoint has no routers: they stay as drawn
        model = _create(blueprint, args)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"The weights in {path} do not fit {name}: {first_problem(error)}") from error
    _warn_of_untrained_routers(model, state_dict, path, name)
    origins = dict.fromkeys(preprocessing(model), f"the config of {name}")
    with _train_args_of(path):
        origins |= dict.fromkeys(state_preprocessing(model, train_args), "train.py's arguments")
    _prepare(model, spec, origins, str(path))
    if not train_args and blueprint == Blueprint(name) and "." not in name:
        _warn_of_guess(path, name, [key for key in _GUESSED if origins[key] != "stated"])
    # Class names may belong to the folder or repository that training started from.
    cfg = get_pretrained_cfg(model)
    set_pretrained_cfg(model, {key: cfg[key] for key in cfg if key not in ("label_names", "label_descriptions")})
    return model


@contextmanager
def _train_args_of(path: Path) -> Iterator[None]:
    """Name the file if its arguments of train.py cannot be used."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"The arguments of train.py in {path} are damaged: {describe(error)}") from error


def _stated_name(train_args: dict[str, Any], path: Path) -> str:
    """Return the model that a checkpoint names; it must be one that timm creates without looking elsewhere."""
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
    """Describe the model of a name: a registered one, or a folder's or repository's that the user states."""
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
    """Return the model's weights if another framework holds them as a part of its own, e.g. Lightning's ``model.``."""
    own = {name.partition(".")[0] for name in model.state_dict()}
    parts = {}
    for prefix in (f"{wrapper}." for wrapper in _WRAPPERS if wrapper not in own):
        part = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}
        parts[prefix] = clean_state_dict(part)  # the model may have been compiled
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
    """Load weights if they match the model exactly: none missing, reshaped, or left over of the ``held`` tensors."""
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
    """Return the folder of a ``local-dir:`` name, or the folder to which a repository's config.json was fetched."""
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
            except LocalEntryNotFoundError:  # the Hub cannot be reached
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
    """Fetch a file of a repository that the user named, from the Hub or from the cache."""
    repo_id, _, revision = name.removeprefix("hf-hub:").partition("@")
    return Path(hf_hub_download(repo_id, file, revision=revision or None))


# --- steps of both


def _create(blueprint: Blueprint, args: dict[str, Any]) -> nn.Module:
    """Create a model without its weights; ``args`` override the blueprint's."""
    classes = (blueprint.pretrained_cfg or {}).get("num_classes")  # stated even if 0, for which ViMoE takes 1000
    given = {"num_classes": classes, **blueprint.args, **args}
    given = {option: value for option, value in given.items() if value is not None}
    model = timm.create_model(blueprint.architecture, pretrained_cfg=blueprint.pretrained_cfg, **given)
    if not hasattr(model, "_model_args"):  # older versions of timm (1.0.26) do not set them
        model._model_args = given  # type: ignore[assignment]
    return model


def _not_created(name: str, error: Exception) -> ValueError:
    from_files = " from its config.json and weights" if name.startswith(SOURCE_PREFIXES) else ""
    return ValueError(f"{name} cannot be created{from_files}: {first_problem(error)}")


def _prepare(model: nn.Module, spec: ModelSpec, origins: dict[str, str], name: str) -> None:
    """Write the user's preprocessing to the model's config and log all of it; adds to ``origins``."""
    origins |= dict.fromkeys(state_preprocessing(model, spec.preprocessing), "stated")
    by_origin: dict[str, list[str]] = {}
    for key, value in preprocessing(model).items():
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        by_origin.setdefault(origins[key], []).append(f"{key} {text}")
    shown_entries = "; ".join(f"{', '.join(entries)} ({origin})" for origin, entries in by_origin.items())
    _logger.info(f"Images for {name}: {shown_entries}.")


def _training_args(checkpoint: dict[str, Any]) -> dict[str, Any]:
    args = checkpoint.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _require_possible(args: dict[str, Any], size: int, origin: Any) -> None:
    """Raise ValueError if an argument exceeds the bytes of all weights, before memory is allocated for it."""
    for name, value in args.items():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float)) and number > size:
                raise ValueError(f"{origin} states {name}={number:g}, too much for weights of {size:,} bytes.")


def first_problem(error: Exception) -> str:
    """Return the first problem that a load_state_dict lists, or the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1][:300] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else describe(error)


def describe(error: Exception) -> str:
    """Describe an error in one line of bounded length, with its class if the text is empty or only a key."""
    text = " ".join(str(error).split())
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return text if len(text) <= 500 else text[:500] + " ..."


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the dictionary in a checkpoint file without running code of the file.

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
        if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
            raise
        raise ValueError(f"{damaged}.") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint.")
    return checkpoint


def _require_checksums(path: Path) -> None:
    """Raise ValueError if a zip file does not match its checksums, which torch.load ignores.

    All of them are 0 if torch.save was set to write none.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            checked = any(record.CRC for record in archive.infolist())
            damaged = archive.testzip() if checked else None
    except Exception as error:  # a damaged directory of a zip file may raise anything
        raise ValueError(f"{path} is damaged or not a checkpoint.") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: {damaged} in it does not match its checksum.")


def _globals_needed(path: Path) -> list[str]:
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged pickle may raise anything
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
    """Return the arguments with which train.py created its model, except those that only matter in training."""
    input_size = train_args.get("input_size")
    return {
        "num_classes": train_args.get("num_classes"),
        "in_chans": train_args.get("in_chans") or (input_size[0] if input_size else None),
        "global_pool": train_args.get("gp"),
        **(train_args.get("model_kwargs") or {}),
    }
