"""A folder, or a repository on the Hub, with config.json and weights becomes a model."""

import logging
from dataclasses import replace
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from ..console import shown_name
from ..files import local_path
from ..model_config import preprocessing
from ..models.registered import check_registered
from .building import first_problem, fitted, loaded
from .description import SOURCE_PREFIXES, Blueprint, read_config
from .image_settings import DEFAULT, prepare
from .layouts import weights_in
from .model_spec import ModelSpec, Origin
from .reading import read_checkpoint

_logger = logging.getLogger(__name__)

#: Names of the weights in a folder in timm's layout, in order of preference. The first two are
#: those on the Hub.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")
_WEIGHTS_END = (".safetensors", ".pth", ".bin")


def load_folder(name: str, spec: ModelSpec) -> nn.Module:
    """Load a folder or a repository, as :func:`load_source` does.

    Args:
        name: ``local-dir:`` or ``hf-hub:`` name.
        spec: the user's statements about the model.
    """
    place = name.removeprefix("local-dir:")
    blueprint = blueprint_of(name, spec)
    _tell_of_other_name(place, blueprint.architecture, spec)
    blueprint = replace(blueprint, args={**blueprint.args, **spec.args()})
    try:
        path = _weights_file(name)
        held = weights_in(read_checkpoint(path), path, use_ema=False)
        fit = fitted(blueprint, held, path)
        if fit.dense:
            raise ValueError(
                f"{min(fit.dense)} is of a dense model, where its config.json states experts."
            )
        taken = {id(tensor) for tensor in fit.weights.values()}
        if others := [key for key, tensor in held.items() if id(tensor) not in taken]:
            raise ValueError(
                f"the file holds {shown_name(others[0])} too, which is no weight of the model: "
                "write model.state_dict() alone."
            )
        model = loaded(fit, path)
    except Exception as error:  # a damaged folder may end in anything
        raise _not_created(name, error) from error

    described = blueprint.pretrained_cfg or {}
    origins = {
        key: "its config.json" if key in described else DEFAULT for key in preprocessing(model)
    }
    prepare(model, spec, origins, place, blueprint.architecture)
    model.problem_type = blueprint.problem_type  # type: ignore[assignment]
    model.origin = Origin(  # type: ignore[assignment]
        place, folder_of(name), recorded=blueprint.recorded
    )
    return model


def _tell_of_other_name(place: str, architecture: str, spec: ModelSpec) -> None:
    """Warn if the user states another model than a folder does, which names its model itself."""
    stated = spec.name or architecture
    is_name = not stated.startswith(SOURCE_PREFIXES)
    if is_name and stated.partition(".")[0] != architecture.partition(".")[0]:
        _logger.warning(
            "%s says that its model is %s, which is taken; --model %s is for files.",
            place,
            architecture,
            stated,
        )


def folder_of(source: nn.Module | str | Path) -> Path | None:
    """Return the folder of a source that is one; None for other sources.

    The source may be the folder's path or its ``local-dir:`` name.
    """
    if isinstance(source, nn.Module):
        return None
    path = local_path(source)
    return path if path.is_dir() else None


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


def blueprint_of(name: str, spec: ModelSpec) -> Blueprint:
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


def _not_created(name: str, error: Exception) -> ValueError:
    """Return the error of a model that cannot be made, for the first problem of another error."""
    return ValueError(
        f"{name} cannot be created from its config.json and weights: {first_problem(error)}"
    )
