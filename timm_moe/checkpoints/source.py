"""Loading: a file, folder or repository becomes a model in memory."""

import copy
import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor, nn

from ..console import describe
from ..convert.blocks import moe_layers, unwrapped
from ..files import require_file
from ..model_config import (
    check_preprocessing,
    get_pretrained_cfg,
    preprocessing,
    set_pretrained_cfg,
    shown,
    state_preprocessing,
)
from ..models.registered import check_registered, weightless
from ..quick_init import bounded_work, quick_init
from .harmless import HARMLESS
from .stated import (
    SOURCE_PREFIXES,
    Blueprint,
    architecture_arguments,
    args_of_import,
    args_of_train_py,
    check_arguments,
    read_config,
)

_logger = logging.getLogger(__name__)

#: Names of the weights in a folder in timm's layout, in order of preference; the first two are the Hub's.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_WEIGHTS_END = (".safetensors", ".pth", ".bin")
#: Prefixes that other frameworks put before the names of a model's weights.
_WRAPPERS = ("model", "net", "network", "backbone", "module", "timm_model", "_orig_mod")
#: In the names of averaged weights.
_EMA = re.compile(r"(?<![a-zA-Z])ema(?![a-z])|EMA|Ema")
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
        stated = spec.preprocessing
        if not stated:
            return source
        model = copy.copy(unwrapped(source))  # with the same weights and another config
        state_preprocessing(model, stated)
        return model
    name = f"local-dir:{source}" if Path(source).is_dir() else str(source)
    if name.startswith(SOURCE_PREFIXES):
        return _load_folder(name, spec)
    if not Path(name).exists():
        raise FileNotFoundError(
            f"{name} is neither a file nor a folder; a repository on the Hub is written hf-hub:user/name."
        )
    return _load_file(Path(name), spec, use_ema)


def folder_of(source: nn.Module | str | Path) -> Path | None:
    """Return the folder of a source that is a path or ``local-dir:`` name of one; None for other sources."""
    if isinstance(source, nn.Module):
        return None
    path = Path(str(source).removeprefix("local-dir:"))
    return path if path.is_dir() else None


# --- files


def _load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    checkpoint = read_checkpoint(path)
    state_dict = _state_dict(checkpoint, path, use_ema)
    with _train_args_of(path):
        train_args = args_of_train_py(checkpoint) or ({} if spec.name else args_of_import(path))
        input_size = train_args.get("input_size")
        used = {  # by train.py to create the model
            "num_classes": train_args.get("num_classes"),
            "in_chans": train_args.get("in_chans") or (input_size[0] if input_size else None),
            "global_pool": train_args.get("gp"),
            "bn_eps": train_args.get("bn_eps"),
            **(train_args.get("model_kwargs") or {}),
        }
        stated = {name: value for name, value in used.items() if name not in spec.args()}
        image = train_args.get("img_size") or (input_size and list(input_size[1:]))
    name = spec.name or _stated_name(train_args, path)
    blueprint = _blueprint(name, spec)
    check_arguments(blueprint.architecture, stated, path)
    attempts = [{**stated, **spec.args()}]
    if image and "img_size" not in attempts[0] and "img_size" in architecture_arguments(blueprint.architecture):
        check_arguments(blueprint.architecture, {"img_size": image}, path)
        # Newer train.py creates models of a fixed size for their images.
        attempts.insert(0, {**attempts[0], "img_size": image})
    origin = path if stated or len(attempts) > 1 else None
    args, state_dict, missing = _first_fitting(name, blueprint, attempts, state_dict, path, origin)
    with nullcontext() if missing else quick_init():  # a dense checkpoint has no routers: they stay as drawn
        model = _create(blueprint, args)
    model.load_state_dict(state_dict)
    _warn_of_untrained_routers(model, state_dict, path, name)
    is_guess = not train_args and blueprint == Blueprint(name) and "." not in name
    origins = dict.fromkeys(preprocessing(model), _DEFAULT if is_guess else f"the config of {name}")
    with _train_args_of(path):
        origins |= dict.fromkeys(state_preprocessing(model, train_args), "train.py's arguments")
    _prepare(model, spec, origins, str(path), name)
    _keep_args_of_images(model, train_args, path)
    # Class names may belong to the folder or repository that training started from.
    cfg = get_pretrained_cfg(model)
    set_pretrained_cfg(model, {key: cfg[key] for key in cfg if key not in ("label_names", "label_descriptions")})
    return model


