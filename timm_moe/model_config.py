"""What timm keeps on a model about itself: where its weights came from, its input, its preprocessing."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm.models
from timm.data import resolve_data_config
from torch import nn

#: Sides of images, in pixels, that are believed.
_LARGEST_SIDE = 8192


def _is_side(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_SIDE


def _is_number(value: Any, lowest: float = -math.inf, highest: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and lowest <= value <= highest


def _is_input_size(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_side, value))


def _are_means(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(_is_number(part, -1e3, 1e3) for part in value)


def _are_deviations(value: Any) -> bool:
    return _are_means(value) and min(value) >= 1e-6


def _is_crop(value: Any) -> bool:
    return _is_number(value, 0.05, 2)


_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")
#: Of each entry that says how images are prepared: whether a value is possible, and what it must be.
_PREPROCESSING: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("input_size", "test_input_size", "min_input_size"),
        (_is_input_size, f"channels, height and width, each from 1 to {_LARGEST_SIDE}"),
    ),
    "img_size": (_is_side, f"an integer from 1 to {_LARGEST_SIDE}"),
    "mean": (_are_means, "finite numbers from -1000 to 1000"),
    "std": (_are_deviations, "finite numbers above 0, from 1e-6 to 1000"),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), (_is_crop, "a number from 0.05 to 2")),
    "crop_mode": (_CROP_MODES.__contains__, f"one of {', '.join(_CROP_MODES)}"),
    "interpolation": (_INTERPOLATIONS.__contains__, f"one of {', '.join(_INTERPOLATIONS)}"),
}


def check_preprocessing(stated: Mapping[str, Any]) -> None:
    """Raise ValueError if what is stated of the preparation of images, under timm's names, cannot be.

    Args:
        stated: a pretrained config or a part of it; entries of other names, and those that are None, are passed over.
    """
    for name, (is_possible, description) in _PREPROCESSING.items():
        value = stated.get(name)
        if value is not None and not is_possible(value):
            raise ValueError(f"{name} must be {description}, got {shown(value)}.")


def check_channels(stated: Mapping[str, Any], *channels: int) -> None:
    """Raise ValueError if a mean or deviation that is stated has none of these numbers of channels."""
    for name in ("mean", "std"):
        if stated.get(name) is not None and len(stated[name]) not in channels:
            raise ValueError(f"{name} must hold a number for each channel, {channels[-1]}, got {shown(stated[name])}.")


def shown(value: Any) -> str:
    """A value of whatever kind in a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} ..."


@dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for a model, as far as it is stated; the names are those of timm's scripts.

    Attributes:
        img_size: height and width in pixels.
        mean: of the pixels (from 0 to 1) of each channel, or of all.
        std: their standard deviation, likewise.
        crop_pct: share of the resized image's side that is cut out.
        crop_mode: ``"center"``, ``"squash"`` or ``"border"``.
        interpolation: of the resizing, as ``"bicubic"``.

    Raises:
        ValueError: if a value is not possible.
    """

    img_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    interpolation: str | None = None

    def __post_init__(self) -> None:
        check_preprocessing(vars(self))

    def stated(self) -> dict[str, Any]:
        """What is stated, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def state_preprocessing(model: nn.Module, stated: Mapping[str, Any]) -> set[str]:
    """Write what is stated of the preparation of images to a model's config; returns which of its entries it set.

    Args:
        model: of timm.
        stated: arguments of timm's scripts; those of other names, and unset ones, are passed over.

    Raises:
        ValueError: if a value is not possible, or the model cannot take images of the size.
    """
    given = {name: stated[name] for name in _PREPROCESSING if stated.get(name) not in (None, "")}
    channels, *size = model_input_size(model)
    check_preprocessing(given)
    check_channels(given, 1, channels)
    entries = {"input_size" if name == "img_size" else name for name in given}
    resolved = resolve_data_config({**given, "in_chans": channels}, model=model)
    # What timm's validate.py would take in their place.
    replaced = {f"test_{name}" for name in entries}
    kept = {name: value for name, value in get_pretrained_cfg(model).items() if name not in replaced}
    set_pretrained_cfg(model, {**kept, **{name: resolved[name] for name in entries}})
    if "input_size" in entries and model_input_size(model)[1:] != tuple(resolved["input_size"][1:]):
        built, wanted = ("x".join(map(str, sizes)) for sizes in (size, resolved["input_size"][1:]))
        raise ValueError(
            f"The model is built for images of {built} pixels and takes none of {wanted}: another one is built by "
            f"--model-kwargs img_size={resolved['input_size'][1]}."
        )
    return entries


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """What timm's loader does to images for a model: that of its training, at the size that it is built for."""
    config = resolve_data_config({}, model=model)
    return {
        **config,
        "input_size": model_input_size(model),
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
    }


def get_pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """A copy of the model's pretrained config, which is empty where timm did not make it."""
    return dict(getattr(model, "pretrained_cfg", {}))


def set_pretrained_cfg(model: nn.Module, cfg: dict[str, Any]) -> None:
    """Replace the pretrained config, under both of its names."""
    model.pretrained_cfg = model.default_cfg = cfg  # type: ignore[assignment]  # as above


def fixed_img_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) that the model is built for, or None if it takes any size or does not say."""
    if getattr(model, "dynamic_img_size", False):
        return None
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None:  # what an expert model, or the dense one made of it, was created with
        args: Any = getattr(model, "dense_args", None) or getattr(model, "_model_args", None) or {}
        size = args.get("img_size")
    return (size, size) if isinstance(size, int) else size


def model_input_size(model: nn.Module) -> tuple[int, ...]:
    """(channels, height, width) of the images that a timm model takes, whatever its pretrained config says."""
    cfg = get_pretrained_cfg(model)
    channels, *size = cfg["input_size"]
    if hasattr(timm.models, "get_model_input_config"):  # older versions of timm do not keep track of it
        current = timm.models.get_model_input_config(model)
        channels, *current_size = current["input_size"]
        return (channels, *(current_size if current["fixed_input_size"] else size))
    first_conv = cfg.get("first_conv")
    # shifted patches have no first convolution
    first = model.get_submodule(first_conv) if isinstance(first_conv, str) else getattr(model, "patch_embed", None)
    channels = getattr(model, "in_chans", getattr(first, "in_channels", channels))
    return (channels, *(fixed_img_size(model) or size))
