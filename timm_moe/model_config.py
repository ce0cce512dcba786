"""The pretrained config that timm keeps on a model.

It holds the origin of the weights, the input size and the preprocessing.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from timm import models
from timm.data import resolve_data_config
from timm.models import PretrainedCfg
from torch import nn

from .console import shown

Check = Callable[[Any], bool]


def _number(lowest: float, highest: float, types: tuple[type, ...] = (int, float)) -> Check:
    """Return a check for a number in a range, bounds included."""
    return lambda value: type(value) in types and lowest <= value <= highest


def _numbers(is_possible: Check) -> Check:
    """Return a check for a list of possible numbers that is not empty."""
    return lambda value: (
        isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_possible, value))
    )


_SIDE = _number(1, 8192, (int,))
_SIDES = _numbers(_SIDE)
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
_CROP_MODES = ("center", "squash", "border")
_SIZE = (
    lambda value: _SIDES(value) and len(value) == 3,
    "channels, height and width, each from 1 to 8192",
)
_CROP = (_number(0.05, 2), "a number from 0.05 to 2")
#: For each entry of the preprocessing a check of its value, and a description of possible values.
_PREPROCESSING: dict[str, tuple[Check, str]] = {
    "input_size": _SIZE,
    "test_input_size": _SIZE,
    "min_input_size": _SIZE,
    "img_size": (_SIDE, "an integer from 1 to 8192"),
    "mean": (_numbers(_number(-1e3, 1e3)), "finite numbers from -1000 to 1000"),
    "std": (_numbers(_number(1e-6, 1e3)), "finite numbers above 0, from 1e-6 to 1000"),
    "crop_pct": _CROP,
    "test_crop_pct": _CROP,
    "crop_mode": (_CROP_MODES.__contains__, f"one of {', '.join(_CROP_MODES)}"),
    "interpolation": (_INTERPOLATIONS.__contains__, f"one of {', '.join(_INTERPOLATIONS)}"),
}


def check_preprocessing(stated: Mapping[str, Any], *channels: int) -> None:
    """Check the values of a config's preprocessing; each may be None.

    Args:
        stated: values by their names in the config.
        channels: possible numbers of channels of the mean and the deviation; by default any.

    Raises:
        ValueError: if a value is impossible.
    """
    for name, (is_possible, description) in _PREPROCESSING.items():
        value = stated.get(name)
        if value is None:
            continue
        if not is_possible(value):
            raise ValueError(f"{name} must be {description}, got {shown(value)}.")
        if channels and name in ("mean", "std") and len(value) not in channels:
            raise ValueError(
                f"{name} must hold a number for each channel, {channels[-1]}, got {shown(value)}."
            )


def state_preprocessing(model: nn.Module, stated: Mapping[str, Any]) -> set[str]:
    """Write arguments of timm's scripts to the config of a timm model.

    What timm states for tests of its own weights goes, if they are prepared otherwise now. So does
    the size of the pooling, if the images have another size.

    Args:
        model: the model.
        stated: arguments of timm's scripts by their names; others are ignored.

    Returns:
        The names of the entries that were set.

    Raises:
        ValueError: if a value is impossible, or the model cannot take images of the size.
    """
    given = {name: stated[name] for name in _PREPROCESSING if stated.get(name) not in (None, "")}
    channels, *size = model_input_size(model)
    check_preprocessing(given, 1, channels)
    entries = {"input_size" if name == "img_size" else name for name in given}
    resolved = resolve_data_config({**given, "in_chans": channels}, model=model)

    wanted_size = tuple(resolved["input_size"][1:])

    # timm's validate.py would prefer an entry test_NAME.
    outdated = {f"test_{name}": None for name in entries}
    size_before = tuple(get_pretrained_cfg(model).get("input_size", ())[1:])
    if "input_size" in entries and wanted_size != size_before:
        outdated["pool_size"] = None  # It is that of the features of the earlier size.
    change_pretrained_cfg(model, **outdated, **{name: resolved[name] for name in entries})

    if "input_size" in entries and model_input_size(model)[1:] != wanted_size:
        built = "x".join(map(str, size))
        wanted = "x".join(map(str, wanted_size))
        remedy = (
            "--model-kwargs dynamic_img_size=True builds one for any multiple of its patches."
            if hasattr(model, "dynamic_img_size")
            else f"--model-kwargs img_size={wanted_size[0]} builds another one, if its weights "
            "suit any size."
        )
        raise ValueError(
            f"The model is built for images of {built} pixels and takes none of {wanted}. {remedy}"
        )
    drop_tests_of_timm(model)
    return entries


#: Entries of the preprocessing for training, and those for tests that timm's validate.py prefers.
_OF_TRAINING = ("input_size", "crop_pct", "mean", "std", "interpolation")
_OF_TESTS = ("test_input_size", "test_crop_pct")


def drop_tests_of_timm(model: nn.Module) -> None:
    """Take out timm's entries for tests of its own weights, if the user prepares images otherwise.

    timm's validate.py would prefer them to what the user stated.
    """
    cfg = get_pretrained_cfg(model)
    name = ".".join(filter(None, (cfg.get("architecture"), cfg.get("tag"))))
    try:
        own = asdict(models.get_pretrained_cfg(name) or PretrainedCfg())
    except RuntimeError:  # timm does not know the tag, so none of the entries is its own.
        return
    if any(_as_tuple(cfg.get(key)) != own[key] for key in _OF_TRAINING):
        stale = [key for key in _OF_TESTS if key in cfg and _as_tuple(cfg[key]) == own[key]]
        change_pretrained_cfg(model, **dict.fromkeys(stale))


def _as_tuple(value: Any) -> Any:
    """Make a tuple of a list, as which JSON has it."""
    return tuple(value) if isinstance(value, list) else value


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """Return the preprocessing of a model's training, at the image size of the built model.

    For other channels than the config's, mean and deviation are averaged, as timm's loader does.
    """
    config, size = resolve_data_config({}, model=model), model_input_size(model)
    for name in ("mean", "std"):
        values = tuple(config[name])
        config[name] = values if len(values) == size[0] else (fmean(values),) * size[0]
    return {**config, "input_size": size}


#: What a classifier's outputs are, in the words of Hugging Face transformers. By default they are
#: logits of a softmax. Those of several labels for an image are logits of sigmoids.
MULTI_LABEL = "multi_label_classification"
PROBLEM_TYPES = ("single_label_classification", MULTI_LABEL, "regression")


def check_problem_type(value: Any) -> None:
    """Raise ValueError unless a value is one of :data:`PROBLEM_TYPES`, or None."""
    if value is not None and value not in PROBLEM_TYPES:
        raise ValueError(
            f"problem_type must be one of {', '.join(PROBLEM_TYPES)}, got {shown(value)}."
        )


def is_of_timm(model: nn.Module) -> bool:
    """Tell if ``timm.create_model`` made a model."""
    return hasattr(model, "pretrained_cfg")


def timm_model_in(model: Any) -> nn.Module:
    """Take timm's model out of transformers' TimmWrapper, with all that its config states.

    This is the preprocessing, the class names and the problem type.

    Other models are returned as they are.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) != "timm_wrapper":
        return model
    inner = copy.copy(model.timm_model)
    # The wrapper creates its model without the config of the weights, which it keeps itself.
    cfg = dict(getattr(config, "pretrained_cfg", None) or {})
    # The numbers may be texts, and in the order of texts: 0, 1, 10, 2.
    names = [config.id2label[number] for number in sorted(config.id2label, key=int)]
    if inner.num_classes and names != [f"LABEL_{number}" for number in range(len(names))]:
        cfg["label_names"] = names
    change_pretrained_cfg(inner, **cfg)
    inner.problem_type = getattr(config, "problem_type", None)
    return inner


