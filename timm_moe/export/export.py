"""Export of a trained model: load, make it dense, write, verify, publish the folder."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from ..checkpoints.source import ModelSpec, load_source
from ..convert.blocks import copy_sharing_tensors, moe_layers, parameters, unwrapped
from ..convert.dense import require_weights, to_dense_
from ..files import check_folder, holds_something, publish, staged
from ..model_config import get_pretrained_cfg, model_input_size, records_arguments, set_pretrained_cfg
from ..models.registered import registrar
from .formats import (
    FILES,
    Format,
    StateDictFormat,
    TimmFormat,
    TransformersFormat,
    architecture_of,
    is_of_timm,
    is_of_transformers,
    timm_model_in,
)
from .history import ENTRY, Experts, History, find_history
from .options import ModelOptions, checked_labels
from .outputs import compare, inputs_for, source_outputs

_logger = logging.getLogger(__name__)

#: Files of a PEFT adapter, which transformers would apply to any model beside them.
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Export:
    """Result of an export.

    Attributes:
        path: folder with ``model.safetensors`` and ``config.json``.
        architecture: registered name of the stock model, or class of a model that timm did not make.
        parameters: number of its parameters.
        largest_difference: largest absolute difference between an output of the source model and of the model that was
            loaded from the folder, on random images or the caller's inputs. If no dense model computes the source's
            function, the network made of its experts is the reference. None if there was nothing to compare.
        exact: whether the dense model computes the source's function in eval mode: it does for the mean of EWA's
            experts only.
        library: library that loads it: ``"timm"``, ``"transformers"`` or ``"pytorch"``.
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
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    **options: Any,
) -> Export:
    """Write the dense form of an expert model for ``timm.create_model("local-dir:DIR", pretrained=True)``.

    ``AutoModelForImageClassification.from_pretrained("DIR")`` of Hugging Face transformers loads it too.

    A model of transformers itself is written by its own ``save_pretrained`` for its own ``from_pretrained("DIR")``,
    without an image processor. Of transformers' wrappers of timm models the inner model is written, as above. Any other
    module, torchvision's for instance, is written as a state dict, for
    ``model.load_state_dict(safetensors.torch.load_file("DIR/model.safetensors"))``; config.json names its class.

    A model without expert layers is written unchanged. If timm lacks its class, as for WideNet or shifted patches, it
    becomes a dense model of this package. The written files are loaded again, by stock timm or the reader named above,
    and compared with the source before the folder appears under its name. A failure leaves no file behind.

    Args:
        source: a model, a train.py checkpoint, a safetensors file, a folder or an ``hf-hub:`` name; see
            :func:`timm_moe.checkpoints.source.load_source`.
        output_dir: folder to write; missing parents are made.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: for ``method="svd"``, see there.
        overwrite: replace the model in a folder that already holds something.
        allow_nonfinite: export weights that contain NaN or Inf.
        **options: ``spec``, ``use_ema``, ``model_args``, ``license``, ``example_inputs``, ``label_names`` and
            ``label_descriptions``; see :class:`timm_moe.export.ModelOptions`. A model of transformers that does
            not state its image size needs ``example_inputs``; other modules are not compared without them.

    Raises:
        ValueError: if the source cannot be read, has no experts for a method but ``"average"``, has a layer that no
            stock model has, another number of classes than names are given, its weights or outputs are not finite, the
            stock model does not give the source's outputs, or an option has no meaning for such a model.
        TypeError: if there is no option of a name.
        OSError: if the folder is in use or cannot be written.
    """
    settings = ModelOptions(**options)
    target = check_target(output_dir, overwrite)
    layout = _load(source, settings, allow_nonfinite, method)
    inputs = inputs_for(layout.model, settings.example_inputs)
    expected, exact = _make_dense(layout.model, inputs, method, svd_ratio, allow_nonfinite)
    written, difference = _write(layout, inputs, expected, target, overwrite)
    return Export(target, architecture_of(written), parameters(written), difference, exact, layout.library)


