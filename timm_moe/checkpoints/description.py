"""Statements of a file about its model: a registered architecture, and plain values for it.

A checkpoint or config.json may come from anyone, and timm's factory takes more than an architecture
needs: where to fetch weights and where to keep them, further files to read, functions and classes.
None of that is taken from a file, so no file leads to another file or to the network. What the user
states is not restricted.
"""

import functools
import inspect
import json
import math
import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from timm.models import PretrainedCfg, model_entrypoint
from torch import nn

from ..console import is_single, shown, shown_name
from ..convert.registry import get_spec, moe_options
from ..model_config import check_preprocessing, check_problem_type
from ..models.mixin import constructor_arguments
from ..models.registered import check_registered, is_registered_here
from ..timm_classes import timm_classes

#: Entries of the preprocessing that are asked of the user where nobody states them.
OF_IMAGES = ("mean", "std", "crop_pct", "interpolation")
#: Prefixes of model names that lead to a folder or a repository.
SOURCE_PREFIXES = ("local-dir:", "hf-hub:")
#: Entry of config.json that holds the history of weights, with their digest: transformers keeps it
#: beside others.
ENTRY = "timm_moe"
#: Options that entrypoints handle themselves. ``use_naflex`` builds timm's NaFlexVit of a ViT or an
#: EVA, with the options of its ``NaFlexVitCfg``.
_ENTRYPOINT_OPTIONS = ("official_compat", "bn_eps", "use_naflex")
#: Arguments of constructors that do not describe an architecture: they lead to files, functions,
#: classes and devices.
_NO_ARCHITECTURE = re.compile(
    r"self|cfg|cache_dir|url|file|state_dict|features_only|device|dtype"
    r"|(pretrained|checkpoint).*|.*_(fn|cls|cfg|path|file)"
)
#: Entries of timm's pretrained configs that say where weights are or how they are changed in
#: loading.
_SOURCES = re.compile(
    "url|file|state_dict|hf_hub_id|hf_hub_filename|source|architecture|custom_load|label_offset"
)
_OF_NAFLEX = [
    option.name for options in timm_classes("naflexvit.NaFlexVitCfg") for option in fields(options)
]
_ENTRIES = [entry.name for entry in fields(PretrainedCfg) if not _SOURCES.fullmatch(entry.name)]


@dataclass(frozen=True)
class Blueprint:
    """The architecture and arguments of a model."""

    architecture: str  #: registered name, perhaps with a tag
    #: for its constructor; None leaves an argument to timm
    args: dict[str, Any] = field(default_factory=dict)
    #: timm's config of the weights; by default the registered one
    pretrained_cfg: dict[str, Any] | None = None
    problem_type: str | None = None  #: what the outputs are, as transformers names it
    recorded: Any = None  #: what an export has written of the training, for its own reading


def read_config(file: Path, overridden: Collection[str] = ()) -> Blueprint:
    """Read a ``config.json`` of timm, without the arguments that are overridden.

    Raises:
        ValueError: if it states what no file may.
    """
    config = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    architecture = config.get("architecture")
    if not isinstance(architecture, str):
        raise ValueError("it states no architecture of timm.")
    check_registered(architecture)
    args = {
        name: value
        for name, value in (config.get("model_args") or {}).items()
        if name not in overridden
    }
    check_arguments(architecture, args, "config.json")
    cfg = _pretrained_cfg(config, args.get("num_classes"))
    args = {"num_classes": cfg.get("num_classes"), **args}  # even if 0, for which ViMoE takes 1000
    problem_type = config.get("problem_type")
    check_problem_type(problem_type)
    return Blueprint(architecture, args, cfg, problem_type, recorded=config.get(ENTRY))


def _refuse_constant(text: str) -> None:
    raise ValueError(f"it holds {text}, which is no number.")


def _pretrained_cfg(config: dict[str, Any], num_classes: int | None) -> dict[str, Any]:
    cfg = config.get("pretrained_cfg", config)  # the older layout has the entries at the top
    older = {"label_names": config.get("labels")} if cfg is config else {}
    above = {
        name: config.get(name) for name in ("num_classes", "label_names", "label_descriptions")
    }
    given = {
        name: value
        for entries in (older, cfg, above)
        for name, value in entries.items()
        if value is not None
    }
    known = {name: value for name, value in given.items() if name in _ENTRIES}
    if num_classes is not None and known.get("num_classes") not in (None, num_classes):
        raise ValueError(
            f"it states both num_classes={shown(known['num_classes'])} and {shown(num_classes)}."
        )
    for name, value in known.items():
        if not (_is_labels(value) if name.startswith("label_") else _is_plain(value)):
            raise ValueError(f"it states {name}={shown(value)}.")
    check_preprocessing(known, 1, 3, known.get("input_size", (3,))[0])
    return known


def _is_labels(value: Any) -> bool:
    """Tell whether a value holds class names or descriptions: a list or dict of texts."""
    labels = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(isinstance(label, str) for label in labels)