def _first_fitting(
    name: str,
    blueprint: Blueprint,
    attempts: list[dict[str, Any]],
    state_dict: dict[str, Tensor],
    path: Path,
    origin: Path | None,
) -> tuple[dict[str, Any], dict[str, Tensor], set[str]]:
    """Find the first arguments that make a model for the weights in a file.

    Args:
        origin: as for :func:`_sketch`.

    Returns:
        The arguments, the weights by the model's names, and the names of those that are missing.

    Raises:
        ValueError: if no arguments do; it tells of the attempt with the fewest problems.
    """
    problems: list[tuple[int, ValueError, Exception]] = []
    for args in attempts:
        try:
            sketch = _sketch(blueprint, args, state_dict, origin)
        except Exception as error:  # arguments may end in anything
            problems.append((1000, _not_created(name, error), error))
            continue
        taken = _unwrapped(state_dict, sketch, path)
        try:
            sketch.load_state_dict({name: tensor.to("meta") for name, tensor in taken.items()})
            return args, taken, sketch.state_dict().keys() - taken.keys()
        except RuntimeError as error:
            text = f"The weights in {path} do not fit {name}: {first_problem(error)}"
            problems.append((str(error).count("\n"), ValueError(text), error))
    _, problem, cause = min(problems, key=lambda found: found[0])
    raise problem from cause


@contextmanager
def _train_args_of(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(f"The model's arguments in {path} are damaged: {describe(error)}") from error


def _stated_name(train_args: dict[str, Any], path: Path) -> str:
    """Return the model that a checkpoint names; it must be one that timm creates without looking elsewhere."""
    name = train_args.get("model")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} does not say which model it belongs to: name it with --model.")
    if name.startswith(SOURCE_PREFIXES) or ":" in name or "/" in name:
        flag = "--model hf-hub:NAME" if name.startswith(("hf-hub:", "hf_hub:")) else "--model local-dir:FOLDER"
        raise ValueError(f"{path} leads to {name[:80]!r}, as no file may: say yourself where it is, with {flag}.")
    return name


def _blueprint(name: str, spec: ModelSpec) -> Blueprint:
    """Describe the model of a name: a registered one, or a folder's or repository's that the user states."""
    if not name.startswith(SOURCE_PREFIXES):
        check_registered(name)
        return Blueprint(name)
    if name.startswith("local-dir:"):
        require_config(_file(name))
    try:
        return read_config(_file(name, "config.json"), overridden=spec.args())
    except Exception as error:
        raise _not_created(name, error) from error


def _warn_of_untrained_routers(model: nn.Module, state_dict: Mapping[str, Tensor], path: Path, name: str) -> None:
    learned = [f"{path}.router." for path, layer in moe_layers(model).items() if layer.router.state_dict()]
    if learned and not any(name.startswith(tuple(learned)) for name in state_dict):
        _logger.warning(f"{path} holds a dense model: the routers of {name} are untrained, its experts made of it.")


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
        raise ValueError(f"{path} holds several models, under {' and '.join(found)}: write the weights of one alone.")
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
        sketch = _sketch(blueprint, spec.args(), state_dict, "config.json")
        taken = _unwrapped(state_dict, sketch, weights)
        for key, tensor in sketch.state_dict().items():
            if key not in taken:
                raise ValueError(f"the weights hold no {key}, which the model has.")
            if taken[key].shape != tensor.shape:  # load_state_dict repeats a dense network's
                sizes = [tuple(shape) for shape in (taken[key].shape, tensor.shape)]
                raise ValueError(f"the weights hold {key} of shape {sizes[0]}, the model one of {sizes[1]}.")
        if len(state_dict) > len(taken):
            raise ValueError("the weights hold more than the model's.")
        with quick_init():
            model = _create(blueprint, spec.args())
        model.load_state_dict(taken)
    except Exception as error:  # a damaged folder may end in anything
        raise _not_created(name, error) from error
    described = blueprint.pretrained_cfg or {}
    origins = {key: "its config.json" if key in described else _DEFAULT for key in preprocessing(model)}
    _prepare(model, spec, origins, name, blueprint.architecture)
    return model


