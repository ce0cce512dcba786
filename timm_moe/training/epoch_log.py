"""What the experts did in each epoch, in a file beside train.py's summary.csv: ``experts.json``."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..convert.blocks import whole_experts
from ..files import write_json
from ..layers import MoeMlp
from .averaging import ExpertWeightAveraging, living_layers, trained_layers
from .router_losses import by_block, summary_of_epoch

_logger = logging.getLogger(__name__)

FILE = "experts.json"


def write_epoch(folder: Path, epoch: int, optimizer: Optimizer) -> None:
    """Add an epoch that ends to the file; later ones, which an earlier run left there, are taken out of it.

    Nothing is written where the optimizer trains no experts. What goes wrong is a warning: it must not end a run.

    Args:
        folder: train.py's.
        epoch: number of the epoch, from 0.
        optimizer: of the run.
    """
    layers = sorted(trained_layers(optimizer, living_layers), key=by_block)
    if not layers:
        return
    try:
        earlier = [entry for entry in _epochs_so_far(folder) if entry["epoch"] < epoch]
        write_json(folder / FILE, {"epochs": [*earlier, _entry(epoch, optimizer, layers)]})
    except (OSError, ValueError) as error:
        _logger.warning("What the experts did in epoch %s is not in %s: %s", epoch, folder / FILE, error)


def _epochs_so_far(folder: Path) -> list[dict[str, Any]]:
    """The epochs of the file; a damaged file is moved aside."""
    try:
        return read_epochs(folder)
    except ValueError as error:
        aside = (folder / FILE).replace(folder / f"{FILE}.damaged")
        _logger.warning("%s It is now %s, and a new file begins.", error, aside)
        return []


def read_epochs(folder: Path) -> list[dict[str, Any]]:
    """The epochs of the file, in their order; none if there is no such file.

    Returns:
        Of each epoch its number ``epoch``, the ``share_rate`` of its last averaging (None without one), and ``layers``:
        of each its ``spread``, see :func:`spread`, and where it is routed its ``losses``, ``dropped`` and ``load``, see
        :class:`timm_moe.RoutingSummary`.

    Raises:
        ValueError: if the file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return []
    try:
        epochs = json.loads(file.read_text())["epochs"]
        for entry in epochs:
            _check_entry(entry)
        return sorted(epochs, key=lambda entry: entry["epoch"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged: it is not the list of epochs that training writes.") from error


def _check_entry(entry: dict[str, Any]) -> None:
    """Raise any of four errors if something is missing or of another kind."""
    numbers = [entry["share_rate"]]
    for layer in entry["layers"].values():
        numbers += [layer["spread"], layer.get("dropped"), *layer.get("losses", {}).values(), *layer.get("load", [])]
    whole = type(entry["epoch"]) is int
    if not whole or not all(number is None or type(number) in (int, float) for number in numbers):
        raise TypeError("what should be a number is none")


def spread(layer: MoeMlp) -> float | None:
    """How far the experts are from their mean: root of the mean squared distance, over the norm of the mean.

    All weights of an expert count as one vector. 0 if all are alike; about the root of E - 1 if they are independent.
    None where they are not in one piece (FSDP), or the mean is 0.
    """
    try:
        stacked = list(whole_experts(layer).values())
    except ValueError:
        return None
    if any(hasattr(tensor, "placements") for tensor in stacked):  # of several processes, of which only one is here
        return None
    with torch.no_grad():
        means = [tensor.float().mean(0) for tensor in stacked]
        distance = sum((tensor.float() - mean).square().sum() for tensor, mean in zip(stacked, means, strict=True))
        norm = sum(mean.square().sum() for mean in means)
        return float((distance / layer.num_experts / norm).sqrt()) if norm else None


def _entry(epoch: int, optimizer: Optimizer, layers: list[MoeMlp]) -> dict[str, Any]:
    averaging = ExpertWeightAveraging.of(optimizer)
    return {
        "epoch": epoch,
        "share_rate": None if averaging is None else averaging.share_rate,
        "layers": {layer.path or "experts": _of_layer(layer) for layer in layers},
    }


def _of_layer(layer: MoeMlp) -> dict[str, Any]:
    summary = summary_of_epoch(layer)
    return {"spread": spread(layer), **({} if summary is None else vars(summary))}
