"""After training: the dense model as safetensors, in the layout that its own library and the Hub read."""

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..checkpoints.source import ModelSpec, first_problem, load_source
from ..convert.blocks import copy_sharing_tensors, moe_layers, unwrapped
from ..convert.dense import to_dense_
from ..files import check_model_folder, publish, staged
from ..info import is_registered_here, parameters
from ..layers import EwaMlp
from ..model_config import get_pretrained_cfg, model_input_size, set_pretrained_cfg
from .formats import (
    FILES,
    Format,
    StateDictFormat,
    TimmFormat,
    TransformersFormat,
    equal_with_nan,
    is_of_timm,
    is_of_transformers,
    load_exactly,
    timm_model_in,
)
from .history import ENTRY, Experts, History, find_history

_logger = logging.getLogger(__name__)

#: An adapter of PEFT, which transformers would put on any model in its folder.
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
#: Largest difference of an output, relative to the largest output, that the check of an export lets pass.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Export:
    """What an export wrote.

    Attributes:
        path: folder with ``model.safetensors`` and ``config.json``.
        architecture: registered name of the stock model, or class of a model that timm did not make.
        parameters: number of its parameters.
        largest_difference: largest absolute difference between an output of the source model and of the dense model
            that was loaded from the folder, on random images or the caller's inputs. Where no dense model computes what
            the source does, the one that was made of it stands in its place. None if there was nothing to compare.
        exact: whether the source computes what the dense model does in eval mode: the mean of EWA's experts does,
            anything else does not.
        library: what loads it: ``"timm"``, ``"transformers"`` or ``"pytorch"``.
    """

    path: Path
    architecture: str
    parameters: int
    largest_difference: float | None
    exact: bool
    library: str = "timm"


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
    example_inputs: Any = None,
) -> Export:
    """Write the dense form of an expert model for ``timm.create_model("local-dir:DIR", pretrained=True)``.

    ``AutoModelForImageClassification.from_pretrained("DIR")`` of Hugging Face transformers loads it too.

    A model of transformers itself is written by its own ``save_pretrained`` for its own ``from_pretrained("DIR")``; its
    image processor is no part of it. Of transformers' wrappers of timm's models the inner model is written, as above.
    Any other module, torchvision's for instance, is written as a state dict, for
    ``model.load_state_dict(safetensors.torch.load_file("DIR/model.safetensors"))``; config.json names its class.

    A model without expert layers, as a student after its training, is written as it is. (What timm has no model for, as
    WideNet's or shifted patches, becomes a dense model of this package.) What was written is loaded again, by stock
    timm or as said above, and compared with the source before the folder appears under its name; if anything fails
    before, nothing is left behind.

    Args:
        source: a model, a train.py checkpoint, a safetensors file, a folder or an ``hf-hub:`` name; see
            :func:`timm_moe.checkpoints.source.load_source`.
        output_dir: folder to write; missing parents are made.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: likewise.
        spec: model to create for a file that does not name it, or its preprocessing; for models of timm.
        model_args: arguments that ``timm.create_model`` needs for the stock model, where the source does not tell them
            (a model converted in memory, under a timm that does not record them).
        use_ema: export the EMA weights of a train.py checkpoint.
        overwrite: replace the model in a folder that already holds something.
        allow_nonfinite: export weights that contain NaN or Inf.
        label_names: names of the classes, in order; by default those that the source's config states.
        label_descriptions: of classes, by name; likewise. Models of timm alone have them, and a state dict has no names
            of classes either.
        license: for config.json; by default that of the pretrained weights that training began from, if known, or what
            the config of a folder or repository states.
        example_inputs: what the model is called with for the comparison: a tensor, a tuple of arguments, or a dict of
            keyword arguments. By default two random images of the size that the model states. Needed for a model of
            transformers that states none; without them and a size, another module's outputs are not compared.

    Raises:
        ValueError: if the source cannot be read, has no experts for a method but ``"average"``, has a layer that no
            stock model has, another number of classes than names are given, its weights or outputs are not finite, the
            stock model does not give the source's outputs, or an argument has no meaning for such a model.
        OSError: if the folder is in use or cannot be written.
    """
    target, model = _open(source, output_dir, spec, use_ema, overwrite)
    _require_finite(model, allow_nonfinite)
    exact = method == "average" and all(layer.deploys_dense for layer in moe_layers(model).values())
    history = find_history(source, model, use_ema)
    if moe_layers(model):
        history = replace(history, experts=Experts.of(model), method=method)
    if isinstance(source, nn.Module):
        model = copy_sharing_tensors(model)  # it becomes dense below, the caller's does not
    if is_of_timm(model):
        labels = stated_labels(model, label_names, label_descriptions)
        layout: Format = _timm_format(model, model_args, labels, license or _license(source, model, history), history)
    else:
        _refuse(model, model_args=model_args, label_descriptions=label_descriptions)
        layout = _foreign_format(model, label_names, license, history)
    inputs = _inputs(model, layout, example_inputs)
    if moe_layers(model) and not exact:
        _logger.info(
            "No dense model computes what routed experts do. What method=%r makes of them is a start for training: "
            "evaluate it, or train it on as a student.",
            method,
        )
    expected = _source_outputs(model, inputs) if exact else None
    if moe_layers(model) or method != "average":
        _logger.info("Making one network of the experts and checking the result ...")
        to_dense_(model, method, svd_ratio)
    if expected is None:
        expected = _source_outputs(model, inputs)
    _require_finite_outputs(expected, allow_nonfinite)
    with _staging_folder(target, overwrite) as folder:
        _write(model, layout, folder, target)
        del model  # for little memory: not alive beside what is loaded, unless the caller holds it
        dense = layout.read(folder)
        difference = _compare(expected, dense, inputs)
        publish(folder, target, _names(folder, target))
    return Export(target, layout.architecture(dense), parameters(dense), difference, exact, layout.library)


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
    if not is_of_timm(model):
        raise ValueError(
            f"This {type(model).__name__} was not made by timm.create_model, so nothing could create it with its "
            "experts by a name: save its state_dict(), and load that into a model that was converted alike."
        )
    if not is_registered_here(get_pretrained_cfg(model)["architecture"]):
        raise ValueError(
            f"This {type(model).__name__} was converted in memory, so timm could not create it by a name: create a "
            "registered model of timm_moe and load the weights into it."
        )
    _require_finite(model, allow_nonfinite)
    history = find_history(source, model, use_ema)
    labels = stated_labels(model, label_names, label_descriptions)
    layout = _timm_format(model, model_args, labels, license or _license(source, model, history), history)
    inputs = _inputs(model, layout, None)
    expected = _outputs(model, inputs)
    _require_finite_outputs(expected, allow_nonfinite)
    with _staging_folder(target, overwrite) as folder:
        _write(model, layout, folder, target)
        _compare(expected, load_exactly(folder, "timm with timm_moe"), inputs)
        publish(folder, target, FILES)
    return target


