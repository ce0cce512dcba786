"""Export of a trained model: load, make it dense, write, verify, publish the folder."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn

from ..checkpoints.description import SOURCE_PREFIXES
from ..checkpoints.model_spec import ModelSpec
from ..checkpoints.source import load_source, own_copy
from ..convert.dense import to_dense_
from ..convert.expert_layers import moe_layers, parameters
from ..files import check_apart, check_folder, holds_something, local_path, publish, staged
from ..models.mixin import MoeMixin, state_as_stock
from ..models.registered import is_registered_here, registrar
from .formats import FILES, Format, architecture_of, layout_of
from .history import history_of
from .options import ModelOptions
from .verify import compare, inputs_for, source_outputs

_logger = logging.getLogger(__name__)

#: Files of a PEFT adapter, which transformers would apply to any model beside them.
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
#: Files of an image processor, which transformers prefers to the preprocessing of timm's config.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def files_of_others(library: str) -> tuple[str, ...]:
    """Return the files of an earlier model that would change what a library makes of a new one."""
    return (*_ADAPTERS, *_PROCESSORS) if library == "timm" else _ADAPTERS


@dataclass(frozen=True)
class Export:
    """Result of an export.

    Attributes:
        path: folder with ``model.safetensors`` and ``config.json``.
        architecture: registered name of the stock model, or class of a model that timm did not
            make.
        parameters: number of its parameters.
        largest_difference: largest absolute difference between the outputs before and after the
            files were written, on random images or the caller's inputs. If ``exact``, it is that of
            the source model and the model that was loaded from the folder. Otherwise it is that of
            the dense network made of the experts and the loaded one, and says nothing about the
            source model: 0.0 means only that the files hold that network. None if there was
            nothing to compare.
        exact: whether the dense model computes the source's function in eval mode, as the mean of
            EWA's experts does, and a model without experts. If not, it is another model than the
            source: validate it, or train it further, before you use it.
        library: library that loads it: ``"timm"``, ``"transformers"`` or ``"pytorch"``.
    """

    path: Path
    architecture: str
    parameters: int
    largest_difference: float | None
    exact: bool
    library: str


def export_dense(
    source: nn.Module | str | Path,
    output_dir: str | Path,
    method: str = "average",
    *,
    svd_ratio: float | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Export:
    """Write the dense form of an expert model.

    ``timm.create_model("local-dir:DIR", pretrained=True)`` loads it, and so does
    ``AutoModelForImageClassification.from_pretrained("DIR")`` of Hugging Face transformers.

    A model of transformers itself is written by its own ``save_pretrained`` for its own
    ``from_pretrained("DIR")``, without an image processor. Of transformers' wrappers of timm models
    the inner model is written, as above. Any other module, torchvision's for instance, is written
    as a state dict, for
    ``model.load_state_dict(safetensors.torch.load_file("DIR/model.safetensors"))``; config.json
    names its class.

    A model without expert layers is written unchanged. If timm lacks its class, as for WideNet or
    shifted patches, it becomes a dense model of this package. The written files are loaded again,
    by stock timm or the reader named above, and compared with the source before the folder appears
    under its name. A failure leaves no file behind.

    Args:
        source: a model, a train.py checkpoint, a safetensors file, a folder or an ``hf-hub:`` name;
            see :func:`timm_moe.checkpoints.source.load_source`.
        output_dir: folder to write; missing parents are made.
        method: how the experts become one network, see :func:`timm_moe.to_dense`.
        svd_ratio: for ``method="svd"``, see there.
        overwrite: replace the model in a folder that already holds something.
        **options: ``spec``, ``use_ema``, ``model_args``, ``license``, ``example_inputs``,
            ``label_names``, ``label_descriptions`` and ``problem_type``; see
            :class:`timm_moe.export.ModelOptions`. A model of transformers that does not state its
            image size needs ``example_inputs``; other modules are not compared without them.

    Raises:
        ValueError: if the source cannot be read, has no experts for a method but ``"average"``, has
            a layer that no stock model has, another number of classes than names are given, its
            weights or outputs are not finite, the stock model does not give the source's outputs,
            or an option has no meaning for such a model.
        TypeError: if there is no option of a name.
        OSError: if the source is missing, or the folder is in use or cannot be written.
    """
    settings = ModelOptions.of(export_dense, **options)
    target = check_target(output_dir, overwrite, source)
    layout = opened(source, settings, method)
    written = write_dense(layout, target, settings, method, svd_ratio, overwrite)
    architecture, size = architecture_of(written.model), parameters(written.model)
    return Export(
        target, architecture, size, written.largest_difference, written.exact, layout.library
    )


def export_moe(
    source: nn.Module | str | Path,
    output_dir: str | Path,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Write an expert model with its experts.

    ``timm.create_model("local-dir:DIR", pretrained=True)`` loads it where this package is
    installed, and so does Hugging Face transformers.

    The written files are loaded again before the folder appears under its name. The tensors must
    equal the model's bit for bit. The outputs on random images, or on ``example_inputs``, must be
    the same to 1e-4 of the largest.

    Args:
        source: an expert model of a registered name, or a file or folder of one, as for
            :func:`export_dense`.
        output_dir: folder to write; missing parents are made.
        overwrite: as for :func:`export_dense`.
        **options: the others of :func:`export_dense`, whose errors are raised too.

    Raises:
        ValueError: if the model has no expert layers or no registered name.
    """
    settings = ModelOptions.of(export_moe, **options)
    target = check_target(output_dir, overwrite, source)
    layout = opened(source, settings, None)
    write_moe(layout, target, settings, overwrite)
    return target


