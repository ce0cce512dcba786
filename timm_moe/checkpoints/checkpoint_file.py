"""A file of weights, such as train.py's checkpoint, becomes the model that was trained."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..console import describe, shortened
from ..convert.expert_layers import moe_layers
from ..convert.registry import router_options
from ..model_config import (
    change_pretrained_cfg,
    get_pretrained_cfg,
    model_input_size,
    preprocessing,
    state_preprocessing,
)
from ..outputs import outputs
from .building import Fit, create, fitted, loaded
from .description import (
    SOURCE_PREFIXES,
    Blueprint,
    architecture_arguments,
    are_whole,
    args_of_trainer,
    check_arguments,
    measures_ema,
    model_arguments,
)
from .image_settings import DEFAULT, keep_args_of_images, prepare
from .layouts import holds_ema, weights_in
from .model_folder import blueprint_of
from .model_spec import ModelSpec, Origin
from .reading import read_checkpoint

_logger = logging.getLogger(__name__)


def load_file(path: Path, spec: ModelSpec, use_ema: bool) -> nn.Module:
    """Load a file, as :func:`timm_moe.checkpoints.source.load_source` does."""
    checkpoint = read_checkpoint(path)
    weights = weights_in(checkpoint, path, use_ema)
    with _refusing_damaged_arguments(path):
        train_args = args_of_trainer(checkpoint)
        is_of_train_py = are_whole(train_args)
    if not use_ema and holds_ema(checkpoint):
        measured = ", of which train.py's accuracies are" if measures_ema(train_args) else ""
        _logger.info(
            f"{path} holds EMA weights too{measured}: --use-ema (use_ema=True) takes them."
        )
    name = _name_of(spec, train_args, path)
    candidates = _candidates(name, train_args, spec, path)
    first, *others = _fitting(name, candidates, weights, path)
    # A dense checkpoint has no routers: they stay as drawn, with a warning.
    model = loaded(first, path)
    for other in others:
        _require_one_size(model, first.blueprint, other.blueprint, name, path)
    is_dense = bool(first.dense)
    _tell_of_guesses(model, name, train_args, spec, is_dense, path)
    _state_images(model, name, train_args, spec, path, is_of_train_py)
    # Class names may be those of the weights that training started from.
    change_pretrained_cfg(model, label_names=None, label_descriptions=None)
    model.origin = Origin(  # type: ignore[assignment]
        str(path),
        train_args=train_args if is_of_train_py else {},
        epoch=checkpoint.get("epoch"),
        metric=checkpoint.get("metric"),
        ema=use_ema,
        upcycled=is_dense,
    )
    return model


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


def _candidates(
    name: str, train_args: Mapping[str, Any], spec: ModelSpec, path: Path
) -> dict[str, Blueprint]:
    """List the models that train.py may have made of its arguments, the likeliest first.

    ``--img-size`` is the size of the images, and the model's only where its class has such an
    argument. The keys say in messages which size a model has, if there are two.
    """
    blueprint = blueprint_of(name, spec)
    with _refusing_damaged_arguments(path):
        used, image = model_arguments(train_args)
        # What train.py was not told comes from the name or the folder of the model.
        stated = {
            option: value
            for option, value in used.items()
            if value is not None and option not in spec.args()
        }
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


def _fitting(
    name: str, candidates: dict[str, Blueprint], weights: dict[str, Tensor], path: Path
) -> list[Fit]:
    """Find the candidates that fit weights.

    Raises:
        ValueError: if none does; it tells of each what was tried.
    """
    problems: dict[str, str] = {}
    found = []
    for described, blueprint in candidates.items():
        try:
            found.append(fitted(blueprint, weights, path))
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
    of_own_size = create(other)
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


def _tell_of_guesses(
    model: nn.Module,
    name: str,
    train_args: Mapping[str, Any],
    spec: ModelSpec,
    is_dense: bool,
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
        _logger.info("%s holds a dense model, of whose networks all experts are made.", path)


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
    is_guess = not is_named and not is_of_train_py
    origins = dict.fromkeys(preprocessing(model), DEFAULT if is_guess else f"the config of {name}")
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
    prepare(model, spec, origins, str(path), name)
    keep_args_of_images(model, train_args, path)


def _state_evaluation(model: nn.Module) -> None:
    """Write to the model's config how train.py evaluates, whatever the config of its weights says.

    train.py crops the centre, at the size of the training.
    """
    of_test = {key: None for key in get_pretrained_cfg(model) if key.startswith("test_")}
    change_pretrained_cfg(model, **of_test, crop_mode="center")


def _without_stated(train_args: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return a trainer's arguments without the preprocessing that the user states."""
    stated = {*spec.preprocessing}
    if "img_size" in stated:
        stated.add("input_size")
    return {name: value for name, value in train_args.items() if name not in stated}
