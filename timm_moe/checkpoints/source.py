"""Load: a file, folder or repository becomes a model in memory.

The four steps are to read the file (``reading``, ``layouts``), to describe its model (``stated``),
to build it, first without memory for its weights to compare those of the file, and to load them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path, PureWindowsPath
from typing import Any

import timm
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor, nn

from ..console import describe, shortened, shown_name
from ..convert.check import computed_by, computing_hook
from ..convert.dense import require_weights
from ..convert.expert_layers import moe_layers
from ..convert.registry import router_options
from ..convert.wrappers import copied, unwrapped
from ..files import local_path
from ..model_config import (
    change_pretrained_cfg,
    check_preprocessing,
    drop_tests_of_timm,
    get_pretrained_cfg,
    is_of_timm,
    model_input_size,
    preprocessing,
    state_preprocessing,
    timm_model_in,
)
from ..models.registered import check_registered, weightless
from ..outputs import outputs
from ..quick_init import quick_init
from .description import (
    SOURCE_PREFIXES,
    Blueprint,
    architecture_arguments,
    are_whole,
    args_of_import,
    args_of_trainer,
    check_arguments,
    model_arguments,
    read_config,
)
from .layouts import holds_ema, require_kinds, weights_in, without_wrapper
from .reading import read_checkpoint, require_intact

_logger = logging.getLogger(__name__)

#: Names of the weights in a folder in timm's layout, in order of preference. The first two are
#: those on the Hub.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_WEIGHTS_END = (".safetensors", ".pth", ".bin")
_DEFAULT = "timm's default"
#: Readers of timm's --dataset that number the classes themselves.
_OTHER_READERS = ("torch", "hfds", "hfids", "tfds", "wds")
#: Preprocessing that is asked of the user where the file does not state it.
_GUESSED = ("mean", "std", "crop_pct", "interpolation")


@dataclass(frozen=True)
class ModelSpec:
    """The user's statements about a model; they override the file's.

    Attributes:
        name: registered model name, or ``local-dir:`` or ``hf-hub:`` name of a folder whose
            config.json describes the model; for files that hold only weights, or were trained from
            such a folder.
        num_classes: size of the classifier.
        kwargs: further arguments of ``timm.create_model``, as in timm's ``--model-kwargs``.
        preprocessing: of the images, under timm's names: ``img_size`` in pixels, ``mean`` and
            ``std`` of pixels from 0 to 1, ``crop_pct`` as a share of the resized image's side,
            ``crop_mode``, ``interpolation``.

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
        return {
            **({} if self.num_classes is None else {"num_classes": self.num_classes}),
            **self.kwargs,
        }


@dataclass(frozen=True)
class Origin:
    """Source of loaded weights, and what their file says of the training.

    A loaded model has it as ``origin``.
    """

    place: str  #: path of the file or folder, or ``hf-hub:`` name
    folder: Path | None = None  #: the folder, if it is one
    #: train.py's arguments; empty if it did not write the file
    train_args: dict[str, Any] = field(default_factory=dict)
    epoch: Any = None
    metric: Any = None  #: that train.py measured at this epoch
    ema: bool = False  #: whether these are the EMA weights
    recorded: Any = None  #: what an export has written of the training to the folder's config.json

    @property
    def is_file(self) -> bool:
        """Tell if the weights are from a file.

        The model's config is then that of other weights of timm, or missing.
        """
        return self.folder is None and not self.place.startswith("hf-hub:")


