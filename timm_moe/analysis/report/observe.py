"""One pass of a classifier over a folder of images.

It gathers the predictions and the decisions of the routers.

Shape suffixes: I images, B images of a batch, S images that are shown, N rows of an image in a
layer, P patches, E experts, M members of an ensemble inside one model (1 without).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..data import Inference, class_names, image_bytes
from ..evaluation import Figures, predictions, warn_of_bce
from ..routes.mixtures import Mixture, add_calls, mixing_layers
from ..routes.statistics import RouterCall, RouterWatcher, Routes, patch_grid, routed_layers

#: Images that are shown with their patches.
SHOWN = 12
#: Patches that are shown of each expert, at most one of an image.
SUREST = 8
#: Bins of the histogram of entropies, from 0 to 1.
ENTROPY_BINS = 20


@dataclass(frozen=True)
class Patch:
    """A patch that an expert is sure of."""

    gate: float  #: probability of the expert, from 0 to 1
    pixels: Tensor  #: (3, H, W) bytes, the patch and its neighbours
    label: int  #: class of its image


@dataclass
class LayerObservation:
    """The decisions of a router in one call of a forward in evaluation, gathered batch by batch."""

    by_image: bool  #: all rows of an image go together
    #: rows and columns of the patches; None if the rows are not patches
    grid: tuple[int, int] | None
    surest: list[list[Patch]]  #: patches with the largest gates of each expert
    dropped: int = 0  #: number of choices that found no place
    #: (ENTROPY_BINS,) rows by the entropy of their router's probabilities over its maximum; None
    #: without probabilities
    entropy: Tensor | None = None
    #: first choice of each patch of the images that are shown, E for one that was dropped
    expert_SMP: Tensor = field(default_factory=partial(torch.empty, 0, dtype=torch.long))
    gate_SMP: Tensor = field(default_factory=partial(torch.empty, 0))  #: its probability
    #: the choices before capacities; they are there after the last batch
    routes: Routes = None  # type: ignore[assignment]

    @property
    def name(self) -> str:
        """The expert layer and the number of the call, if there are several."""
        return self.routes.layer

    def add(
        self, call: RouterCall, pixels_B: Tensor, labels_B: Tensor, shown: Sequence[int]
    ) -> None:
        """Take in a batch and the indices of its images that are shown."""
        images, copies = len(pixels_B), call.layer.router.copies()
        gate_BMP = self._patches(self._gates(call), images, copies).float()
        self._count_dropped(call)
        if shown:
            kept_BMP = self._patches(call.kept_TK[:, 0], images, copies)
            self.expert_SMP = torch.cat([self.expert_SMP, kept_BMP[shown]])
            self.gate_SMP = torch.cat([self.gate_SMP, gate_BMP[shown]])
        if self.grid is not None:
            expert_BMP = self._patches(call.chosen_TK[:, 0], images, copies)
            self._add_surest(expert_BMP, gate_BMP, pixels_B, labels_B)

    def _patches(self, of_rows: Tensor, images: int, copies: int) -> Tensor:
        """Turn a tensor of rows (T,) into one of patches (B, M, P); none without a grid."""
        patches = self.grid[0] * self.grid[1] if self.grid else 0
        of_images = of_rows.view(images, copies, -1)
        return of_images[..., of_images.shape[2] - patches :].cpu()

    def _gates(self, call: RouterCall) -> Tensor:
        """Return the gate of each row's first choice, (T,), and count the entropies of the rows."""
        probability = call.layer.router.probabilities(call.x)
        if probability is not None:
            width = probability.shape[-1]  # the experts of a member
            highest = math.log(max(2, width))
            entropy = torch.special.entr(probability.cpu().double()).sum(-1) / highest
            # Of nearly even gates it may round to more than 1.
            histogram = torch.histc(entropy.clamp(max=1).float(), ENTROPY_BINS, 0, 1)
            self.entropy = histogram if self.entropy is None else self.entropy + histogram
            return probability.gather(1, call.chosen_TK[:, :1] % width)[:, 0]
        weights = call.routing.weights()
        return torch.ones(len(call.kept_TK)) if weights is None else weights[:, 0]

    def _count_dropped(self, call: RouterCall) -> None:
        """Count the choices that capacities left out; what a row did not choose is none of them."""
        # All rows of an image that is routed as a whole are one choice.
        step = len(call.kept_TK) // len(call.x) if self.by_image else 1
        chosen, kept = (
            int((expert_TK[::step] < call.layer.num_experts).sum())
            for expert_TK in (call.chosen_TK, call.kept_TK)
        )
        self.dropped += chosen - kept

    def _add_surest(
        self, expert_BMP: Tensor, gate_BMP: Tensor, pixels_B: Tensor, labels_B: Tensor
    ) -> None:
        for expert, best in enumerate(self.surest):
            gate_B, patch_B = torch.where(expert_BMP == expert, gate_BMP, -1.0).amax(1).max(1)
            best += [
                Patch(
                    gate_B[index].item(),
                    self._around(pixels_B[index], int(patch_B[index])),
                    int(labels_B[index]),
                )
                for index in gate_B.argsort(descending=True).tolist()[:SUREST]
                if gate_B[index] >= 0
            ]
            self.surest[expert] = sorted(best, key=lambda patch: -patch.gate)[:SUREST]

    def _around(self, pixels: Tensor, patch: int) -> Tensor:
        """Return a patch with its neighbours, or the whole image if it is routed as a whole."""
        if self.grid is None or self.by_image:
            return pixels.clone()  # of this image alone, not of its batch
        rows, columns = self.grid
        height, width = pixels.shape[1] / rows, pixels.shape[2] / columns
        row, column = divmod(patch, columns)
        top = round(min(max(row - 1, 0), max(rows - 3, 0)) * height)
        left = round(min(max(column - 1, 0), max(columns - 3, 0)) * width)
        return pixels[:, top : top + round(3 * height), left : left + round(3 * width)].clone()


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
    #: the layers of Soft MoE and Expert Choice
    mixtures: list[Mixture] = field(default_factory=list)


