"""After training: the dense model as safetensors, in the layout that timm and the Hub read."""

import copy
import json
import logging
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models import save_for_hf
from timm.utils import unwrap_model
from torch import Tensor, nn

from ..checkpoints.history import ENTRY, Experts, History, find_history
from ..checkpoints.source import ModelSpec, first_problem, load_source
from ..convert.blocks import copy_sharing_tensors, moe_layers
from ..convert.dense import to_dense_
from ..files import check_model_folder, publish, staged
from ..info import is_registered_here, parameters
from ..layers import EwaMlp
from ..model_config import get_pretrained_cfg, model_input_size, set_pretrained_cfg

_logger = logging.getLogger(__name__)

#: What a model is made of; without its config.json the weights mean nothing.
_FILES = ("model.safetensors", "config.json")
#: Largest difference of an output, relative to the largest output, that the check of an export lets pass.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        path: folder with ``model.safetensors`` and ``config.json``.
        architecture: registered name of the stock model.
        parameters: number of its parameters.
        largest_difference: largest absolute difference between an output of the source model and of the stock model
            that timm loaded from the folder, on random images. Where no dense model computes what the source does, the
            one that was made of it stands in its place.
        exact: whether the source computes what the dense model does in eval mode: the mean of EWA's experts does,
            anything else does not.
    """

    path: Path
    architecture: str
    parameters: int
    largest_difference: float
    exact: bool


def export_dense(
    source: nn.Module | str | Path,
    output_dir: str | Path,
    method: str = "average",
    *,
    svd_ratio: float | None = None,
    spec: ModelSpec | None = None,
    model_args: dict[str, Any] | None = None,
    use_ema: bool = False,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    label_names: Sequence[str] | None = None,
    label_descriptions: Mapping[str, str] | None = None,
    license: str | None = None,
) -> Export:
    """Write the dense form of an expert model for ``timm.create_model("local-dir:DIR", pretrained=True)``.

    ``AutoModelForImageClassification.from_pretrained("DIR")`` of Hugging Face transformers loads it too.

    A model without expert layers, as a student after its training, is written as it is. (What timm has no model for, as
    WideNet's or shifted patches, becomes a dense model of this package.) What was written is loaded
    again with stock timm and compared with the source on random images before the folder appears under its name; if
    anything fails before, nothing is left behind.

    Args:
        source: a model, a train.py checkpoint, a safetensors file, a folder or an ``hf-hub:`` name; see
            :func:`timm_moe.checkpoints.source.load_source`.
        output_dir: folder to write; missing parents are made.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: likewise.
        spec: model to create for a file that does not name it.
        model_args: arguments that ``timm.create_model`` needs for the stock model, where the source does not tell them
            (a model converted in memory, under a timm that does not record them).
        use_ema: export the EMA weights of a train.py checkpoint.
        overwrite: replace the model in a folder that already holds something.
        allow_nonfinite: export weights that contain NaN or Inf.
        label_names: names of the classes, in order; by default those that the source's config states.
        label_descriptions: of classes, by name; likewise.
        license: for config.json; by default that of the pretrained weights that training began from, if known, or what
            the config of a folder or repository states.

    Raises:
        ValueError: if the source cannot be read, has no experts for a method but ``"average"``, has a layer that no
            stock model has, another number of classes than names are given, its weights or outputs are not finite, or
            the stock model does not give the source's outputs.
        OSError: if the folder is in use or cannot be written.
    """
    target, model = _open(source, output_dir, spec, use_ema, overwrite)
    _require_finite(model, allow_nonfinite)
    exact = method == "average" and all(isinstance(layer, EwaMlp) for layer in moe_layers(model).values())
    if not hasattr(model, "pretrained_cfg"):
        raise ValueError(f"This {type(model).__name__} was not made by timm.create_model, so timm could not load it.")
    labels = stated_labels(model, label_names, label_descriptions)
    history = find_history(source, model, use_ema)
    if moe_layers(model):
        history = replace(history, experts=Experts.of(model), method=method)
    if isinstance(source, nn.Module):
        model = copy_sharing_tensors(model)  # it becomes dense below, the caller's does not
    _describe(model, license or _license(source, model, history))
    images = _random_images(model)
    expected = _outputs(model, images) if exact else None
    if moe_layers(model) or method != "average":
        _logger.info("Making one network of the experts and checking the result ...")
        to_dense_(model, method, svd_ratio)
    if expected is None:
        expected = _outputs(model, images)
    _require_finite_outputs(expected, allow_nonfinite)
    with _staging_folder(target, overwrite) as folder:
        _save(model, folder, target, model_args, {**labels, ENTRY: history.to_config()})
        del model  # for little memory: not alive beside what is loaded, unless the caller holds it
        stock = load_exactly(folder, "Stock timm")
        difference = _largest_difference(expected, _outputs(stock.to(images.device, images.dtype), images))
        publish(folder, target, _FILES)
    return Export(target, get_pretrained_cfg(stock)["architecture"], parameters(stock), difference, exact)


def export_moe(
    source: nn.Module | str | Path,
    output_dir: str | Path,
    model_args: dict[str, Any] | None = None,
    *,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    label_names: Sequence[str] | None = None,
    label_descriptions: Mapping[str, str] | None = None,
    license: str | None = None,
) -> Path:
    """Write an expert model as it is for ``timm.create_model("local-dir:DIR", pretrained=True)`` with this package.

    Hugging Face transformers loads it too where this package is installed. What was written is loaded again before the
    folder appears under its name: its tensors must be the model's bit for bit, its outputs on random images the same.

    Args:
        source: an expert model of a registered name, or what holds one, as for :func:`export_dense`.
        output_dir: folder to write; missing parents are made.
        model_args: arguments that ``timm.create_model`` needs for it, where timm does not record them.
        spec: model to create for a file that does not name it.
        use_ema: write the EMA weights of a train.py checkpoint.
        overwrite: replace the model in a folder that already holds something.
        allow_nonfinite: write weights that contain NaN or Inf.
        label_names: names of the classes, in order; by default those that the source's config states.
        label_descriptions: of classes, by name; likewise.
        license: for config.json; by default that of the pretrained weights that training began from, if known, or what
            the config of a folder or repository states.

    Raises:
        ValueError: if the source cannot be read, the model has no expert layers, no registered name or another number
            of classes than names are given, its weights or outputs are not finite, or what was written does not give
            it back.
        OSError: if the folder is in use or cannot be written.
    """
    target, model = _open(source, output_dir, spec, use_ema, overwrite)
    model = copy.copy(model)  # its config changes below, the caller's does not
    if not moe_layers(model):
        raise ValueError(f"This {type(model).__name__} has no expert layers.")
    if not hasattr(model, "pretrained_cfg") or not is_registered_here(get_pretrained_cfg(model)["architecture"]):
        raise ValueError(
            f"This {type(model).__name__} was converted in memory, so timm could not create it by a name: create a "
            "registered model of timm_moe and load the weights into it."
        )
    _require_finite(model, allow_nonfinite)
    labels = stated_labels(model, label_names, label_descriptions)
    history = find_history(source, model, use_ema)
    _describe(model, license or _license(source, model, history))
    images = _random_images(model)
    expected = _outputs(model, images)
    _require_finite_outputs(expected, allow_nonfinite)
    with _staging_folder(target, overwrite) as folder:
        _save(model, folder, target, model_args, {**labels, ENTRY: history.to_config()})
        loaded = load_exactly(folder, "timm with timm_moe")
        _largest_difference(expected, _outputs(loaded.to(images.device, images.dtype), images))
        publish(folder, target, _FILES)
    return target


def check_target(output_dir: str | Path, overwrite: bool) -> Path:
    """The folder to write to; raises OSError or ValueError if it cannot be used."""
    if str(output_dir).startswith(("hf-hub:", "local-dir:")):
        raise ValueError(f"{output_dir} is a model name, but the output must be a local folder.")
    target = Path(output_dir)
    if target.is_dir():
        target = target.resolve() if target.is_symlink() or not target.name else target
    check_model_folder(target, _FILES, overwrite)
    return target


def _open(
    source: nn.Module | str | Path, output_dir: str | Path, spec: ModelSpec | None, use_ema: bool, overwrite: bool
) -> tuple[Path, nn.Module]:
    """Where to write and what: the folder, once it can be used, and the model of the source without wrappers."""
    target = check_target(output_dir, overwrite)
    if not isinstance(source, nn.Module):
        _logger.info("Loading %s ...", source)
    return target, unwrap_model(load_source(source, spec, use_ema))


def _require_finite(model: nn.Module, allow_nonfinite: bool) -> None:
    for name, tensor in () if allow_nonfinite else model.state_dict().items():
        if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():  # a third of the time of isfinite
            raise ValueError(
                f"{name} holds NaN or Inf; pass --allow-nonfinite (allow_nonfinite=True) to export it all the same."
            )


def _require_finite_outputs(outputs: Tensor, allow_nonfinite: bool) -> None:
    if not allow_nonfinite and not outputs.isfinite().all():
        raise ValueError(
            "The model's weights are finite, but its outputs on random images hold NaN or Inf; pass --allow-nonfinite "
            "(allow_nonfinite=True) to export it all the same."
        )


def stated_labels(
    model: nn.Module, label_names: Sequence[str] | None, label_descriptions: Mapping[str, str] | None
) -> dict[str, Any]:
    """The entries of config.json that name the classes: as stated, else as the model's own config has them."""
    cfg = get_pretrained_cfg(model)
    if label_names is not None:
        return _checked_labels(model, label_names, label_descriptions)
    if label_descriptions is not None:
        raise ValueError("label_descriptions are of label_names: state those too.")
    names = cfg.get("label_names")
    if not names:
        return {}
    if isinstance(names, dict):  # by number
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    try:
        return _checked_labels(model, names, cfg.get("label_descriptions"))
    except ValueError as error:
        _logger.warning("The names of classes in the source's config are left out: %s", error)
        return {}


def _checked_labels(
    model: nn.Module, label_names: Sequence[str], label_descriptions: Mapping[str, str] | None
) -> dict[str, Any]:
    """The entries of config.json for these names; raises ValueError if they are not those of the model's classes."""
    names = [label_names] if isinstance(label_names, str) else list(label_names)
    if len(names) != model.num_classes:
        raise ValueError(f"There are {len(names)} names of classes, but the model has {model.num_classes} classes.")
    for name in names:
        if not isinstance(name, str) or not name:
            raise ValueError(f"The name of a class must be a text, got {name!r}.")
    descriptions = dict(label_descriptions or {})
    for name, text in descriptions.items():
        if name not in names or not isinstance(text, str):
            raise ValueError(f"label_descriptions must hold texts by names of classes, got {name!r}: {text!r}.")
    return {"label_names": names, **({"label_descriptions": descriptions} if descriptions else {})}


def _license(source: nn.Module | str | Path, model: nn.Module, history: History) -> str | None:
    """That of the pretrained weights that training began from, or what a folder or repository states of its own.

    The license in the config of any other model is that of weights which it may never have held.
    """
    in_config = not isinstance(source, nn.Module) and not Path(source).is_file()
    return get_pretrained_cfg(model).get("license") if in_config or history.base else None


def _describe(model: nn.Module, license: str | None) -> None:
    """State the model's own input size, classes and license in the config that is saved with it."""
    stock = ("tag", "license", "label_names", "label_descriptions")  # of weights that these are no longer
    cfg = {name: value for name, value in get_pretrained_cfg(model).items() if name not in stock}
    current = {"input_size": model_input_size(model), "num_classes": model.num_classes, "custom_load": False}
    set_pretrained_cfg(model, {**cfg, **current, **({"license": license} if license else {})})


@contextmanager
def _staging_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder from which :func:`publish` can put a model in its place; gone when the block ends."""
    with staged(target) as temporary:
        check_target(target, overwrite)  # another process may have been there since
        folder = temporary / "model"  # the temporary folder itself is closed to other users
        folder.mkdir()
        yield folder


def _save(
    model: nn.Module, folder: Path, target: Path, model_args: dict[str, Any] | None, entries: dict[str, Any]
) -> None:
    """Write weights and config.json, with these entries beside those that timm makes."""
    args = {**_recorded_args(model), **(model_args or {})}
    handle = model.register_state_dict_post_hook(_copy_repeated)
    try:
        save_for_hf(model, str(folder), model_config=entries, model_args=args, safe_serialization=True)
        config = json.loads((folder / "config.json").read_text())
        state_classes_once(config)
        (folder / "config.json").write_text(json.dumps(config, indent=2, allow_nan=False) + "\n")
        # safetensors closes its files to other users; config.json has the mode that the user's umask asks for
        shutil.copymode(folder / "config.json", folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise OSError(f"{target} could not be written: {error}") from error
    except (TypeError, ValueError) as error:  # json
        raise ValueError(f"An argument of the model cannot be written to config.json: {error}") from error
    finally:
        handle.remove()


def state_classes_once(config: dict[str, Any]) -> None:
    """Move the number of classes from the arguments in a config.json to where timm looks if these are silent.

    transformers hands on both, and fails on the second.
    """
    args = config.get("model_args") or {}
    if "num_classes" in args:
        config["num_classes"] = args.pop("num_classes")


def _copy_repeated(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Give what stands under several names, as in CoaT, under each a copy of its own: safetensors takes no other."""
    seen: set[int] = set()
    for name, tensor in state_dict.items():
        if tensor.data_ptr() in seen:
            state_dict[name] = tensor.clone()
        seen.add(tensor.data_ptr())


def _recorded_args(model: nn.Module) -> dict[str, Any]:
    """What timm, or this package for an older timm, noted down of a model's creation."""
    if hasattr(timm.models, "get_model_args"):  # it knows, too, what has changed since
        return timm.models.get_model_args(model)
    return {**getattr(model, "_model_args", {}), "num_classes": model.num_classes}


def load_exactly(folder: Path, loader: str) -> nn.Module:
    """The model that timm makes of a folder, in eval mode, with the tensors of its file bit for bit.

    Raises:
        ValueError: if it cannot be loaded, or timm had to change a tensor for it to fit; ``loader`` says who cannot.
        RuntimeError: if this version of timm cannot read the file.
    """
    model = _load(folder, loader)
    with safe_open(folder / "model.safetensors", "pt") as file:
        saved = set(file.keys())
        for name, tensor in model.state_dict().items():
            if name not in saved or not _equal_with_nan(tensor, file.get_tensor(name).to(tensor.dtype)):
                raise ValueError(
                    f"{loader} does not load {name} as it was saved; if the model was changed after its creation (by "
                    "set_input_size, say), state what it is now in model_args."
                )
    return model


def _load(folder: Path, loader: str) -> nn.Module:
    try:
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    except pickle.UnpicklingError as error:  # timm below 1.0.26 reads the file by torch.load, whatever it is
        raise RuntimeError(
            f"timm {timm.__version__} cannot read safetensors from a folder under torch {torch.__version__}; "
            "timm 1.0.26 and later can."
        ) from error
    except Exception as error:
        raise ValueError(
            f"{loader} cannot load the exported weights; if the model was created with arguments of its own, state "
            f"them in model_args. timm says: {first_problem(error)}"
        ) from error


def _random_images(model: nn.Module) -> Tensor:
    """Two images on the model's device, always the same."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, *get_pretrained_cfg(model)["input_size"], generator=generator)
    return images.to(next(model.parameters()))


@torch.inference_mode()
def _outputs(model: nn.Module, images: Tensor) -> Tensor:
    if any(tensor.dtype != images.dtype or tensor.device != images.device for tensor in model.parameters()):
        model = copy.deepcopy(model).to(images.device, images.dtype)  # the caller's stays what it is
    with torch.random.fork_rng([images.device] if images.is_cuda else []), _as_deployed(model):
        torch.manual_seed(0)  # some routers draw noise in eval mode too
        return model(images)


def _largest_difference(expected: Tensor, actual: Tensor) -> float:
    """Of outputs; raises ValueError if it is too large."""
    if _equal_with_nan(expected, actual):
        return 0.0
    difference = (expected - actual).abs().max().item()
    if not difference <= TOLERANCE * expected.abs().max().item():
        raise ValueError(
            f"The exported model's outputs differ from the source's by {difference:.3g}; nothing was written."
        )
    return difference


@contextmanager
def _as_deployed(model: nn.Module) -> Iterator[None]:
    """In eval mode, experts averaged, for the time of the block."""
    modes = [(module, module.training) for module in model.modules()]
    eval_modes = [(layer, layer.eval_mode) for layer in moe_layers(model).values() if isinstance(layer, EwaMlp)]
    model.eval()
    for layer, _ in eval_modes:
        layer.eval_mode = "average"
    try:
        yield
    finally:
        for module, training in modes:  # parents come first, so each module ends in its own mode
            module.train(training)
        for layer, eval_mode in eval_modes:
            layer.eval_mode = eval_mode


def _equal_with_nan(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