def check_target(
    output_dir: str | Path, overwrite: bool, source: nn.Module | str | Path | None = None
) -> Path:
    """Return the folder to write to.

    Raises:
        OSError: if the folder cannot be used, or holds something that may not be replaced.
        ValueError: if the name is no folder's, or the source is in the folder.
    """
    if str(output_dir).startswith(SOURCE_PREFIXES):
        raise ValueError(f"{output_dir} is a model name, but the output must be a local folder.")
    if not str(output_dir):
        raise ValueError("The output must be a folder, got an empty name.")
    target = local_path(output_dir)
    for file in (target, *(target / name for name in FILES)):
        check_apart(file, [source])
    check_folder(target, FILES, overwrite=True)
    if not overwrite and holds_something(target):
        raise FileExistsError(
            f"{target} is not empty; pass --overwrite (overwrite=True) to replace its model."
        )
    return target


# --- load and describe


def opened(
    source: nn.Module | str | Path,
    settings: ModelOptions,
    method: str | None = None,
) -> Format:
    """Load a source, or copy a model in memory, check it and describe it for export.

    The experts become one network by ``method``; with None they stay experts.
    """
    if isinstance(source, nn.Module):
        model = own_copy(source, settings.spec, settings.use_ema)
    else:
        _logger.info("Loading %s ...", source)
        model = load_source(source, settings.spec, settings.use_ema)
    if getattr(model, "peft_config", None):
        raise ValueError(
            f"{type(model).__name__} has adapters of PEFT: export what its merge_and_unload() "
            "returns."
        )
    require_finite_weights(model)
    history = history_of(model, method)
    spec = settings.spec or ModelSpec()
    origin = getattr(model, "origin", None)
    is_upcycled = origin is not None and origin.upcycled
    if spec.kwargs or spec.preprocessing or is_upcycled:
        history = replace(history, metrics={})  # they were measured of another function
    if is_upcycled:
        history = replace(history, experts=None, method=None)  # the experts were not trained
    return layout_of(model, settings, history, method)


def require_finite_weights(model: nn.Module) -> None:
    """Raise ValueError if a weight is NaN or Inf; a buffer may be a mask, which holds -Inf."""
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        is_sound = tensor.isfinite()
        if name not in parameters:
            is_sound = is_sound | (tensor == -math.inf)
        if not is_sound.all():
            raise ValueError(f"{name} holds NaN or Inf, so it is not exported.")


# --- make dense; write, verify and publish


@dataclass
class Written:
    """A folder that was written, and its model as the reader gave it."""

    layout: Format
    model: nn.Module
    largest_difference: float | None
    exact: bool


def write_dense(
    layout: Format,
    target: Path,
    settings: ModelOptions,
    method: str,
    svd_ratio: float | None = None,
    overwrite: bool = False,
) -> Written:
    """Make a described model dense and write it; see :func:`export_dense`.

    Its outputs must be the expert model's if the dense one computes the same function, else the
    dense one's.
    """
    inputs = inputs_for(layout.model, settings.example_inputs)
    layers = moe_layers(layout.model)
    has_exact_mean = all(layer.deploys_dense for layer in layers.values())
    exact = method == "average" and has_exact_mean
    if layers and not exact:
        better = " The mean of these experts, method='average', is exact." if has_exact_mean else ""
        _logger.warning(
            f"The dense model that method={method!r} makes of the experts is not the one that was "
            f"trained: validate it, or train it further, before you use it.{better}"
        )
    expected = source_outputs(layout.model, inputs) if exact else None
    if layers or method != "average":
        _logger.info("Making one network of the experts and checking the result ...")
        del layers  # each layer goes before the next network is made
        to_dense_(layout.model, method, svd_ratio)
    state_as_stock(layout.model)
    if not exact:
        expected = source_outputs(layout.model, inputs)
    return _write(layout, inputs, expected, exact, target, overwrite)


def write_moe(
    layout: Format,
    target: Path,
    settings: ModelOptions,
    overwrite: bool = False,
) -> Written:
    """Write a described model with its experts; see :func:`export_moe`."""
    _require_registered_experts(layout.model)
    inputs = inputs_for(layout.model, settings.example_inputs)
    expected = source_outputs(layout.model, inputs)
    return _write(layout, inputs, expected, True, target, overwrite)


def _require_registered_experts(model: nn.Module) -> None:
    if not moe_layers(model):
        raise ValueError(
            f"This {type(model).__name__} has no expert layers: leave out --moe, or take "
            "export_dense or push_dense, which write it unchanged."
        )
    architecture = architecture_of(model)
    is_of_dense_name = is_registered_here(architecture) and not isinstance(model, MoeMixin)
    if registrar(architecture) is None or is_of_dense_name:
        raise ValueError(
            f"This {type(model).__name__} was converted in memory, by convert_to_moe, and has no "
            "name that creates it: save its state_dict(), and load that into a model that was "
            "converted with the same options; or train a model with a name of this package, such "
            "as vit_small_ewa_moe."
        )


def _write(
    layout: Format, inputs: Any, expected: Any, exact: bool, target: Path, overwrite: bool
) -> Written:
    """Write, load, compare and publish the files."""
    with staged(target) as temporary:
        check_target(target, overwrite)  # another process may have written there since
        folder = temporary / "model"  # the temporary folder itself is closed to other users
        folder.mkdir()
        try:
            layout.write(folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"{target} could not be written: {error}") from error
        model = layout.read(folder)
        difference = compare(expected, model, inputs)
        names = sorted({file.name for file in folder.iterdir()} - {"config.json"})
        publish(folder, target, [*files_of_others(layout.library), *names, "config.json"])
    return Written(layout, model, difference, exact)
