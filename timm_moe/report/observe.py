"""One pass of a classifier over a folder of images: its predictions and the decisions of its routers.

Shape suffixes: I images, B images of a batch, S images that are shown, N rows of an image in a layer, P patches,
E experts, M members of an ensemble inside one model (1 without).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..analysis.data import Inference, batches, class_names
from ..analysis.evaluation import Figures, confidence, member_log_probabilities, predictions
from ..analysis.metrics import ensemble_log_probabilities
from ..analysis.routing_statistics import RouterCall, RouterWatcher, Routes
from ..convert.blocks import moe_layers
from ..model_config import preprocessing

#: Images that are shown with their patches; patches that are shown of each expert, at most one of an image.
SHOWN, SUREST = 12, 8
#: Bins of the histogram of entropies, from 0 to 1.
ENTROPY_BINS = 20


@dataclass(frozen=True)
class Patch:
    """A patch that an expert is sure of."""

    gate: float  #: probability of the expert, from 0 to 1
    pixels: Tensor  #: (3, H, W) bytes, the patch and its neighbours
    label: int  #: class of its image


@dataclass(frozen=True)
class LayerObservation:
    """The decisions of a router in one call of a forward in evaluation."""

    routes: Routes  #: the choices before capacities
    by_image: bool  #: all rows of an image go together
    dropped: int  #: number of choices that found no place
    #: (ENTROPY_BINS,) rows by the entropy of their router's probabilities over its maximum; None without probabilities
    entropy: Tensor | None
    grid: tuple[int, int] | None  #: rows and columns of the patches; None if the rows are not patches
    expert_SMP: Tensor  #: first choice of each patch of the images that are shown, E for one that was dropped
    gate_SMP: Tensor  #: its probability
    surest: list[list[Patch]]  #: patches with the largest gates of each expert
    next_EE: Tensor | None = None  #: rows by their first choices here and in the next layer; None for the last one

    @property
    def name(self) -> str:
        """The expert layer and the number of the call, if there are several."""
        return self.routes.layer


@dataclass(frozen=True)
class Observation:
    """The predictions of a classifier and the decisions of its routers."""

    classes: list[str]  #: names of all classes
    labels: Tensor  #: (I,)
    predicted: Tensor  #: (I,)
    confidence: Tensor  #: (I,) largest probability
    ood_confidence: Tensor | None  #: the same of other images
    figures: dict[str, float]  #: by the names in :data:`timm_moe.analysis.evaluation.LABELS`
    layers: list[LayerObservation]  #: the routed layers, in the order of their calls
    shown: list[int]  #: numbers of the images that are shown
    shown_pixels: Tensor  #: (S, 3, H, W) bytes, the model's input


@torch.inference_mode()
def observe(
    model: nn.Module,
    name: str,
    images: ImageDataset,
    ood_images: ImageDataset | None,
    inference: Inference,
) -> Observation:
    """Run a classifier from :func:`timm_moe.analysis.data.load_classifiers` on images; its name is for messages.

    Raises:
        ValueError: if an output is NaN, or an image cannot be read.
    """
    figures, config = Figures(model.num_classes), preprocessing(model)  # type: ignore[arg-type]
    number = min(len(images), SHOWN)
    shown = [(2 * index + 1) * len(images) // (2 * number) for index in range(number)]  # evenly spread
    labels, predicted, sure, pixels, ood = [], [], [], [], []
    layers: dict[str, _Layer] = {}
    routed = {path: layer for path, layer in moe_layers(model).items() if layer.routed_by.depends_on_input}
    first = 0
    with RouterWatcher(routed) as watcher:
        for (x,), label_B in batches([model], images, inference):
            log_p_BMC = member_log_probabilities(model, name, x, inference)
            label_B, pixels_B = label_B.cpu(), _bytes(x, config)
            own = [index - first for index in shown if first <= index < first + len(label_B)]
            for call in watcher.end_batch(label_B):
                layer = layers.setdefault(call.name, _Layer(call, model, pixels_B))
                layer.add(call, pixels_B, label_B, own)
            for here, there in pairwise(layers.values()):
                here.add_pairs(there)
            figures.update(log_p_BMC, label_B)
            labels.append(label_B)
            predicted.append(ensemble_log_probabilities(log_p_BMC).argmax(1))
            sure.append(confidence(log_p_BMC))
            pixels.append(pixels_B[own])
            first += len(label_B)
    if ood_images is not None:
        for log_p_BMC, _ in predictions([model], [name], ood_images, inference):
            figures.update_ood(log_p_BMC)
            ood.append(confidence(log_p_BMC))
    classes = class_names(images)
    routes = watcher.routes(classes.__getitem__)
    return Observation(
        classes=classes,
        labels=torch.cat(labels),
        predicted=torch.cat(predicted),
        confidence=torch.cat(sure),
        ood_confidence=torch.cat(ood) if ood else None,
        figures=figures.result(),
        layers=[layer.result(own) for layer, own in zip(layers.values(), routes, strict=True)],
        shown=shown,
        shown_pixels=torch.cat(pixels),
    )


class _Layer:
    """The observation of one call of a router, gathered batch by batch."""

    def __init__(self, call: RouterCall, model: nn.Module, pixels_B: Tensor):
        self.experts = call.layer.num_experts
        self.by_image = call.layer.routed_by.routing_unit == "image"
        self.copies = len(call.x) // len(pixels_B)  # one for each member
        self.rows = len(call.kept_TK) // len(call.x)
        self.grid = _grid(model, call.x, self.rows, pixels_B.shape[2:])
        self.dropped = 0
        self.entropy: Tensor | None = None
        self.surest: list[list[Patch]] = [[] for _ in range(self.experts)]
        self.next_EE: Tensor | None = None
        self._shown: list[tuple[Tensor, Tensor]] = []

    def add(self, call: RouterCall, pixels_B: Tensor, labels_B: Tensor, shown: Sequence[int]) -> None:
        """Take in a batch and the indices of its images that are shown."""
        probability = call.layer.routed_by.probabilities(call.x)
        if probability is not None:
            gate = probability.amax(-1)
            entropy = torch.special.entr(probability.double()).sum(-1) / math.log(max(2, probability.shape[-1]))
            histogram = torch.histc(entropy.float().cpu(), ENTROPY_BINS, 0, 1)
            self.entropy = histogram if self.entropy is None else self.entropy + histogram
        elif call.routing.gates is not None:
            gate = call.routing.gates[:, 0]
        else:
            gate = torch.ones(len(call.kept_TK))
        self.dropped += int((call.kept_TK == self.experts).sum())
        self.first_T = call.chosen_TK[:, 0]
        gate_BMP = self._patches(gate).float()
        self._shown.append((self._patches(call.kept_TK[:, 0])[shown], gate_BMP[shown]))
        if self.grid is not None:
            self._add_surest(self._patches(self.first_T), gate_BMP, pixels_B, labels_B)

    def add_pairs(self, following: "_Layer") -> None:
        """Count the last batch's rows by their experts here and in the next layer, if it sees the same rows."""
        here_T, there_T, experts = self.first_T, following.first_T, following.experts
        if len(here_T) != len(there_T):
            return
        known = (here_T < self.experts) & (there_T < experts)
        index = here_T[known] * experts + there_T[known]
        pairs_EE = index.bincount(minlength=self.experts * experts).view(self.experts, experts).cpu()
        self.next_EE = pairs_EE if self.next_EE is None else self.next_EE + pairs_EE

    def result(self, routes: Routes) -> LayerObservation:
        expert_SMP, gate_SMP = (torch.cat(parts) for parts in zip(*self._shown, strict=True))
        counts = (self.by_image, self.dropped, self.entropy, self.grid)
        return LayerObservation(routes, *counts, expert_SMP, gate_SMP, self.surest, self.next_EE)

    def _patches(self, of_rows: Tensor) -> Tensor:
        """Turn (T,) into (B, M, P); no patches without a grid."""
        of_rows = of_rows.view(-1, self.copies, self.rows).cpu()
        return of_rows[..., self.rows - self.grid[0] * self.grid[1] :] if self.grid else of_rows[..., :0]

    def _add_surest(self, expert_BMP: Tensor, gate_BMP: Tensor, pixels_B: Tensor, labels_B: Tensor) -> None:
        for expert in range(self.experts):
            gate_B, patch_B = torch.where(expert_BMP == expert, gate_BMP, -1.0).amax(1).max(1)
            found = [
                Patch(gate_B[index].item(), self._around(pixels_B[index], int(patch_B[index])), int(labels_B[index]))
                for index in gate_B.argsort(descending=True).tolist()[:SUREST]
                if gate_B[index] >= 0
            ]
            self.surest[expert] = sorted(self.surest[expert] + found, key=lambda patch: -patch.gate)[:SUREST]

    def _around(self, pixels: Tensor, patch: int) -> Tensor:
        """A patch with its neighbours; the whole image if it is routed as a whole."""
        if self.grid is None or self.by_image:
            return pixels
        rows, columns = self.grid
        height, width = pixels.shape[1] / rows, pixels.shape[2] / columns
        row, column = divmod(patch, columns)
        top = round(min(max(row - 1, 0), max(rows - 3, 0)) * height)
        left = round(min(max(column - 1, 0), max(columns - 3, 0)) * width)
        return pixels[:, top : top + round(3 * height), left : left + round(3 * width)].clone()


def _grid(model: Any, x: Tensor, rows: int, size: Sequence[int]) -> tuple[int, int] | None:
    """Find the rows and columns of the patches among the rows of an image."""
    if x.ndim == 4:  # (B, H, W, D)
        return (x.shape[1], x.shape[2])
    patches = rows - int(getattr(model, "num_prefix_tokens", 0))
    side = round((patches * size[0] / size[1]) ** 0.5)
    return (side, patches // side) if side and side * (patches // side) == patches else None


def _bytes(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return images (B, 3, H, W) as the bytes that they were before they were normalised."""
    mean, std = (torch.tensor(config[name], device=images.device).view(-1, 1, 1) for name in ("mean", "std"))
    pixels = ((images.float() * std + mean) * 255).round().clamp(0, 255).byte().cpu()
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]
