"""One pass of a classifier over a folder of images: what it predicts, and what its routers decide.

Shape suffixes: I images, S images that are shown, N rows of an image in a layer, P patches, E experts, C classes,
M members of an ensemble inside one model (1 without).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..analysis.data import Inference, batches, class_names
from ..analysis.evaluation import Figures, confidence, member_log_probabilities, predictions
from ..analysis.metrics import ensemble_log_probabilities
from ..analysis.routes import call_names
from ..convert.blocks import moe_layers
from ..layers import MoeMlp, Routing
from ..model_config import preprocessing

#: Images that are shown with their patches.
SHOWN = 12
#: Patches that are shown of each expert, at most one of an image.
SUREST = 8
#: Bins of the histogram of entropies, from 0 to 1.
ENTROPY_BINS = 20


@dataclass(frozen=True)
class Patch:
    """A patch that an expert is sure of.

    Attributes:
        gate: how likely the router finds the expert, from 0 to 1.
        pixels: (3, H, W) bytes, the patch and what is around it.
        label: class of its image.
    """

    gate: float
    pixels: Tensor
    label: int


@dataclass
class LayerObservation:
    """What one call of a router decides in evaluation.

    Attributes:
        name: of the expert layer; of one that is called several times in a forward, with the number of the call.
        experts: E.
        top_k: choices of a row.
        by_image: whether all rows of an image go together.
        count_IME: choices of each image's rows for each expert, before capacities.
        dropped: number of choices that found no place.
        entropy: (ENTROPY_BINS,) number of rows by the entropy of their router's probabilities over its maximum; None of
            a router without them.
        grid: rows and columns of the patches; None where the rows are not those of patches.
        expert_SMP: first choice of each patch of the images that are shown, E for one that was dropped.
        gate_SMP: how likely the router finds it.
        surest: of each expert the patches with the largest gates.
        next_EE: rows by their first choices here and in the next layer; None of the last one.
    """

    name: str
    experts: int
    top_k: int
    by_image: bool
    count_IME: Tensor
    dropped: int
    entropy: Tensor | None
    grid: tuple[int, int] | None
    expert_SMP: Tensor
    gate_SMP: Tensor
    surest: list[list[Patch]]
    next_EE: Tensor | None = None

    @property
    def members(self) -> int:
        """M, for each of which the layer sees an image once."""
        return self.count_IME.shape[1]

    @property
    def count_IE(self) -> Tensor:
        """Choices of all members."""
        return self.count_IME.sum(1)

    @property
    def load(self) -> Tensor:
        """(E,) share of the choices that fell on each expert."""
        count_E = self.count_IE.sum(0).double()
        return count_E / count_E.sum().clamp(min=1)

    def share_CE(self, labels: Tensor, classes: int) -> Tensor:
        """Share of each class's choices that fell on each expert."""
        count_CE = self._count_MCE(labels, classes).sum(0)
        return count_CE / count_CE.sum(1, keepdim=True).clamp(min=1)

    def class_information(self, labels: Tensor, classes: int) -> float:
        """How much the class of an image says about the expert, from 0 to 1.

        I(class; expert) / H(expert), of an ensemble inside one model for a known member.
        """
        joint_MCE = self._count_MCE(labels, classes)
        joint_MCE /= joint_MCE.sum((1, 2), keepdim=True).clamp(min=1)
        entropy = _entropy(joint_MCE.sum(1))
        information = entropy + _entropy(joint_MCE.sum(2)) - _entropy(joint_MCE)
        return information / entropy if entropy > 0 else 0.0

    def _count_MCE(self, labels: Tensor, classes: int) -> Tensor:
        count_MCE = torch.zeros(self.members, classes, self.experts, dtype=torch.double)
        return count_MCE.index_add_(1, labels, self.count_IME.transpose(0, 1).double())


@dataclass(frozen=True)
class Observation:
    """What a classifier does on images.

    Attributes:
        classes: names of all C classes.
        labels: (I,).
        predicted: (I,).
        confidence: (I,) largest probability.
        ood_confidence: the same of other images; None without any.
        figures: those of :data:`timm_moe.analysis.evaluation.LABELS`.
        layers: of the routed layers, in the order of their calls.
        shown: numbers of the images that are shown.
        shown_pixels: (S, 3, H, W) bytes, as the model sees them.
    """

    classes: list[str]
    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    ood_confidence: Tensor | None
    figures: dict[str, float]
    layers: list[LayerObservation]
    shown: list[int]
    shown_pixels: Tensor