def export_moe(
    source: nn.Module | str | Path,
    output_dir: str | Path,
    model_args: dict[str, Any] | None = None,
    *,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    **options: Any,
) -> Path:
    """Write an expert model unchanged for ``timm.create_model("local-dir:DIR", pretrained=True)`` with this package.

    Hugging Face transformers loads it too where this package is installed. The written files are loaded again before
    the folder appears under its name: the tensors must equal the model's bit for bit, and the outputs on random images
    must be the same.

    Args:
        source: an expert model of a registered name, or a file or folder of one, as for :func:`export_dense`.
        output_dir: folder to write; missing parents are made.
        model_args: arguments that ``timm.create_model`` needs for it, where timm does not record them.
        overwrite: as for :func:`export_dense`.
        allow_nonfinite: as for :func:`export_dense`.
        **options: the others of :func:`export_dense`, whose errors are raised too.

    Raises:
        ValueError: if the model has no expert layers or no registered name.
    """
    settings = ModelOptions(**options, model_args=model_args)
    target = check_target(output_dir, overwrite)
    layout = _load(source, settings, allow_nonfinite, method=None)
    inputs = inputs_for(layout.model, settings.example_inputs)
    _write(layout, inputs, source_outputs(layout.model, inputs, allow_nonfinite), target, overwrite)
    return target


def check_target(output_dir: str | Path, overwrite: bool) -> Path:
    """Return the folder to write to; raise OSError or ValueError if it cannot be used."""
    if str(output_dir).startswith(("hf-hub:", "local-dir:")):
        raise ValueError(f"{output_dir} is a model name, but the output must be a local folder.")
    target = Path(output_dir)
    check_folder(target, FILES, overwrite=True)
    if not overwrite and holds_something(target):
        raise FileExistsError(f"{target} is not empty; pass --overwrite (overwrite=True) to replace its model.")
    return target


# --- load


def _load(source: nn.Module | str | Path, settings: ModelOptions, allow_nonfinite: bool, method: str | None) -> Format:
    """Load and check a source for export by a method, or with its experts if the method is None.

    The layout holds the exporter's own copy of the model.
    """
    model = _load_model(source, settings)
    require_weights(model)
    if method is None and not moe_layers(model):
        raise ValueError(f"This {type(model).__name__} has no expert layers.")
    if method is None and registrar(architecture_of(model)) is None:
        raise ValueError(
            f"This {type(model).__name__} was converted in memory, so timm could not create it by a name: save its "
            "state_dict(), and load that into a registered model of timm_moe, or one that was converted alike."
        )
    if not allow_nonfinite:
        require_finite_weights(model)
    history = find_history(source, model, settings.use_ema)
    if settings.spec is not None and (settings.spec.kwargs or settings.spec.preprocessing):
        history = replace(history, metrics={})  # of another function
    if method is not None and moe_layers(model):
        history = replace(history, experts=Experts.of(model), method=method)
    if not is_of_timm(model):
        return _foreign_layout(model, settings, history)
    has_config = not isinstance(source, nn.Module) and not Path(source).is_file()
    labels = _describe_weights(model, settings, keep_license=has_config or history.base is not None)
    if getattr(model, "args_of_images", {}).get("task") == "multilabel":
        labels["problem_type"] = "multi_label_classification"  # for transformers
    loader = "timm with timm_moe" if method is None else "Stock timm"
    return TimmFormat(model, {**labels, ENTRY: history.to_config()}, settings.model_args or {}, loader)


def _load_model(source: nn.Module | str | Path, settings: ModelOptions) -> nn.Module:
    """Load a model without wrappers; a model in memory is copied, except for its tensors."""
    if not isinstance(source, nn.Module):
        _logger.info("Loading %s ...", source)
        return unwrapped(load_source(source, settings.spec, settings.use_ema))
    model = timm_model_in(unwrapped(source))
    require_weights(model)
    if getattr(model, "peft_config", None):
        raise ValueError(f"{type(model).__name__} has adapters of PEFT: export what its merge_and_unload() returns.")
    if not is_of_timm(model):
        _refuse_options_of_timm(model, settings)
    return copy_sharing_tensors(unwrapped(load_source(model, settings.spec, settings.use_ema)))


