"""Log of the experts in each epoch: ``experts.json``, a file beside train.py's summary.csv."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from ..convert.expert_layers import whole_experts
from ..convert.wrappers import is_sharded
from ..files import write_json
from ..layers import MoeMlp
from ..layers.living import living
from ..layers.router_totals import Reader
from .averaging import ExpertWeightAveraging
from .optimizers import parameter_ids, trained_layers
from .router_losses import summaries_for

_logger = logging.getLogger(__name__)

FILE = "experts.json"


def write_epoch(folder: Path, epoch: int, optimizer: Optimizer) -> None:
    """Add an epoch that ends to the file.

    Later epochs, which an earlier run left there, are taken out of it. Nothing is written if the
    optimizer trains no experts. An error of writing becomes a warning, as it must not end a run.

    Args:
        folder: folder of the file.
        epoch: number of the epoch.
        optimizer: optimizer of the run.
    """
    layers = trained_layers(parameter_ids(optimizer), living(MoeMlp))
    if not layers:
        return
    averaging = ExpertWeightAveraging.of(optimizer)
    statistics: dict[str, Any] = {}
    for layer in layers:
        path = layer.path
        statistics[path] = {"spread": relative_distance_to_mean(layer)}
        # There is no summary of a router that takes no records, or did not run in training.
        for summary in summaries_for(Reader.EPOCH, {path: layer}).values():
            statistics[path] |= vars(summary)
    share_rate = None if averaging is None else averaging.share_rate
    try:
        epochs = [entry for entry in read_epochs(folder) if entry["epoch"] < epoch]
        epochs.append({"epoch": epoch, "share_rate": share_rate, "layers": statistics})
        write_json(folder / FILE, {"epochs": epochs})
    except (OSError, ValueError) as error:
        _logger.warning(
            "The experts' statistics of epoch %s are not in %s: %s", epoch, folder / FILE, error
        )


def read_epochs(folder: Path) -> list[dict[str, Any]]:
    """Read the epochs of the file in their order; none if there is no such file.

    Returns:
        A dictionary for each epoch: its number ``epoch``, the ``share_rate`` of its last averaging
        (None without one), and its ``layers`` by name. A layer has a ``spread``, see
        :func:`relative_distance_to_mean`. One whose router takes records has ``losses``,
        ``dropped`` and ``load`` too, see :class:`timm_moe.RoutingSummary`.

    Raises:
        ValueError: if the file is damaged.
    """
    file = folder / FILE
    if not file.exists():
        return []
    try:
        epochs = json.loads(file.read_text(encoding="utf-8"))["epochs"]
        if not all(map(_is_epoch, epochs)):
            raise ValueError("an entry is no epoch's")
        return sorted(epochs, key=lambda entry: entry["epoch"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged: it is not the list of epochs that training writes."
        ) from error


def _is_epoch(entry: dict[str, Any]) -> bool:
    """Tell if an entry of the file holds numbers where :func:`write_epoch` writes numbers."""
    layers = entry["layers"].values()
    numbers = [entry["share_rate"]]
    for layer in layers:
        numbers += [layer.get("spread"), layer.get("dropped"), *layer.get("load", [])]
        numbers += layer.get("losses", {}).values()
    return type(entry["epoch"]) is int and all(
        number is None or type(number) in (int, float) for number in numbers
    )


@torch.no_grad()
def relative_distance_to_mean(layer: MoeMlp) -> float | None:
    """Return how far the experts are apart, relative to their mean.

    It is the root of the mean squared distance of the experts from their mean, divided by the norm
    of the mean. All weights of an expert count as one vector. The result is 0, but for rounding, if
    all experts are equal, and about ``sqrt(E - 1)`` if they are independent. It is None if they are
    not in one piece (FSDP), or the mean is 0.
    """
    try:
        stacked = list(whole_experts(layer).values())
    except ValueError:
        return None
    if any(map(is_sharded, stacked)):
        return None
    means = [tensor.float().mean(0) for tensor in stacked]
    distance = sum(
        (tensor.float() - mean).square().sum() for tensor, mean in zip(stacked, means, strict=True)
    )
    norm = sum(mean.square().sum() for mean in means)
    return float((distance / layer.num_experts / norm).sqrt()) if norm else None