def args_of_trainer(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer's arguments in a checkpoint, a namespace or a dict; empty if it has none.

    They are train.py's, or under the same names those of another trainer, such as DeiT's and MAE's.

    What is nested deeper than train.py's own arguments becomes a string: a pickle may hold one list
    in another many times over, and its text would have no end.
    """
    args = checkpoint.get("args")
    if isinstance(args, Namespace):
        args = vars(args)
    elif not isinstance(args, dict) or "model" not in args:
        return {}
    stated = {name: _flattened(value) for name, value in args.items()}
    # DeiT's and MAE's trainers state the side of an image.
    if isinstance(stated.get("input_size"), int):
        stated["img_size"] = stated.pop("input_size")
    return stated


def are_whole(args: Mapping[str, Any]) -> bool:
    """Tell if arguments state all that the model was made of, as those of train.py do.

    Another trainer's may name the model, but have no place for its options, which are in its code.
    """
    return "model_kwargs" in args


def is_bce(args: Mapping[str, Any]) -> bool:
    """Tell by train.py's options whether its loss was binary cross-entropy."""
    return bool(args.get("bce_loss")) or args.get("loss") == "bce"


def measures_ema(args: Mapping[str, Any]) -> bool:
    """Tell by train.py's options whether it measured EMA weights, as it does where it has any."""
    return bool(args.get("model_ema")) and not args.get("model_ema_force_cpu")


def _flattened(value: Any, levels: int = 2) -> Any:
    """Copy a value, or a dict or list to a depth of ``levels``; write anything else as a string."""
    if levels and isinstance(value, dict):
        return {_flattened(name, 0): _flattened(part, levels - 1) for name, part in value.items()}
    if levels and isinstance(value, (list, tuple)):
        return [_flattened(part, levels - 1) for part in value]
    return value if is_single(value) else shown(value)


def model_arguments(train_args: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the arguments with which train.py created its model, and the size of its images.

    The size is (height, width), an int, or None. A newer train.py passes it to models of a fixed
    size, an older one does not.
    """
    input_size = train_args.get("input_size")
    used = {
        "num_classes": train_args.get("num_classes"),
        "in_chans": train_args.get("in_chans") or (input_size[0] if input_size else None),
        "global_pool": train_args.get("gp"),
        "bn_eps": train_args.get("bn_eps"),
        **(train_args.get("model_kwargs") or {}),
    }
    return used, train_args.get("img_size") or (input_size and list(input_size[1:]))


def check_arguments(architecture: str, stated: Mapping[str, Any], origin: Any) -> None:
    """Raise ValueError if a file states an argument that the architecture cannot take.

    An argument must be one of the architecture's constructor, and its value a plain one. A router
    must be registered.
    """
    base = architecture.partition(".")[0]
    router = stated.get("router")
    if isinstance(router, str) and is_registered_here(base):
        try:
            get_spec(router)
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error
    allowed = architecture_arguments(base)
    for name, value in stated.items():
        if _NO_ARCHITECTURE.fullmatch(name):
            raise ValueError(
                f"{origin} states the argument {shown_name(name)}, as no file may: --model-kwargs "
                f"{shown_name(name)}=None leaves it out."
            )
        if name not in allowed:
            raise ValueError(
                f"{origin} states {shown_name(name)}={shown(value)} for {architecture}, which is "
                "no known argument of its architecture: if another model was named than the "
                "file's, leave --model out; if the argument is right, state it yourself, by "
                f"--model-kwargs {shown_name(name)}=VALUE."
            )
        if not _is_plain(value):
            raise ValueError(
                f"{origin} states {name}={shown(value)}: a file may state only numbers, words and "
                "lists."
            )


def _is_plain(value: Any) -> bool:
    """Tell if a value is a number, a word, or a list of them."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return all(
        is_single(part) and not (isinstance(part, float) and not math.isfinite(part))
        for part in parts
    )


def architecture_arguments(architecture: str) -> frozenset[str]:
    """Return the names of the arguments that describe a registered model.

    They are this package's options and the constructor arguments of the model and config classes
    where its entrypoint is. The class that is built refuses those that it does not take.
    """
    names = _arguments_of_classes(model_entrypoint(architecture)).union(
        moe_options(), _ENTRYPOINT_OPTIONS, _OF_NAFLEX
    )
    return frozenset(name for name in names if not _NO_ARCHITECTURE.fullmatch(name))


@functools.cache
def _arguments_of_classes(entrypoint: Any) -> frozenset[str]:
    names: set[str] = set()
    place: dict[str, Any] | None = getattr(entrypoint, "place", None)
    if place is None:
        place = inspect.unwrap(entrypoint).__globals__
    stock = vars(place["stock_module"]) if "stock_module" in place else {}  # of models/ewa.py
    for known in (*place.values(), *stock.values()):
        if not isinstance(known, type) or not (issubclass(known, nn.Module) or is_dataclass(known)):
            continue
        arguments = constructor_arguments(known)
        is_model = "num_classes" in arguments
        if is_model or is_dataclass(known):  # a dataclass holds the options of a model
            names |= arguments
        if is_dataclass(known):  # MaxxVit takes conv_NAME for the NAME of its conv_cfg
            for part in fields(known):
                if is_dataclass(part.default_factory):
                    prefix = part.name.removesuffix("cfg")
                    names |= {f"{prefix}{option.name}" for option in fields(part.default_factory)}
    return frozenset(names)