@torch.inference_mode()
def observe(
    model: nn.Module,
    name: str,
    images: ImageDataset,
    ood_images: ImageDataset | None,
    inference: Inference,
) -> Observation:
    """Run a classifier on images.

    The classifier is from :func:`timm_moe.analysis.data.load_classifiers`; its name is for
    messages.

    Raises:
        ValueError: if an output is NaN, or an image cannot be read.
    """
    warn_of_bce([model], [name])
    figures = Figures(model.num_classes)  # type: ignore[arg-type]
    shown, pixels = _evenly_spread(len(images), SHOWN), []
    layers: dict[str, LayerObservation] = {}
    mixtures: dict[str, Mixture] = {}
    first = 0  # number of the batch's first image
    with RouterWatcher({**routed_layers(model), **mixing_layers(model)}) as watcher:
        for (x,), log_p_BMC, label_B in predictions([model], [name], images, inference):
            pixels_B = image_bytes(x, model)
            own = [index - first for index in shown if first <= index < first + len(label_B)]
            calls = watcher.end_batch(label_B)
            add_calls(mixtures, calls, model, x, own)
            for call in calls:
                if call.layer.router.depends_on_input:
                    layer = layers.setdefault(call.name, _observation(call, model, pixels_B))
                    layer.add(call, pixels_B, label_B, own)
            figures.update(log_p_BMC, label_B)
            if own:
                pixels.append(pixels_B[own])
            first += len(label_B)
    if ood_images is not None:
        for _, log_p_BMC, _ in predictions([model], [name], ood_images, inference):
            figures.update_ood(log_p_BMC)

    classes = class_names(images)
    for layer, routes in zip(layers.values(), watcher.routes(classes.__getitem__), strict=True):
        layer.routes = routes
    return Observation(
        classes=classes,
        labels=figures.labels.tensor(),
        predicted=figures.predicted.tensor(),
        confidence=figures.confidence.tensor(),
        ood_confidence=None if ood_images is None else figures.ood_confidence.tensor(),
        figures=figures.result(),
        layers=[*layers.values()],
        shown=shown,
        shown_pixels=torch.cat(pixels),
        mixtures=[*mixtures.values()],
    )


def _evenly_spread(total: int, most: int) -> list[int]:
    """Return at most so many of the numbers below a total, in equal distances."""
    number = min(total, most)
    return [(2 * index + 1) * total // (2 * number) for index in range(number)]


def _observation(call: RouterCall, model: nn.Module, images: Tensor) -> LayerObservation:
    """Begin an observation of a call in forwards of images (B, 3, H, W)."""
    by_image = call.layer.router.routing_unit == "image"
    apart = len(call.x) != len(images) * call.layer.router.copies()  # MobileViT's parts of patches
    grid = None if apart else patch_grid(model, call.x, images.shape[2:])
    return LayerObservation(by_image, grid, surest=[[] for _ in range(call.layer.num_experts)])