def require_finite_weights(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and not tensor.isfinite().all():
            raise ValueError(f"{name} holds NaN or Inf; pass --allow-nonfinite (allow_nonfinite=True) to export it.")


def _describe_weights(model: nn.Module, settings: ModelOptions, keep_license: bool) -> dict[str, Any]:
    """Write the licence to a timm model's config; return the class names."""
    labels, cfg = stated_labels(model, settings), get_pretrained_cfg(model)
    license = settings.license or (cfg.get("license") if keep_license else None)
    stale = ("tag", "license", "label_names", "label_descriptions")  # of the weights that training began from
    kept = {name: value for name, value in cfg.items() if name not in stale}
    if not records_arguments():  # nor does timm then write what the model has become
        kept |= {"input_size": model_input_size(model), "num_classes": model.num_classes, "custom_load": False}
    set_pretrained_cfg(model, {**kept, **({"license": license} if license else {})})
    return labels


def _foreign_layout(model: nn.Module, settings: ModelOptions, history: History) -> Format:
    """Return the layout of a model that timm did not make, and write the user's class names to its config."""
    entries: dict[str, Any] = {"license": settings.license} if settings.license else {}
    if not is_of_transformers(model):
        return StateDictFormat(model, {**entries, ENTRY: history.to_config()})
    config: Any = model.config
    if settings.label_names is not None:
        names = checked_labels(config.num_labels, settings.label_names)["label_names"]
        config.id2label = dict(enumerate(names))
        config.label2id = {name: number for number, name in enumerate(names)}
    return TransformersFormat(model, {**entries, ENTRY: history.to_config()})


def _refuse_options_of_timm(model: nn.Module, settings: ModelOptions) -> None:
    names = ("spec", "use_ema", "model_args", "label_descriptions", "label_names")
    for name in names[:4] if is_of_transformers(model) else names:
        if getattr(settings, name) not in (None, False, ModelSpec()):
            raise ValueError(f"{name} has no meaning for this {type(model).__name__}, which timm did not make.")


def stated_labels(model: nn.Module, settings: ModelOptions) -> dict[str, Any]:
    """Return the entries of config.json that name the classes: the user's, or else the model's own."""
    if settings.label_names is not None:
        if class_map := getattr(model, "args_of_images", {}).get("class_map"):
            _logger.warning(f"The model was trained with the class map {class_map!r}: names must be in its order.")
        return checked_labels(model.num_classes, settings.label_names, settings.label_descriptions)
    if settings.label_descriptions is not None:
        raise ValueError("label_descriptions are of label_names: state those too.")
    cfg = get_pretrained_cfg(model)
    names = cfg.get("label_names")
    if not names:
        return {}
    if isinstance(names, dict):  # by number
        names = [names.get(number, names.get(str(number))) for number in range(len(names))]
    try:
        return checked_labels(model.num_classes, names, cfg.get("label_descriptions"))
    except ValueError as error:
        _logger.warning("The names of classes in the source's config are left out: %s", error)
        return {}


# --- make dense; write, verify and publish


def _make_dense(
    model: nn.Module, inputs: Any, method: str, svd_ratio: float | None, allow_nonfinite: bool
) -> tuple[Any, bool]:
    """Replace the experts of each layer by one network; return the outputs that the export must give.

    They are the expert model's if the dense one computes the same function, as the second value says, else the dense
    one's.
    """
    layers = moe_layers(model)
    exact = method == "average" and all(layer.deploys_dense for layer in layers.values())
    if layers and not exact:
        _logger.info("What method=%r makes of the experts is another function: a start for further training.", method)
    expected = source_outputs(model, inputs, allow_nonfinite) if exact else None
    if layers or method != "average":
        _logger.info("Making one network of the experts and checking the result ...")
        del layers  # each layer goes before the next network is made
        to_dense_(model, method, svd_ratio)
    if not exact:
        expected = source_outputs(model, inputs, allow_nonfinite)
    return expected, exact


def _write(layout: Format, inputs: Any, expected: Any, target: Path, overwrite: bool) -> tuple[nn.Module, float | None]:
    """Write, load, compare and publish the files; return the loaded model and the largest difference of outputs."""
    with staged(target) as temporary:
        check_target(target, overwrite)  # another process may have written there since
        folder = temporary / "model"  # the temporary folder itself is closed to other users
        folder.mkdir()
        try:
            layout.write(folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{target} could not be written: {error}") from error
        written = layout.read(folder)
        difference = compare(expected, written, inputs)
        names = sorted({file.name for file in folder.iterdir()} - {"config.json"})
        publish(folder, target, [*ADAPTERS, *names, "config.json"])  # the adapters of an older model go
    return written, difference