def require_config(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"The folder {folder} has no config.json: name a checkpoint or a file of weights in it instead, and "
            "for weights alone their --model."
        )


def _weights_file(name: str) -> Path:
    if name.startswith("hf-hub:"):
        try:
            return _file(name, _WEIGHTS[0])
        except EntryNotFoundError:
            return _file(name, _WEIGHTS[1])
    folder = _file(name)
    named = [folder / file for file in _WEIGHTS if (folder / file).exists()]
    others = sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS_END)
    if not named and len(others) != 1:
        raise ValueError(f"it has no {_WEIGHTS[0]}.")
    return (named or others)[0]


def _file(name: str, file: str = "") -> Path:
    """Return the path of a file in the folder, or in the repository, from which it is fetched, that the user named."""
    if name.startswith("local-dir:"):
        return Path(name.removeprefix("local-dir:"), file)
    repo_id, _, revision = name.removeprefix("hf-hub:").partition("@")
    return Path(hf_hub_download(repo_id, file, revision=revision or None))


# --- steps of both


def _create(blueprint: Blueprint, args: dict[str, Any]) -> nn.Module:
    given = {option: value for option, value in {**blueprint.args, **args}.items() if value is not None}
    return timm.create_model(blueprint.architecture, pretrained_cfg=blueprint.pretrained_cfg, **given)


def _not_created(name: str, error: Exception) -> ValueError:
    from_files = " from its config.json and weights" if name.startswith(SOURCE_PREFIXES) else ""
    return ValueError(f"{name} cannot be created{from_files}: {first_problem(error)}")


def _prepare(model: nn.Module, spec: ModelSpec, origins: dict[str, str], source: str, architecture: str) -> None:
    """Write the user's preprocessing to the model's config, and log all of it by ``origins``."""
    origins |= dict.fromkeys(state_preprocessing(model, spec.preprocessing), "stated")
    by_origin: dict[str, list[str]] = {}
    for key, value in preprocessing(model).items():
        text = " ".join(map(str, value)) if isinstance(value, tuple) else value
        by_origin.setdefault(origins[key], []).append(f"{key} {text}")
    shown_entries = "; ".join(f"{', '.join(entries)} ({origin})" for origin, entries in by_origin.items())
    _logger.info(f"Images for {source}: {shown_entries}.")
    guessed = [f"--{key.replace('_', '-')}" for key in _GUESSED if origins[key] == _DEFAULT]
    if guessed:
        _logger.warning(
            f"{source} does not say how images were prepared in its training; what timm has for {architecture} is a "
            f"guess: state {', '.join(guessed)}."
        )


def _keep_args_of_images(model: nn.Module, train_args: dict[str, Any], path: Path) -> None:
    """Keep on the model what train.py was told of its images and timm's config has no place for."""
    stated = {name: train_args.get(name) for name in ("input_img_mode", "class_map", "task")}
    kept = {name: value[:200] for name, value in stated.items() if value and isinstance(value, str)}
    model.args_of_images = kept  # type: ignore[assignment]
    mode = kept.get("input_img_mode")
    if mode not in (None, "RGB", "L"):
        _logger.warning(
            f"The images of {path} have the mode {mode!r} (train.py's arguments), which config.json cannot state: "
            "with an exported model, pass --input-img-mode to timm's scripts again."
        )
    if train_args.get("naflex_loader"):
        _logger.warning(f"{path} was trained with --naflex-loader: here its images are cropped to one size instead.")


def _sketch(blueprint: Blueprint, args: dict[str, Any], state_dict: dict[str, Tensor], origin: Any) -> nn.Module:
    """Create a model on the meta device, where it takes no memory; raise ValueError if it is too large for its weights.

    Args:
        origin: file that states some of the arguments; None if all are the user's, which may be anything.
    """
    storages = [tensor.untyped_storage() for tensor in state_dict.values()]  # one may be that of several tensors
    size = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    for name, value in {**blueprint.args, **args}.items() if origin else ():
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(number, (int, float)) and number > size:
                raise ValueError(f"{origin} states {name}={number:g}, too much for weights of {size:,} bytes.")
    with weightless(), bounded_work(20_000 + 40 * len(state_dict)) if origin else nullcontext():
        model = _create(blueprint, args)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if origin and needed > 64 * size + 2**28:  # a dense network may become many experts
        raise ValueError(f"{origin} states sizes of a model of {needed:,} bytes, but its weights have {size:,}.")
    return model