def check_target(output_dir: str | Path, overwrite: bool) -> Path:
    """The folder to write to; raises OSError or ValueError if it cannot be used."""
    if str(output_dir).startswith(("hf-hub:", "local-dir:")):
        raise ValueError(f"{output_dir} is a model name, but the output must be a local folder.")
    target = Path(output_dir)
    if target.is_dir():
        target = target.resolve() if target.is_symlink() or not target.name else target
    check_model_folder(target, FILES, overwrite)
    return target


def _open(
    source: nn.Module | str | Path, output_dir: str | Path, spec: ModelSpec | None, use_ema: bool, overwrite: bool
) -> tuple[Path, nn.Module]:
    """Where to write and what: the folder, once it can be used, and the model of the source without wrappers."""
    target = check_target(output_dir, overwrite)
    if isinstance(source, nn.Module):
        source = timm_model_in(unwrapped(source))
        if getattr(source, "peft_config", None):
            raise ValueError(
                f"This {type(source).__name__} has adapters of PEFT: export what its merge_and_unload() returns."
            )
        if not is_of_timm(source):
            _refuse(source, spec=None if spec == ModelSpec() else spec, use_ema=use_ema or None)
    else:
        _logger.info("Loading %s ...", source)
    return target, unwrapped(load_source(source, spec, use_ema))


