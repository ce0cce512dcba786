"""Places of the weights in a checkpoint: train.py's own, else those of other trainers."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict
from torch import Tensor

from ..console import shown

_logger = logging.getLogger(__name__)

#: Prefixes that other frameworks put before the names of a model's weights.
_WRAPPERS = ("model", "net", "network", "backbone", "module", "timm_model")


def weights_in(checkpoint: Mapping[str, Any], path: Path, use_ema: bool) -> dict[str, Tensor]:
    """Take a state dict out of a checkpoint.

    train.py writes it as ``state_dict`` and ``state_dict_ema``, others as ``model``, or alone.

    Raises:
        ValueError: if there is no such state dict, no EMA weights, or weights twice.
    """
    weights = checkpoint.get("state_dict", checkpoint.get("model", checkpoint))
    if use_ema and holds_ema(checkpoint):
        weights = checkpoint["state_dict_ema"]
    elif use_ema:
        raise ValueError(
            f"{path} has no state_dict_ema, which train.py writes with --model-ema: write the "
            "weights to take to a file of their own, by torch.save(weights, file)."
        )
    elif weights is checkpoint and holds_ema(checkpoint):
        raise ValueError(f"{path} holds EMA weights alone: --use-ema (use_ema=True) takes them.")
    weights = require_tensors(weights, path)
    # torch's AveragedModel holds its count of updates beside the model, which is its module.
    own = {name: tensor for name, tensor in weights.items() if name != "n_averaged"}
    if all(name.startswith("module.") for name in own):
        weights = own
    # clean_state_dict takes off the names of wrappers around the whole model alone.
    named = {
        name.replace("_orig_mod.", ""): tensor for name, tensor in clean_state_dict(weights).items()
    }
    if len(named) < len(weights):
        raise ValueError(
            f"{path} holds weights twice, with and without the prefix of a wrapper (module, "
            "_orig_mod): write the weights of one model alone."
        )
    return named


def holds_ema(checkpoint: Mapping[str, Any]) -> bool:
    """Tell if a checkpoint has the EMA weights of train.py."""
    return checkpoint.get("state_dict_ema") is not None


def require_tensors(weights: Any, path: Path) -> dict[str, Tensor]:
    """Return weights; raise ValueError unless they are tensors by name."""
    entries = weights if isinstance(weights, dict) else {"state_dict": weights}
    others = [
        name
        for name, value in entries.items()
        if not (
            entries is weights
            and isinstance(name, str)
            and isinstance(value, Tensor)
            and value.layout is torch.strided
            and not value.is_meta
        )
    ]
    if others:
        kind = type(entries[others[0]]).__name__
        raise ValueError(
            f"{path} has no state dict of tensors where it is looked for, as {shown(others[0])} is "
            f"of type {kind}: write the weights to a file of their own, by "
            "torch.save(model.state_dict(), file)."
        )
    return weights


def require_kinds(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Any) -> None:
    """Raise ValueError unless weights hold the same kinds of numbers as a model.

    Loading would convert them without a word. The kinds are floating-point, complex, integer and
    boolean numbers. float32 in the place of int64 is let through, since timm's avg_checkpoints.py
    writes integers so.
    """
    for name in weights.keys() & expected.keys():
        held, wanted = weights[name].dtype, expected[name].dtype
        is_averaged = (held, wanted) == (torch.float32, torch.int64)
        if _kind(held) != _kind(wanted) and not is_averaged:
            raise ValueError(f"{path} holds {name} as {held}, where the model has {wanted}.")


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def without_wrapper(
    weights: dict[str, Tensor], own_names: Iterable[str], path: Path
) -> dict[str, Tensor]:
    """Return a model's weights without the prefix of another framework's wrapper.

    Lightning, for example, writes ``model.`` before each name.

    Args:
        weights: by their names in the file.
        own_names: names of the model's weights.
        path: of the file, for messages.

    Raises:
        ValueError: if there are the weights of several models.
    """
    own = {name.partition(".")[0] for name in own_names}
    if own <= {name.partition(".")[0] for name in weights}:
        return weights
    found = {}
    for prefix in (f"{wrapper}." for wrapper in _WRAPPERS if wrapper not in own):
        part = {
            name.removeprefix(prefix): tensor
            for name, tensor in weights.items()
            if name.startswith(prefix)
        }
        part = clean_state_dict(part)  # the model may be wrapped itself
        if own <= {name.partition(".")[0] for name in part}:
            found[prefix] = part

    if not found:
        return weights
    if len(found) > 1:
        raise ValueError(
            f"{path} holds several models, under {' and '.join(found)}: write the weights of one "
            "alone."
        )

    ((prefix, part),) = found.items()
    others = [name for name in weights if not name.startswith(prefix)]
    left = (
        f"; not taken: {', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
        if others
        else ""
    )
    _logger.info(f"{path} holds the model's weights under {prefix[:-1]}{left}.")
    return part