@torch.inference_mode()
def observe(
    model: nn.Module,
    name: str,
    images: ImageDataset,
    ood_images: ImageDataset | None = None,
    inference: Inference | None = None,
) -> Observation:
    """Run a classifier on images.

    Args:
        model: from :func:`timm_moe.analysis.data.load_classifiers`.
        name: for messages.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        ood_images: of other data.
        inference: how forwards are run.

    Raises:
        ValueError: if an output is NaN, or an image cannot be read.
    """
    inference = inference or Inference()
    figures, config = Figures(model.num_classes), preprocessing(model)  # type: ignore[arg-type]
    shown = _evenly(len(images), SHOWN)
    labels, predicted, sure, pixels, ood = [], [], [], [], []
    watcher, first = _Watcher(model), 0
    with watcher.watching():
        for (x,), label_B in batches([model], images, inference):
            log_p_BMC = member_log_probabilities(model, name, x, inference)
            label_B, bytes_B = label_B.cpu(), _bytes(x, config)
            own = [number - first for number in shown if first <= number < first + len(label_B)]
            watcher.end_batch(bytes_B, label_B, own)
            figures.update(log_p_BMC, label_B)
            labels.append(label_B)
            predicted.append(ensemble_log_probabilities(log_p_BMC).argmax(1))
            sure.append(confidence(log_p_BMC))
            pixels.append(bytes_B[own])
            first += len(label_B)
    if ood_images is not None:
        for log_p_BMC, _ in predictions([model], [name], ood_images, inference):
            figures.update_ood(log_p_BMC)
            ood.append(confidence(log_p_BMC))
    return Observation(
        classes=class_names(images),
        labels=torch.cat(labels),
        predicted=torch.cat(predicted),
        confidence=torch.cat(sure),
        ood_confidence=torch.cat(ood) if ood else None,
        figures=figures.result(),
        layers=watcher.layers(),
        shown=shown,
        shown_pixels=torch.cat(pixels),
    )


class _Watcher:
    """Gathers what the routers of a model decide, batch by batch."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._layers = {path: layer for path, layer in moe_layers(model).items() if layer.routed_by.depends_on_input}
        self._calls: list[tuple[str, Tensor, Routing]] = []
        self._gathered: list[list[LayerObservation]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles = [
            layer.router.register_forward_hook(partial(self._note, path)) for path, layer in self._layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, path: str, router: nn.Module, inputs: tuple[Tensor], routing: Routing) -> None:
        self._calls.append((path, inputs[0], routing))

    def end_batch(self, pixels: Tensor, labels: Tensor, shown: Sequence[int]) -> None:
        """Take what was noted since the last batch.

        Args:
            pixels: (B, 3, H, W) bytes of its images.
            labels: (B,).
            shown: which of them are shown.
        """
        names = call_names([path for path, _, _ in self._calls])
        observed, choices = [], []
        for name, (path, x, routing) in zip(names, self._calls, strict=True):
            layer, choice_BN = self._observe(name, path, x, routing, pixels, labels, shown)
            observed.append(layer)
            choices.append(choice_BN)
        for layer, following, here_BN, there_BN in zip(observed, observed[1:], choices, choices[1:], strict=False):
            layer.next_EE = _pairs(here_BN, there_BN, layer.experts, following.experts)
        self._gathered.append(observed)
        self._calls = []

    def _observe(
        self, name: str, path: str, x: Tensor, routing: Routing, pixels: Tensor, labels: Tensor, shown: Sequence[int]
    ) -> tuple[LayerObservation, Tensor]:
        layer, batch = self._layers[path], len(pixels)
        kept_BNK = routing.experts().reshape(batch, -1, routing.slots.shape[1])
        dropped = int((kept_BNK == layer.num_experts).sum())
        chosen_BNK = _choices(layer, x).reshape(kept_BNK.shape) if dropped else kept_BNK
        first_BN = chosen_BNK[..., 0]
        probability = layer.routed_by.probabilities(x)
        gate_BN = _gates(probability, routing).reshape(batch, -1)
        copies = len(x) // batch  # of an ensemble inside one model
        chosen_BMR = chosen_BNK.reshape(batch, copies, -1)
        count_BME = chosen_BMR.new_zeros(batch, copies, layer.num_experts + 1)
        count_BME.scatter_add_(2, chosen_BMR, torch.ones_like(chosen_BMR))
        rows = first_BN.shape[1] // copies
        grid = _grid(self._model, x, rows, pixels.shape[2:])
        patches = slice(rows - grid[0] * grid[1], rows) if grid else slice(0)
        by_image = layer.routed_by.routing_unit == "image"
        first_BMP, kept_BMP = (
            expert_BN.unflatten(1, (copies, rows))[..., patches].cpu() for expert_BN in (first_BN, kept_BNK[..., 0])
        )
        gate_BMP = gate_BN.unflatten(1, (copies, rows))[..., patches].float().cpu()
        observed = LayerObservation(
            name,
            layer.num_experts,
            kept_BNK.shape[2],
            by_image,
            count_BME[..., :-1].int().cpu(),
            dropped,
            None if probability is None else _entropies(probability),
            grid,
            kept_BMP[shown],
            gate_BMP[shown],
            [
                _surest(expert, first_BMP, gate_BMP, grid, pixels, labels, by_image)
                for expert in range(layer.num_experts)
            ],
        )
        return observed, first_BN

    def layers(self) -> list[LayerObservation]:
        """Of all batches."""
        return [_joined(parts) for parts in zip(*self._gathered, strict=True)]


def _joined(parts: Sequence[LayerObservation]) -> LayerObservation:
    first = parts[0]
    surest = [
        sorted((patch for part in parts for patch in part.surest[expert]), key=lambda patch: -patch.gate)[:SUREST]
        for expert in range(first.experts)
    ]
    return LayerObservation(
        first.name,
        first.experts,
        first.top_k,
        first.by_image,
        torch.cat([part.count_IME for part in parts]),
        sum(part.dropped for part in parts),
        _sum([part.entropy for part in parts]),
        first.grid,
        torch.cat([part.expert_SMP for part in parts]),
        torch.cat([part.gate_SMP for part in parts]),
        surest,
        _sum([part.next_EE for part in parts]),
    )


def _entropy(probability: Tensor) -> float:
    return torch.special.entr(probability).sum().item()


def _sum(tensors: Sequence[Tensor | None]) -> Tensor | None:
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(known).sum(0) if known else None


def _evenly(length: int, wanted: int) -> list[int]:
    """So many different numbers below a length, evenly spread; all if there are no more."""
    number = min(length, wanted)
    return [(2 * index + 1) * length // (2 * number) for index in range(number)]


def _choices(layer: MoeMlp, x: Tensor) -> Tensor:
    """(T, K) the expert of each choice before capacities; E where a router of somebody else drops it anyhow."""
    with layer.routed_by.dropping_nothing():
        return layer.router.forward(x).experts()


def _gates(probability: Tensor | None, routing: Routing) -> Tensor:
    """(T,) how likely the first choice of each row is; its weight, where the router has no probabilities."""
    if probability is not None:
        return probability.amax(-1)
    return torch.ones(len(routing.slots)) if routing.gates is None else routing.gates[:, 0]


def _entropies(probability: Tensor) -> Tensor:
    """Histogram of the rows' entropies over the largest possible."""
    options = max(2, probability.shape[-1])
    entropy = torch.special.entr(probability.double()).sum(-1) / torch.tensor(float(options)).log()
    return torch.histc(entropy.float().cpu(), ENTROPY_BINS, 0, 1)