def _refuse(model: nn.Module, **given: Any) -> None:
    """Raise ValueError if an argument is given that has no meaning for a model."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning for this {type(model).__name__}, which timm did not make.")


def _foreign_format(
    model: nn.Module, label_names: Sequence[str] | None, license: str | None, history: History
) -> TransformersFormat | StateDictFormat:
    """The format of a model, which is the exporter's own copy, that timm did not make.

    Raises:
        ValueError: if the names are not those of its classes.
    """
    entries: dict[str, Any] = {"license": license} if license else {}
    if not is_of_transformers(model):
        _refuse(model, label_names=label_names)
        return StateDictFormat({**entries, ENTRY: history.to_config()})
    config: Any = model.config
    if label_names is not None:
        names = _checked_labels(config.num_labels, label_names, None)["label_names"]
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    recorded = getattr(config, ENTRY, {})  # of a model that was exported before
    return TransformersFormat({**entries, ENTRY: history.to_config() or recorded})


def _require_finite(model: nn.Module, allow_nonfinite: bool) -> None:
    for name, tensor in () if allow_nonfinite else model.state_dict().items():
        if not isinstance(tensor, Tensor) or not tensor.numel():
            continue
        extremes = torch.stack(tensor.aminmax()) if tensor.is_floating_point() else tensor  # a third of the time
        if not extremes.isfinite().all():
            raise ValueError(
                f"{name} holds NaN or Inf; pass --allow-nonfinite (allow_nonfinite=True) to export it all the same."
            )


def _require_finite_outputs(outputs: Any, allow_nonfinite: bool) -> None:
    if not allow_nonfinite and not all(tensor.isfinite().all() for tensor in _tensors(outputs)):
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
        return _checked_labels(model.num_classes, label_names, label_descriptions)
    if label_descriptions is not None:
        raise ValueError("label_descriptions are of label_names: state those too.")
    names = cfg.get("label_names")
    if not names:
        return {}
    if isinstance(names, dict):  # by number
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    try:
        return _checked_labels(model.num_classes, names, cfg.get("label_descriptions"))
    except ValueError as error:
        _logger.warning("The names of classes in the source's config are left out: %s", error)
        return {}


def _checked_labels(
    num_classes: Any, label_names: Sequence[str], label_descriptions: Mapping[str, str] | None
) -> dict[str, Any]:
    """The entries of config.json for these names; raises ValueError if they are not those of so many classes."""
    names = [label_names] if isinstance(label_names, str) else list(label_names)
    if len(names) != num_classes:
        raise ValueError(f"There are {len(names)} names of classes, but the model has {num_classes} classes.")
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


def _timm_format(
    model: nn.Module,
    model_args: dict[str, Any] | None,
    labels: dict[str, Any],
    license: str | None,
    history: History,
) -> TimmFormat:
    """timm's format of a model whose own config now states its input size, classes and license."""
    stock = ("tag", "license", "label_names", "label_descriptions")  # of weights that these are no longer
    cfg = {name: value for name, value in get_pretrained_cfg(model).items() if name not in stock}
    current = {"input_size": model_input_size(model), "num_classes": model.num_classes, "custom_load": False}
    set_pretrained_cfg(model, {**cfg, **current, **({"license": license} if license else {})})
    return TimmFormat(model_args, {**labels, ENTRY: history.to_config()})


@contextmanager
def _staging_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder from which :func:`publish` can put a model in its place; gone when the block ends."""
    with staged(target) as temporary:
        check_target(target, overwrite)  # another process may have been there since
        folder = temporary / "model"  # the temporary folder itself is closed to other users
        folder.mkdir()
        yield folder


def _write(model: nn.Module, layout: Format, folder: Path, target: Path) -> None:
    """Write a model's files; raises OSError, which names the target, if they cannot be written."""
    try:
        layout.write(model, folder)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{target} could not be written: {error}") from error