def load_source(
    source: nn.Module | str | Path, spec: ModelSpec | None = None, use_ema: bool = False
) -> nn.Module:
    """Load the model of a source, with the preprocessing of its training in its config.

    The weights must match the model exactly, with no tensor missing or left over; only a dense
    network's weights may become every expert's, which is logged. A file's statements never lead to
    another file or to a request, see :mod:`timm_moe.checkpoints.description`.

    Args:
        source: a model; a train.py checkpoint or a safetensors file; a folder with config.json and
            weights, as path or ``local-dir:`` name; or an ``hf-hub:`` name.
        spec: the user's statements about it.
        use_ema: take the EMA weights of a train.py checkpoint; ignored, with a warning, for other
            sources.

    Returns:
        Of a model, the model itself, or its :func:`own_copy` if a preprocessing is stated. Of
        another source, a new model with its :class:`Origin` as ``origin``.

    Raises:
        FileNotFoundError: if the source does not exist.
        ValueError: if the file is damaged, runs code when it is read, does not name its model,
            states more than it may, lacks the requested EMA weights, or does not fit its model; or
            if the model cannot take images as stated.
    """
    spec = spec or ModelSpec()
    if use_ema and (isinstance(source, nn.Module) or not local_path(source).is_file()):
        is_model = isinstance(source, nn.Module)
        _warn_of_one_kind(f"This {type(source).__name__}" if is_model else str(source))
    if isinstance(source, nn.Module):
        if spec.preprocessing:
            return own_copy(source, spec)
        if is_of_timm(unwrapped(source)):
            _log_images_of(unwrapped(source))
        return source

    path = folder_of(source)
    name = str(source) if path is None else f"local-dir:{path}"
    if name.startswith(SOURCE_PREFIXES):
        return load_folder(name, spec)
    file = local_path(name)
    if not file.exists():
        raise FileNotFoundError(
            f"{name} is neither a file nor a folder; a repository on the Hub is written "
            "hf-hub:user/name."
        )
    return _load_file(file, spec, use_ema)


def folder_of(source: nn.Module | str | Path) -> Path | None:
    """Return the folder of a source that is one; None for other sources.

    The source may be the folder's path or its ``local-dir:`` name.
    """
    if isinstance(source, nn.Module):
        return None
    path = local_path(source)
    return path if path.is_dir() else None


def own_copy(model: nn.Module, spec: ModelSpec | None = None, use_ema: bool = False) -> nn.Module:
    """Copy a model in memory without its wrappers; the copy shares its tensors.

    The copy has no ``origin``: of its training nothing is known.

    Args:
        model: a model of any library. Of transformers' wrappers of timm models the inner model is
            taken.
        spec: the user's statements about the model.
        use_ema: has no effect but a warning.

    Raises:
        ValueError: if its weights are not all here, or something is stated that only models of timm
            have.
    """
    model = unwrapped(model)
    require_weights(model)
    _require_stored(model)
    # The copy shares the tensors.
    model = copied(model, {id(own): own for own in (*model.parameters(), *model.buffers())})
    model = timm_model_in(model)
    vars(model).pop("origin", None)
    if not is_of_timm(model) and (use_ema or spec not in (None, ModelSpec())):
        name = "use_ema" if use_ema else "spec"
        raise ValueError(
            f"{name} has no meaning for this {type(model).__name__}, which timm did not make."
        )
    if use_ema:
        _warn_of_one_kind(f"This {type(model).__name__}")
    if is_of_timm(model):
        drop_tests_of_timm(model)
        _log_images_of(model, state_preprocessing(model, spec.preprocessing) if spec else ())
    return model


def _require_stored(model: nn.Module) -> None:
    """Require weights that are tensors, and not computed at each forward.

    Raises:
        ValueError: if the model is quantized, or a hook computes weights, as of pruning.
    """
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__} and no tensor, for example after "
                "quantization: export before that, and quantize the model that timm loads."
            )
    for name, module in model.named_modules():
        found = computed_by(module)
        # Modules that timm did not make are stored with what their weights are computed from. But
        # what was computed with a graph cannot be copied.
        if found and computing_hook(module) and (is_of_timm(model) or _has_graph(module)):
            what, remedy = found
            raise ValueError(f"{name} {what}: {remedy} first.")


def _has_graph(module: nn.Module) -> bool:
    """Tell if a module holds a tensor that was computed with gradients."""
    tensors = (value for value in vars(module).values() if isinstance(value, Tensor))
    return any(tensor.grad_fn is not None for tensor in tensors)


def _log_images_of(model: nn.Module, stated: Iterable[str] = ()) -> None:
    """Log the preprocessing of a timm model in memory.

    Args:
        model: without wrappers.
        stated: entries that the user states.
    """
    origins = dict.fromkeys(preprocessing(model), "its pretrained_cfg")
    _log_images(
        model, f"this {type(model).__name__}", {**origins, **dict.fromkeys(stated, "stated")}
    )


