"""Similarity of the experts of a layer: of their weights, and of their outputs on the same rows.

Shape suffixes: T rows, D width, E experts.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ....convert.expert_layers import moe_layers, whole_experts
from ....layers import MoeMlp, routing_to
from ....training.epoch_log import relative_distance_to_mean
from ...data import Inference, batches, in_eval_mode
from ...images import chosen
from .. import charts
from ..page import Part, Section

#: Largest number of rows of a layer's input on which the outputs of its experts are compared.
ROWS = 512
#: Images that these rows come from.
IMAGES = 16
#: Explains the distance of the experts from their mean.
DISTANCE = (
    "The distance is divided by the size (the norm) of that mean: at 0 all experts are equal, and "
    "near √(E - 1), for E experts, they have nothing in common."
)


@dataclass(frozen=True)
class ExpertSimilarity:
    """Similarity of the experts of a layer."""

    layer: str  #: its name
    weights_EE: Tensor  #: cosine of the weights of two experts
    outputs_EE: Tensor  #: cosine of their outputs, on average over rows
    spread: float | None  #: see :func:`timm_moe.training.epoch_log.relative_distance_to_mean`


@torch.inference_mode()
def expert_similarity(
    model: nn.Module, images: ImageDataset, inference: Inference
) -> list[ExpertSimilarity]:
    """Compare the experts of each layer of a model on the rows that some of the images give it."""
    layers = moe_layers(model)
    some = range(0, len(images), max(1, len(images) // IMAGES))[:IMAGES]
    rows: dict[str, list[Tensor]] = defaultdict(list)  # of all batches

    def keep(path: str, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows[path].append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    similarities = []
    with in_eval_mode([model]), ExitStack() as hooks:
        for path, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(keep, path)).remove)
        for (x,), _ in batches([model], chosen(images, some), inference):
            model(x)
        for path, layer in layers.items():
            stacked = whole_experts(layer).values()
            weights_ED = torch.cat(
                [tensor.float().reshape(layer.num_experts, -1) for tensor in stacked], 1
            )
            x_TD = torch.cat(rows[path])
            x_TD = x_TD[:: math.ceil(len(x_TD) / ROWS)]
            outputs = [_output(layer, expert, x_TD).float() for expert in range(layer.num_experts)]
            cosines = _cosines(weights_ED.unsqueeze(1)), _cosines(torch.stack(outputs))
            similarities.append(ExpertSimilarity(path, *cosines, relative_distance_to_mean(layer)))
    return similarities


def _output(layer: MoeMlp, expert: int, x_TD: Tensor) -> Tensor:
    choice_T1 = torch.full((len(x_TD), 1), expert, device=x_TD.device)
    routing = routing_to(choice_T1, torch.ones_like(choice_T1, dtype=x_TD.dtype), layer.num_experts)
    return MoeMlp.compute(layer, x_TD, routing)  # of EWA too, which in eval mode takes the mean


def _cosines(x_ETD: Tensor) -> Tensor:
    """Return the means over the rows, (E, E)."""
    unit_ETD = nn.functional.normalize(x_ETD, dim=2)
    return torch.einsum("etd,ftd->ef", unit_ETD, unit_ETD).cpu() / x_ETD.shape[1]


def similarity_section(similarities: Sequence[ExpertSimilarity]) -> Section | None:
    """Show all cosines in one chart; None for a model without expert layers."""
    if not similarities:
        return None
    rows = [
        {"of": f"{compared}, {layer.layer}", "expert": expert, "other": other, "value": cosine}
        for compared in ("weights", "outputs")
        for layer in similarities
        for expert, cosines in enumerate(getattr(layer, f"{compared}_EE").tolist())
        for other, cosine in enumerate(cosines)
    ]
    chart = charts.chosen(charts.heatmap(rows), "of", "compare")
    distances = [
        f"{layer.layer} {layer.spread:.3g}" for layer in similarities if layer.spread is not None
    ]
    text = (
        "The chart compares two experts by the cosine of their weights, or of their outputs on the "
        "same rows. 1 means that they are the same, 0 that they have nothing to do with each other."
    )
    if distances:
        text += (
            " Distance of the experts from their mean in this checkpoint: "
            f"{'; '.join(distances)}. {DISTANCE}"
        )
    return Section(
        "alike",
        "How alike are the experts?",
        [Part("Do the experts differ?", text, chart.to_dict())],
    )