def first_problem(error: Exception) -> str:
    """Return the first problem that a load_state_dict lists, or the error itself."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1][:300] if len(lines) > 1 and lines[0].startswith("Error(s) in loading") else describe(error)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the dictionary in a checkpoint file; ValueError if it is damaged, is no checkpoint, or needs code."""
    require_file(path)
    if path.suffix == ".safetensors" and zipfile.is_zipfile(path):
        raise ValueError(f"{path} was written by torch.save and is no safetensors file: rename it to end in .pth.")
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        is_zip = zipfile.is_zipfile(path)
        flipped = _flipped_record(path) if is_zip else None
        with torch.serialization.safe_globals(HARMLESS):
            # Mapped, so that the optimizer's state takes no memory.
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a file that is no checkpoint may end in anything
        if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
            raise
        needed = _globals_needed(path) if isinstance(error, pickle.UnpicklingError) else []
        if needed:
            raise ValueError(
                f"{path} runs code when it is read ({', '.join(needed)}), which is refused: write its weights to "
                "a file of their own, by torch.save(model.state_dict(), file)."
            ) from error
        raise ValueError(f"{path} is damaged or not a checkpoint.") from error
    if flipped is not None:
        raise ValueError(f"{path} is damaged: {flipped} in it does not match its checksum.")
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint.")
    return checkpoint


def _flipped_record(path: Path) -> str | None:
    """Return a record of a zip file that does not match its checksum, which torch.load ignores."""
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        if any(record.file_size > record.compress_size for record in records):
            raise ValueError("A compressed record may be of any size in memory; torch.save writes none.")
        is_checked = any(record.CRC for record in records)  # all are 0 if torch.save was to write none
        return archive.testzip() if is_checked else None


def _globals_needed(path: Path) -> list[str]:
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged pickle may raise anything
        return []
    return [name for name in needed if name not in dict(HARMLESS).values()]


def _state_dict(checkpoint: dict[str, Any], path: Path, use_ema: bool) -> dict[str, Tensor]:
    state_dict = checkpoint.get("state_dict", checkpoint.get("model", checkpoint))
    if use_ema:
        state_dict = _ema_weights(checkpoint, state_dict, path)
    if not isinstance(state_dict, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        for name, value in state_dict.items()
    ):
        raise ValueError(f"{path} has no state dict of tensors.")
    return clean_state_dict(state_dict)


def _ema_weights(checkpoint: dict[str, Any], plain: Any, path: Path) -> Any:
    """Return the averaged weights of a checkpoint: of train.py, of Lightning, or the only ones with "ema" in a name."""
    if "state_dict_ema" in checkpoint:
        return checkpoint["state_dict_ema"]
    if "averaging_state" in checkpoint:  # Lightning's WeightAveraging puts them in the place of the others
        return plain
    seen, found = set(), {}
    trees: list[tuple[str, Any]] = [("", checkpoint)]
    for name, tree in trees:  # which grows
        if not isinstance(tree, dict) or id(tree) in seen or name.count(".") > 3:
            continue
        seen.add(id(tree))
        if _EMA.search(name) and tree and all(isinstance(value, Tensor) for value in tree.values()):
            found[name] = tree
        else:
            trees += [(f"{name}.{key}".strip("."), value) for key, value in tree.items() if isinstance(key, str)]
    plain = {name: value for name, value in plain.items() if isinstance(name, str)} if isinstance(plain, dict) else {}
    for part in filter(_EMA.search, {name.partition(".")[0] for name in plain}):  # of the module that was trained
        found[part] = {name.removeprefix(f"{part}."): plain[name] for name in plain if name.startswith(f"{part}.")}
    if len(found) != 1:
        names = ", ".join(shown(name)[1:-1] for name in [*(found or checkpoint)][:20] if isinstance(name, str))
        raise ValueError(
            f"{path} has {'several' if found else 'no'} EMA weights that are known, but {names}: write the weights to "
            "take to a file of their own. (train.py writes state_dict_ema with --model-ema.)"
        )
    (weights,) = found.values()
    held = [name for name in weights if name.startswith("module.")]  # an AveragedModel counts its updates, too
    return {name: weights[name] for name in held or weights}