def _warn_of_one_kind(name: str) -> None:
    _logger.warning(
        f"{name} has one kind of weights, which are taken: EMA weights are in train.py's "
        "checkpoints."
    )


# --- files


def _load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    checkpoint = read_checkpoint(path)
    weights = weights_in(checkpoint, path, use_ema)
    if not use_ema and holds_ema(checkpoint):
        _logger.info(
            "%s holds EMA weights too, of which train.py's accuracies are: --use-ema "
            "(use_ema=True) takes them.",
            path,
        )
    with _refusing_damaged_arguments(path):
        train_args = args_of_trainer(checkpoint)
        is_of_train_py = are_whole(train_args)
        if not train_args and spec.name is None:
            train_args = args_of_import(path)
    name = _name_of(spec, train_args, path)
    candidates = _candidates(name, train_args, spec, path)
    first, *others = _fitting(name, candidates, weights, path)
    # A dense checkpoint has no routers: they stay as drawn, with a warning.
    model = _loaded(first, path)
    for other in others:
        _require_one_size(model, first.blueprint, other.blueprint, name, path)
    weights = first.weights
    _tell_of_guesses(model, name, train_args, spec, weights, path)
    _state_images(model, name, train_args, spec, path, is_of_train_py)
    # Class names may be those of the weights that training started from.
    change_pretrained_cfg(model, label_names=None, label_descriptions=None)
    model.origin = Origin(  # type: ignore[assignment]
        str(path),
        train_args=train_args if is_of_train_py else {},
        epoch=checkpoint.get("epoch"),
        metric=checkpoint.get("metric"),
        ema=use_ema,
    )
    return model