def _pairs(here_BN: Tensor, there_BN: Tensor, experts: int, next_experts: int) -> Tensor | None:
    """(E, E') rows by two choices; None where the two layers have other rows."""
    if here_BN.shape != there_BN.shape:
        return None
    known = (here_BN < experts) & (there_BN < next_experts)
    index = here_BN[known] * next_experts + there_BN[known]
    return index.bincount(minlength=experts * next_experts).view(experts, next_experts).cpu()


def _grid(model: Any, x: Tensor, rows: int, size: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of the patches among the rows of an image."""
    if x.ndim == 4:  # (B, H, W, D)
        return (x.shape[1], x.shape[2])
    patches = rows - int(getattr(model, "num_prefix_tokens", 0))
    height, width = size
    side = round((patches * height / width) ** 0.5)
    return (side, patches // side) if side and side * (patches // side) == patches else None


def _surest(
    expert: int,
    expert_BMP: Tensor,
    gate_BMP: Tensor,
    grid: tuple[int, int] | None,
    pixels: Tensor,
    labels: Tensor,
    by_image: bool,
) -> list[Patch]:
    if grid is None:
        return []
    gate_B, place_B = torch.where(expert_BMP == expert, gate_BMP, -1.0).amax(1).max(1)
    best = [index for index in gate_B.argsort(descending=True).tolist()[:SUREST] if gate_B[index] >= 0]
    return [
        Patch(
            gate_B[index].item(),
            pixels[index] if by_image else _around(pixels[index], int(place_B[index]), grid),
            int(labels[index]),
        )
        for index in best
    ]


def _around(pixels: Tensor, place: int, grid: tuple[int, int]) -> Tensor:
    """A patch with its neighbours."""
    height, width = pixels.shape[1] / grid[0], pixels.shape[2] / grid[1]
    row, column = divmod(place, grid[1])
    top = round(min(max(row - 1, 0), max(grid[0] - 3, 0)) * height)
    left = round(min(max(column - 1, 0), max(grid[1] - 3, 0)) * width)
    return pixels[:, top : top + round(3 * height), left : left + round(3 * width)].clone()


def _bytes(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Images as they were before they were normalised, (B, 3, H, W) bytes."""
    mean, std = (torch.tensor(config[name], device=images.device).view(-1, 1, 1) for name in ("mean", "std"))
    pixels = ((images.float() * std + mean) * 255).round().clamp(0, 255).byte().cpu()
    return pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]
