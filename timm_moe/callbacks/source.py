"""After training: from whatever holds an expert model to the model in memory."""

import argparse
import json
import os
import pickle
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import timm
import torch
from safetensors.torch import load_file
from timm.data import resolve_data_config
from timm.models import clean_state_dict
from torch import Tensor, nn

from ..model_config import get_pretrained_cfg, set_pretrained_cfg

#: Folders and repositories as timm's model names state them.
_NAME_PREFIXES = ("local-dir:", "hf-hub:")


@dataclass(frozen=True)
class ModelSpec:
    """How to create the model of a file that does not say it itself; what is given here goes first.

    Attributes:
        name: registered model name.
        num_classes: size of the classifier.
        kwargs: further arguments of ``timm.create_model``, as in timm's ``--model-kwargs``.
    """

    name: str | None = None
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_source(source: nn.Module | str | Path, spec: ModelSpec | None = None, use_ema: bool = False) -> nn.Module:
    """The model that a source holds, with the preprocessing it was trained with in its config.

    Args:
        source: a model; a train.py checkpoint or a safetensors file; a folder with config.json and weights, as path or
            ``local-dir:`` name; or an ``hf-hub:`` name.
        spec: model to create for a file that does not name it (files of train.py do).
        use_ema: take the EMA weights of a train.py checkpoint.

    Raises:
        FileNotFoundError: if there is nothing by that name.
        ValueError: if the file is damaged, needs code to be read, does not say its model, has no EMA weights when
            asked for them, or does not fit its model.
    """
    if isinstance(source, nn.Module):
        return source
    if str(source).startswith(_NAME_PREFIXES):
        return _create(str(source), pretrained=True)
    path = Path(source)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"The folder {path} has no config.json, so it holds no timm model.")
        return _create(f"local-dir:{path}", pretrained=True)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is neither a file nor a folder; a repository on the Hub is written hf-hub:user/name."
        )
    return _load_file(path, spec or ModelSpec(), use_ema)


def training_args(source: str | Path) -> dict[str, Any]:
    """The arguments of train.py that a checkpoint holds; none if it is no checkpoint of train.py.

    Raises:
        ValueError: if the file is damaged or needs code to be read.
    """
    path = Path(source)
    if not path.is_file() or path.suffix == ".safetensors":
        return {}
    return _training_args(read_checkpoint(path))


def _training_args(checkpoint: dict[str, Any]) -> dict[str, Any]:
    args = checkpoint.get("args")
    return vars(args) if isinstance(args, argparse.Namespace) else {}


def _load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    checkpoint = read_checkpoint(path)
    _require_checksums(path)
    train_args = _training_args(checkpoint)
    state_dict = _state_dict(checkpoint, path, use_ema)
    name = spec.name or train_args.get("model")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} does not say which model it belongs to: name it with --model.")
    try:
        args = {**_model_args(train_args), **_spec_args(spec)}
    except TypeError as error:
        raise ValueError(f"The arguments of train.py in {path} are damaged: {describe(error)}") from error
    _require_possible(args, path.stat().st_size, path)
    model = _create(name, **args)
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        raise ValueError(f"The weights in {path} do not fit {name}: {first_problem(error)}") from error
    if train_args:
        try:
            preprocessing = resolve_data_config(train_args, model=model)
        except Exception as error:
            raise ValueError(f"The arguments of train.py in {path} are damaged: {describe(error)}") from error
        set_pretrained_cfg(model, {**get_pretrained_cfg(model), **preprocessing})
    _forget_class_names(model)
    return model


def _forget_class_names(model: nn.Module) -> None:
    """Take away those of the folder or repository that training began from: the checkpoint's may be others."""
    names = ("label_names", "label_descriptions")
    set_pretrained_cfg(model, {key: value for key, value in get_pretrained_cfg(model).items() if key not in names})


def _create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    if name.startswith("local-dir:") and not Path(name.removeprefix("local-dir:")).is_dir():
        raise FileNotFoundError(
            f"There is no folder {name.removeprefix('local-dir:')}, which the model was made from: say where it is now "
            "with --model local-dir:FOLDER."
        )
    try:
        if name.startswith("local-dir:"):
            size = sum(file.stat().st_size for file in Path(name.removeprefix("local-dir:")).iterdir())
            _require_possible(_saved_args(name), size, "config.json")
        with mock.patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):  # timm below 1.0.26 runs code of a folder
            model = timm.create_model(name, pretrained=pretrained, **kwargs)
        if not hasattr(model, "_model_args"):  # older versions of timm (1.0.26) do not keep them
            given = {option: value for option, value in kwargs.items() if value is not None}
            model._model_args = {**_saved_args(name), **given}  # type: ignore[assignment]
        return model
    except Exception as error:  # a damaged folder or argument may end in anything
        from_files = " from its config.json and weights" if name.startswith(_NAME_PREFIXES) else ""
        raise ValueError(f"{name} cannot be created{from_files}: {first_problem(error)}") from error


def _saved_args(name: str) -> dict[str, Any]:
    """The arguments that a folder or a repository states for its model in config.json."""
    if name.startswith("local-dir:"):
        config = json.loads(Path(name.removeprefix("local-dir:"), "config.json").read_text())
        return {"num_classes": config.get("num_classes"), **(config.get("model_args") or {})}
    if name.startswith("hf-hub:"):
        pretrained_cfg, _, args = timm.models.load_model_config_from_hf(name.removeprefix("hf-hub:"))
        return {"num_classes": pretrained_cfg.get("num_classes"), **(args or {})}
    return {}


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


def _spec_args(spec: ModelSpec) -> dict[str, Any]:
    return {**({} if spec.num_classes is None else {"num_classes": spec.num_classes}), **spec.kwargs}