def _tell_of_guesses(
    model: nn.Module,
    name: str,
    train_args: Mapping[str, Any],
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Log what the weights do not show of their model: its name, its routers, its experts."""
    stated = train_args.get("model")
    if isinstance(stated, str) and not stated.startswith(SOURCE_PREFIXES):
        agrees = stated == name
        if name.startswith(SOURCE_PREFIXES):  # The config.json of a folder names no tag.
            agrees = stated.partition(".")[0] == get_pretrained_cfg(model).get("architecture")
        if not agrees:
            _logger.warning("%s says that its model is %s; %s is taken.", path, stated, name)

    own = dict(model.named_parameters())
    is_dense = any(own[name].ndim > weights[name].ndim for name in own.keys() & weights)
    routed = [layer.router for layer in moe_layers(model).values() if not layer.deploys_dense]
    knows_options = are_whole(train_args) or router_options() & spec.kwargs.keys()
    if routed and not is_dense and not knows_options:
        router = routed[0]
        _logger.warning(
            f"{path} does not say how its routers choose, which its weights do not show: the "
            f"defaults of {name} are taken, {type(router).__name__}({router.extra_repr()}); "
            "--model-kwargs states others."
        )
    if is_dense and not routed:
        _logger.info("%s holds a dense model, so that all experts are copies.", path)


def _state_evaluation(model: nn.Module) -> None:
    """Write to the model's config how train.py evaluates, whatever the config of its weights says.

    train.py crops the centre, at the size of the training.
    """
    of_test = {key: None for key in get_pretrained_cfg(model) if key.startswith("test_")}
    change_pretrained_cfg(model, **of_test, crop_mode="center")


def _state_images(
    model: nn.Module,
    name: str,
    train_args: dict[str, Any],
    spec: ModelSpec,
    path: Path,
    is_of_train_py: bool,
) -> None:
    """Write to the model's config how its trainer prepared images, and what the user states."""
    # A name with a tag says by which weights, and so by which preprocessing, training began.
    is_named = name.startswith(SOURCE_PREFIXES) or "." in name
    is_guess = not is_named and not are_whole(train_args)
    origins = dict.fromkeys(preprocessing(model), _DEFAULT if is_guess else f"the config of {name}")
    if is_of_train_py:
        _state_evaluation(model)
        origins["crop_mode"] = "as train.py evaluates"
    try:
        stated = state_preprocessing(model, _without_stated(train_args, spec))
    except ValueError as error:
        raise ValueError(f"The trainer's arguments in {path} do not fit: {error}") from error
    except Exception as error:
        raise _damaged_arguments(path, error) from error
    origins |= dict.fromkeys(stated, "its trainer's arguments")
    _prepare(model, spec, origins, str(path), name)
    _keep_args_of_images(model, train_args, path)


def _without_stated(train_args: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a trainer's arguments without the preprocessing that the user states."""
    stated = {*spec.preprocessing}
    if "img_size" in stated:
        stated.add("input_size")
    return {name: value for name, value in train_args.items() if name not in stated}


def _candidates(
    name: str, train_args: Mapping[str, Any], spec: ModelSpec, path: Path
) -> dict[str, Blueprint]:
    """List the models that train.py may have made of its arguments, the likeliest first.

    ``--img-size`` is the size of the images, and the model's only where its class has such an
    argument. The keys say in messages which size a model has, if there are two.
    """
    blueprint = _blueprint(name, spec)
    with _refusing_damaged_arguments(path):
        used, image = model_arguments(train_args)
        stated = {option: value for option, value in used.items() if option not in spec.args()}
    check_arguments(blueprint.architecture, stated, path)
    plain = {**blueprint.args, **stated, **spec.args()}
    of_own_size = replace(blueprint, args=plain)

    is_size_open = "img_size" not in {**stated, **spec.args()}
    takes_size = "img_size" in architecture_arguments(blueprint.architecture)
    if not (image and is_size_open and takes_size):
        return {"": of_own_size}
    check_arguments(blueprint.architecture, {"img_size": image}, path)
    of_image_size = replace(blueprint, args={**plain, "img_size": image})
    return {f"with img_size={image}": of_image_size, "with its own image size": of_own_size}


@dataclass(frozen=True)
class _Fit:
    """A model that weights fit."""

    blueprint: Blueprint
    weights: dict[str, Tensor]  # by the model's names
    missing: set[str]  # names of those that the file lacks: of routers, beside a dense network's


def _fitting(
    name: str, candidates: dict[str, Blueprint], weights: dict[str, Tensor], path: Path
) -> list[_Fit]:
    """Find the candidates that fit weights.

    Raises:
        ValueError: if none does; it tells of each what was tried.
    """
    problems: dict[str, str] = {}
    found = []
    for described, blueprint in candidates.items():
        try:
            found.append(_fitted(name, blueprint, weights, path))
        except ValueError as error:
            problems[described] = str(error)
            last = error
    if found:
        return found

    if len(set(problems.values())) == 1:
        told = next(iter(problems.values()))
    else:
        told = "; ".join(
            f"{described}: {shortened(problem, 200)}" for described, problem in problems.items()
        )
    raise ValueError(f"The weights in {path} do not fit {name}: {told}") from last


def _require_one_size(
    model: nn.Module, blueprint: Blueprint, other: Blueprint, name: str, path: Path
) -> None:
    """Refuse to choose between two models of one file that give different outputs.

    Some weights fit a model of any image size, which changes the windows of a MaxViT, for example.

    Args:
        model: built for the size of the training's images, with the file's weights.
        blueprint: of this model, which states that size: (height, width) or an int.
        other: of a model of its own size.
        name: of the models.
        path: of the file.

    Raises:
        ValueError: if both compute, and differ.
    """
    size = blueprint.args["img_size"]
    height, width = (size, size) if isinstance(size, int) else size
    channels, own = model_input_size(model)[0], get_pretrained_cfg(model)["input_size"][1]
    if height == width == own:
        return
    of_own_size = _create(other)
    of_own_size.load_state_dict(model.state_dict())
    generator = torch.Generator("cpu").manual_seed(0)
    image = torch.rand(1, channels, height, width, generator=generator, device="cpu")
    try:
        expected, found = outputs(model, image), outputs(of_own_size, image)
    except (AssertionError, RuntimeError, ValueError):
        return  # One takes no images of this size.
    finally:
        model.train()
    if not expected.isfinite().all():  # This is told where the outputs are used.
        return
    if not torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
        raise ValueError(
            f"{path} fits {name} of two image sizes, which give different outputs: state the one "
            f"that was trained, by --model-kwargs img_size={height} or img_size={own} (with "
            f"--img-size {own}, if that model takes no other)."
        )


@contextmanager
def _refusing_damaged_arguments(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _damaged_arguments(path, error) from error


def _damaged_arguments(path: Path, error: Exception) -> ValueError:
    return ValueError(f"The model's arguments in {path} are damaged: {describe(error)}")


def _name_of(spec: ModelSpec, train_args: dict[str, Any], path: Path) -> str:
    """Return the name of a file's model: the user's, with the file's tag if it has none."""
    stated = train_args.get("model")
    if isinstance(stated, str) and stated.partition(".")[0] == spec.name:
        return stated
    return spec.name or _stated_name(train_args, path)


def _stated_name(train_args: dict[str, Any], path: Path) -> str:
    """Return the model that a checkpoint names.

    It must be a name that timm creates without looking elsewhere.
    """
    name = train_args.get("model")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{path} does not say which model it belongs to: name it with --model.")
    if name.startswith(SOURCE_PREFIXES) or ":" in name or "/" in name:
        flag = (
            "--model hf-hub:NAME"
            if name.startswith(("hf-hub:", "hf_hub:"))
            else "--model local-dir:FOLDER"
        )
        raise ValueError(
            f"{path} leads to {name[:80]!r}, as no file may: say yourself where it is, with {flag}."
        )
    return name


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


def stated_task(model: nn.Module) -> str | None:
    """Return the task of a model's training, if train.py was told one, as ``"multilabel"``."""
    args: dict[str, str] = getattr(model, "args_of_images", {})
    return _recorded(model, "task") or args.get("task")


def _recorded(model: nn.Module, entry: str) -> str | None:
    """Return a text that an exported folder records of its model's training; None without one."""
    origin = getattr(model, "origin", None)
    recorded = origin.recorded if isinstance(origin, Origin) else None
    text = recorded.get(entry) if isinstance(recorded, dict) else None
    return text if isinstance(text, str) else None


def _keep_args_of_images(model: nn.Module, train_args: dict[str, Any], path: Path) -> None:
    """Keep on the model what its trainer was told of images and timm's config has no place for."""
    names = ("input_img_mode", "class_map", "task", "dataset")
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
    if train_args.get("bce_loss"):
        kept["loss"] = "bce"
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


# --- folders and repositories


def load_folder(name: str, spec: ModelSpec, called: str | None = None) -> nn.Module:
    """Load a folder or a repository, as :func:`load_source` does.

    Args:
        name: ``local-dir:`` or ``hf-hub:`` name.
        spec: the user's statements about the model.
        called: what the log calls it, by default its path or ``hf-hub:`` name.
    """
    place = name.removeprefix("local-dir:")
    blueprint = _blueprint(name, spec)
    blueprint = replace(blueprint, args={**blueprint.args, **spec.args()})
    try:
        path = _weights_file(name)
        held = weights_in(read_checkpoint(path), path, use_ema=False)
        fit = _fitted(name, blueprint, held, path, is_strict=True)
        taken = {id(tensor) for tensor in fit.weights.values()}
        if others := [key for key, tensor in held.items() if id(tensor) not in taken]:
            raise ValueError(
                f"the file holds {shown_name(others[0])} too, which is no weight of the model: "
                "write model.state_dict() alone."
            )
        model = _loaded(fit, path)
    except Exception as error:  # a damaged folder may end in anything
        raise _not_created(name, error) from error

    described = blueprint.pretrained_cfg or {}
    origins = {
        key: "its config.json" if key in described else _DEFAULT for key in preprocessing(model)
    }
    _prepare(model, spec, origins, called or place, blueprint.architecture)
    model.origin = Origin(  # type: ignore[assignment]
        place, folder_of(name), recorded=blueprint.recorded
    )
    return model


def require_config(folder: Path) -> None:
    """Raise FileNotFoundError unless a folder has a config.json."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    if not (folder / "config.json").exists():
        last = folder / "last.pth.tar"
        file = f", such as {last}," if last.exists() else ""
        raise FileNotFoundError(
            f"The folder {folder} has no config.json: name a checkpoint or a file of weights in "
            f"it{file} instead, and for weights alone their --model."
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
    if not named and any(folder.glob("*.index.json")):
        raise ValueError("its weights are in several files: save them again as one file.")
    if not named and len(others) != 1:
        raise ValueError(f"it has no {_WEIGHTS[0]}.")
    return (named or others)[0]


def _file(name: str, file: str = "") -> Path:
    """Return the path of a file in the folder or repository that the user named.

    A repository's file is fetched.
    """
    if name.startswith("local-dir:"):
        return local_path(name) / file
    repo_id, _, revision = name.removeprefix("hf-hub:").partition("@")
    return Path(hf_hub_download(repo_id, file, revision=revision or None))


# --- steps of both


def _blueprint(name: str, spec: ModelSpec) -> Blueprint:
    """Describe the model of a name that the user states.

    It is the name of a registered model, a folder or a repository.
    """
    if not name.startswith(SOURCE_PREFIXES):
        check_registered(name)
        return Blueprint(name)
    if name.startswith("local-dir:"):
        require_config(_file(name))
    try:
        return read_config(_file(name, "config.json"), overridden=spec.args())
    except Exception as error:
        raise _not_created(name, error) from error


def _create(blueprint: Blueprint) -> nn.Module:
    args = {option: value for option, value in blueprint.args.items() if value is not None}
    return timm.create_model(
        blueprint.architecture, pretrained_cfg=blueprint.pretrained_cfg, **args
    )


def _fitted(
    name: str, blueprint: Blueprint, weights: dict[str, Tensor], path: Path, is_strict: bool = False
) -> _Fit:
    """Compare weights with a model that is built without memory for its own.

    Args:
        name: of the model, for messages.
        blueprint: of the model.
        weights: by their names in the file.
        path: of the file, for messages.
        is_strict: refuse a dense network's weights for the experts.

    Returns:
        What fits. Only routers may be missing: for a dense network's weights ``MoeMlp`` and the
        hooks of ``convert/hooks.py`` complete the state dict.

    Raises:
        ValueError: if the model cannot be created, or the weights have other names or shapes than
            the model's, are of another kind, or of some layers only.
    """
    try:
        with weightless():
            sketch = _create(blueprint)
    except Exception as error:  # arguments may end in anything
        raise _not_created(name, error) from error

    expected = sketch.state_dict()
    taken = without_wrapper(weights, expected, path)
    try:
        sketch.load_state_dict({key: tensor.to("meta") for key, tensor in taken.items()})
    except (RuntimeError, ValueError) as error:
        raise ValueError(first_problem(error)) from error
    require_kinds(taken, expected, path)
    if is_strict:
        _require_shapes(taken, expected)
    return _Fit(blueprint, taken, expected.keys() - taken.keys())


def _require_shapes(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless weights have the shapes of a model's, also those of the experts."""
    for key in weights.keys() & expected.keys():
        held, wanted = tuple(weights[key].shape), tuple(expected[key].shape)
        if held != wanted:
            raise ValueError(f"the weights hold {key} of shape {held}, the model one of {wanted}.")


def _loaded(fit: _Fit, path: Path) -> nn.Module:
    """Create a model and load weights that fit it; those that they lack are drawn.

    The model is not the one that was compared: buffers that no file holds have their values from
    the constructor.
    """
    require_intact(path, fit.weights)
    with nullcontext() if fit.missing else quick_init():
        model = _create(fit.blueprint)
    model.load_state_dict(fit.weights)
    return model


def _not_created(name: str, error: Exception) -> ValueError:
    from_files = " from its config.json and weights" if name.startswith(SOURCE_PREFIXES) else ""
    return ValueError(f"{name} cannot be created{from_files}: {first_problem(error)}")


def first_problem(error: Exception) -> str:
    """Return the first problem of each kind that a load_state_dict lists, or the error itself."""
    heading, *lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    if not (lines and heading.startswith("Error(s) in loading")):
        return describe(error)
    of_kind: dict[str, list[str]] = {}  # missing, unexpected, of another size
    for line in lines:
        of_kind.setdefault(line.split()[0], []).append(shortened(line, 200))
    return " ".join(
        first if not others else f"{first} (and {len(others)} more)"
        for first, *others in of_kind.values()
    )


def _prepare(
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
    guessed = [f"--{key.replace('_', '-')}" for key in _GUESSED if origins[key] == _DEFAULT]
    if guessed:
        _logger.warning(
            f"{source} does not say how images were prepared in its training; what timm has for "
            f"{architecture} is a guess: state {', '.join(guessed)}."
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