def get_pretrained_cfg(model: nn.Module) -> dict[str, Any]:
    """Copy the model's pretrained config, which is empty if timm did not make the model."""
    return dict(getattr(model, "pretrained_cfg", {}))


def stated_names(model: nn.Module) -> list[Any]:
    """List the class names in a model's config in the order of their numbers; empty if it has none.

    A number without a name has None.
    """
    stated = get_pretrained_cfg(model).get("label_names") or []
    if isinstance(stated, dict):  # by number, which is a text in JSON
        return [stated.get(number, stated.get(str(number))) for number in range(len(stated))]
    return list(stated)


def classes_of(model: nn.Module, names: Sequence[str]) -> list[Any]:
    """List the names of a model's classes in the order of their numbers.

    Args:
        model: a model with ``num_classes``.
        names: as many, for the classes that the model does not name. transformers calls such a
            class ``LABEL_`` and its number.
    """
    by_number = dict(enumerate(stated_names(model) or names))
    return [
        name if by_number.get(number) == f"LABEL_{number}" else by_number.get(number)
        for number, name in enumerate(names)
    ]


def moved_class(known: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first number in ``names`` of a class that has another number in ``known``.

    Names that both have in different orders would give classes to other labels, so this is an
    error everywhere.
    """
    moved = (n for n, name in enumerate(names) if known[n] != name and name in known)
    return next(moved, None)


def renamed_class(known: Sequence[Any], names: Sequence[str]) -> int | None:
    """Return the first number of a class that has another name in ``names`` than in ``known``."""
    return next((n for n, name in enumerate(names) if known[n] != name), None)


def change_pretrained_cfg(model: nn.Module, /, **entries: Any) -> None:
    """Set entries of the pretrained config, under both of its names; None takes an entry out."""
    cfg = {**get_pretrained_cfg(model), **entries}
    for name, value in entries.items():
        if value is None:
            del cfg[name]
    model.pretrained_cfg = cfg  # type: ignore[assignment]
    model.default_cfg = cfg  # type: ignore[assignment]


#: Ends of the names of drop rates, which an exported model does not state.
RATES = ("drop_rate", "drop_path_rate", "drop_block_rate")


def records_arguments() -> bool:
    """Tell if timm records the arguments of a model and writes them when it saves one.

    It does since 1.0.31.
    """
    return hasattr(models, "get_model_args")


def untold_args(model: nn.Module) -> dict[str, Any]:
    """Return the arguments of a model that timm's ``save_for_hf`` does not find by itself.

    There are none since timm 1.0.31. Before, they are all arguments but drop rates.
    """
    if records_arguments():
        return {}
    args: dict[str, Any] = {**getattr(model, "_model_args", {}), "num_classes": model.num_classes}
    return {
        name: value
        for name, value in args.items()
        if name not in ("device", "dtype") and not name.endswith(RATES)
    }


def model_input_size(model: nn.Module) -> tuple[int, ...]:
    """Return (channels, height, width) of the images that a timm model is built for.

    The pretrained config counts only where the model does not say it, as one that takes any size.
    """
    cfg = get_pretrained_cfg(model)
    if records_arguments():
        current = models.get_model_input_config(model)
        channels, *size = current["input_size"]
        return (channels, *(size if current["fixed_input_size"] else cfg["input_size"][1:]))
    channels, *size = cfg["input_size"]
    noted = getattr(model, "_model_args", {}).get("in_chans", channels)
    channels = getattr(model, "in_chans", None) or noted
    return (channels, *(_built_size(model) or size))


def _built_size(model: Any) -> tuple[int, int] | None:
    """Return the (height, width) that a model is built for, before timm 1.0.31.

    It is None if the model takes any size or states none.
    """
    patches = getattr(model, "patch_embed", None)
    if getattr(model, "dynamic_img_size", False) or not getattr(patches, "strict_img_size", True):
        return None
    size = getattr(patches, "img_size", None)
    size = size or getattr(model, "_model_args", {}).get("img_size")
    return (size, size) if isinstance(size, int) else size
