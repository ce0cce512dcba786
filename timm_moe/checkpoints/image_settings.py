"""Preprocessing of the images, and numbers of the classes, in the training of a loaded model."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from torch import nn

from ..console import shown_name
from ..model_config import MULTI_LABEL, get_pretrained_cfg, preprocessing, state_preprocessing
from .description import OF_IMAGES, is_bce
from .model_spec import ModelSpec, Origin

_logger = logging.getLogger(__name__)

#: What an entry of the preprocessing is if nobody states it.
DEFAULT = "timm's default"
#: Readers of timm's --dataset that number the classes themselves.
_OTHER_READERS = ("torch", "hfds", "hfids", "tfds", "wds")


def prepare(
    model: nn.Module, spec: ModelSpec, origins: dict[str, str], source: str, architecture: str
) -> None:
    """Write the user's preprocessing to the model's config, and log all of it.

    Args:
        model: the loaded model.
        spec: the user's statements about it.
        origins: for each entry of the preprocessing, who states it.
        source: of the model, for messages.
        architecture: name of the model, for messages.
    """
    origins |= dict.fromkeys(state_preprocessing(model, spec.preprocessing), "stated")
    _log_images(model, source, origins)
    guessed = [f"--{key.replace('_', '-')}" for key in OF_IMAGES if origins[key] == DEFAULT]
    if guessed:
        _logger.warning(
            f"{source} does not say how images were prepared in its training; what timm has for "
            f"{architecture} is a guess: state {', '.join(guessed)}."
        )


def log_images_of(model: nn.Module, stated: Iterable[str] = ()) -> None:
    """Log the preprocessing of a timm model in memory.

    Args:
        model: without wrappers.
        stated: entries that the user states.
    """
    origins = dict.fromkeys(preprocessing(model), "its pretrained_cfg")
    _log_images(
        model, f"this {type(model).__name__}", {**origins, **dict.fromkeys(stated, "stated")}
    )


def _log_images(model: nn.Module, source: str, origins: Mapping[str, str]) -> None:
    """Log how images are prepared for a model, and who states it."""
    by_origin: dict[str, list[str]] = {}
    for key, value in preprocessing(model).items():
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        by_origin.setdefault(origins[key], []).append(f"{key} {text}")
    shown_entries = "; ".join(
        f"{', '.join(entries)} ({origin})" for origin, entries in by_origin.items()
    )
    _logger.info(f"Images for {source}: {shown_entries}.")


def keep_args_of_images(model: nn.Module, train_args: dict[str, Any], path: Path) -> None:
    """Keep on the model what its trainer was told of images and timm's config has no place for."""
    names = ("input_img_mode", "class_map", "dataset")
    stated = {name: train_args.get(name) for name in names}
    kept = {name: value[:200] for name, value in stated.items() if value and isinstance(value, str)}
    model.args_of_images = kept  # type: ignore[assignment]
    mode = kept.get("input_img_mode")
    if mode not in (None, "RGB", "L"):
        _logger.warning(
            f"The images of {path} have the mode {mode!r} (its trainer's arguments), which "
            "config.json cannot state: with an exported model, pass --input-img-mode to timm's "
            "scripts again."
        )
    if is_bce(train_args):
        kept["loss"] = "bce"
    if train_args.get("task") == "multilabel":
        model.problem_type = MULTI_LABEL  # type: ignore[assignment]
    if train_args.get("input_key") and "dataset" not in kept:
        _logger.warning(
            f"{path} was trained with --input-key, so on certain files of a folder: here all "
            "images in a folder count."
        )
    if train_args.get("naflex_loader"):
        _logger.warning(
            f"{path} was trained with --naflex-loader: here its images are cropped to one size "
            "instead."
        )


def own_numbering(model: nn.Module) -> str | None:
    """Tell what numbered a model's classes in its training; None for timm's order of the folders.

    It completes the sentence "The model was trained", and holds no path.
    """
    numbering = _recorded(model, "numbering")
    if numbering is not None:
        has_names = get_pretrained_cfg(model).get("label_names")  # They tell the order.
        return None if has_names else shown_name(numbering)
    args: dict[str, str] = getattr(model, "args_of_images", {})
    reader = args.get("dataset", "").lower().partition("/")[0]
    if "class_map" in args and reader != "torch":  # which ignores it
        # It may be a path of either kind.
        return f"with the class map {PureWindowsPath(args['class_map']).name!r}"
    if reader in _OTHER_READERS:
        return f"with timm's reader {reader!r}, which numbers the classes itself"
    return None


def stated_image_mode(model: nn.Module) -> str | None:
    """Return the mode of Pillow of a model's images in its training, if train.py was told one."""
    args: dict[str, str] = getattr(model, "args_of_images", {})
    return _recorded(model, "image_mode") or args.get("input_img_mode")


def took_bce(model: nn.Module) -> bool:
    """Tell if train.py was told to train a model by binary cross-entropy."""
    origin = getattr(model, "origin", None)
    recorded = origin.recorded if isinstance(origin, Origin) else None
    options = recorded.get("options") if isinstance(recorded, dict) else None
    return is_bce(options if isinstance(options, dict) else getattr(model, "args_of_images", {}))


def _recorded(model: nn.Module, entry: str) -> str | None:
    """Return a text that an exported folder records of its model's training; None without one."""
    origin = getattr(model, "origin", None)
    recorded = origin.recorded if isinstance(origin, Origin) else None
    text = recorded.get(entry) if isinstance(recorded, dict) else None
    return text if isinstance(text, str) else None
