"""Load: a model in memory, a file, a folder or a repository becomes a model to work with.

The steps for all but a model in memory are to read the weights (``reading``, ``layouts``), to
describe their model (``description``), and to build it and load them (``building``), for a file
(``checkpoint_file``) or a folder (``model_folder``).
"""

import logging
from pathlib import Path

from torch import Tensor, nn

from ..convert.check import computed_by, computing_hook
from ..convert.dense import require_weights
from ..convert.wrappers import copied, unwrapped
from ..files import local_path
from ..model_config import is_of_timm, state_preprocessing, timm_model_in
from .checkpoint_file import load_file
from .description import SOURCE_PREFIXES
from .image_settings import log_images_of
from .model_folder import folder_of, load_folder
from .model_spec import ModelSpec

_logger = logging.getLogger(__name__)


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
        use_ema: take the EMA weights of a train.py checkpoint; ignored, with a warning, for models
            and folders.

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
    if isinstance(source, nn.Module):
        if use_ema:
            _warn_of_one_kind(f"This {type(source).__name__}")
        if spec.preprocessing:
            return own_copy(source, spec)
        if is_of_timm(unwrapped(source)):
            log_images_of(unwrapped(source))
        return source

    path = folder_of(source)
    name = str(source) if path is None else f"local-dir:{path}"
    if name.startswith(SOURCE_PREFIXES):
        if use_ema:
            _warn_of_one_kind(str(source))
        return load_folder(name, spec)
    file = local_path(name)
    if not file.exists():
        raise FileNotFoundError(
            f"{name} is neither a file nor a folder; a repository on the Hub is written "
            "hf-hub:user/name."
        )
    return load_file(file, spec, use_ema)


def own_copy(model: nn.Module, spec: ModelSpec | None = None, use_ema: bool = False) -> nn.Module:
    """Copy a model in memory without its wrappers; the copy shares its tensors.

    The copy has no ``origin``: of its training nothing is known.

    Args:
        model: a model of any library. Of transformers' wrappers of timm models the inner model is
            taken.
        spec: the user's statements about the model.
        use_ema: has no effect but a warning; an error for a model that timm did not make.

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
        log_images_of(model, state_preprocessing(model, spec.preprocessing if spec else {}))
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


def _warn_of_one_kind(name: str) -> None:
    _logger.warning(
        f"{name} has one kind of weights, which are taken: EMA weights are in train.py's "
        "checkpoints."
    )