def _names(folder: Path, target: Path) -> list[str]:
    """Of all files that make a model, config.json last, and of what must not stay beside them."""
    stale = [name for name in _ADAPTERS if (target / name).exists()]
    return [*stale, *sorted({file.name for file in folder.iterdir()} - {FILES[-1]}), FILES[-1]]


def _inputs(model: nn.Module, layout: Format, example_inputs: Any) -> Any:
    """What the model is called with, on its device and of its type: the caller's, or two images, always the same.

    None, with a warning, if nothing says what the model takes.

    Raises:
        ValueError: if a model of transformers does not say, or the caller's hold no tensor.
    """
    shape = layout.image_shape(model) if example_inputs is None else None
    if shape is not None:
        example_inputs = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    elif example_inputs is None and layout.library == "transformers":
        raise ValueError(
            f"The config of this {type(model).__name__} does not say which images the model takes: pass "
            "example_inputs, as {'pixel_values': torch.randn(2, 3, 224, 224)}."
        )
    elif example_inputs is None:
        _logger.warning(
            f"This {type(model).__name__} does not state its inputs, so its outputs are not compared: pass "
            "example_inputs."
        )
        return None
    like = next(model.parameters(), torch.empty(0))
    inputs = _map(
        example_inputs, lambda tensor: tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)
    )
    if not _tensors(inputs):
        raise ValueError(
            "example_inputs hold no tensor: pass a tensor, a tuple of arguments or a dict of them by name."
        )
    return inputs


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and dicts with other tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _map(part, function) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [_map(part, function) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists, dicts and dataclasses, in order."""
    found: list[Tensor] = []
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = vars(value)
    _map(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


def _moved(model: nn.Module, inputs: Any) -> nn.Module:
    """The model itself, on the device of its inputs and of their type."""
    tensors = _tensors(inputs)
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)
    return model.to(device=tensors[0].device, dtype=dtype)


def _source_outputs(model: nn.Module, inputs: Any) -> Any:
    """As :func:`_outputs`, None without inputs; raises ValueError if a model that timm did not make does not run."""
    if inputs is None:
        return None
    try:
        return _outputs(model, inputs)
    except Exception as error:
        if is_of_timm(model):
            raise
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors(inputs))
        raise ValueError(
            f"This {type(model).__name__} does not run on inputs of shape {shapes}; pass example_inputs that it takes. "
            f"It says: {first_problem(error)}"
        ) from error


@torch.inference_mode()
def _outputs(model: nn.Module, inputs: Any) -> Any:
    first = _tensors(inputs)[0]
    kinds = {(tensor.device, tensor.dtype) for tensor in model.parameters()}
    if kinds != {(first.device, first.dtype)}:
        model = _moved(copy.deepcopy(model), inputs)  # the caller's stays what it is
    with torch.random.fork_rng([first.device] if first.is_cuda else []), _as_deployed(model):
        torch.manual_seed(0)  # some routers draw noise in eval mode too, and some models a mask
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _compare(expected: Any, loaded: nn.Module, inputs: Any) -> float | None:
    """Largest difference of a loaded model's outputs from those expected; None if there is nothing to compare.

    Raises:
        ValueError: if it is too large, or the outputs are others in kind.
    """
    if inputs is None:
        return None
    if not _tensors(expected):
        _logger.warning("The model's outputs hold no tensors, so they are not compared.")
        return None
    outputs = _tensors(expected), _tensors(_outputs(_moved(loaded, inputs), inputs))
    if [tensor.shape for tensor in outputs[0]] != [tensor.shape for tensor in outputs[1]]:
        raise ValueError("The exported model's outputs are not as many as the source's, or of other shapes.")
    return max(map(_largest_difference, *outputs))


def _largest_difference(expected: Tensor, actual: Tensor) -> float:
    """Of outputs; raises ValueError if it is too large."""
    if equal_with_nan(expected, actual):
        return 0.0
    if not expected.is_floating_point():
        expected, actual = expected.double(), actual.double()
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
