"""How alike the experts of a layer are: their weights, and their outputs on the same rows.

Shape suffixes: T rows, D width, E experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..analysis.data import Inference, batches
from ..convert.blocks import moe_layers, whole_experts
from ..layers import MoeMlp, routing_to
from ..training.epoch_log import relative_distance_to_mean

#: Rows of a layer's input on which the outputs of its experts are compared, and images that they come from.
ROWS, IMAGES = 512, 16


@dataclass(frozen=True)
class Likeness:
    """How alike the experts of a layer are.

    Attributes:
        layer: its name.
        weights_EE: cosine of the weights of two experts.
        outputs_EE: cosine of their outputs, on average over rows.
        spread: see :func:`timm_moe.training.epoch_log.relative_distance_to_mean`.
    """

    layer: str
    weights_EE: Tensor
    outputs_EE: Tensor
    spread: float | None


@torch.inference_mode()
def likeness(model: nn.Module, images: ImageDataset, inference: Inference | None = None) -> list[Likeness]:
    """Compare the experts of each layer of a model in eval mode.

    Args:
        model: from :func:`timm_moe.analysis.data.load_classifiers`.
        images: some of them are run through the model, for the rows of each layer.
        inference: how forwards are run.
    """
    layers = moe_layers(model)
    some = range(0, len(images), max(1, len(images) // IMAGES))[:IMAGES]
    with _rows(layers) as rows:
        for (x,), _ in batches([model], images, inference or Inference(), some):
            model(x)
    return [
        Likeness(path, _cosine(_weights(layer)), _outputs_alike(layer, rows[path]), relative_distance_to_mean(layer))
        for path, layer in layers.items()
    ]


@contextmanager
def _rows(layers: dict[str, MoeMlp]) -> Iterator[dict[str, Tensor]]:
    """(T, D) of the first input of each layer."""
    rows: dict[str, Tensor] = {}

    def note(path: str) -> Any:
        def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x_TD = inputs[0].reshape(-1, inputs[0].shape[-1])
            rows.setdefault(path, x_TD[:: max(1, len(x_TD) // ROWS)][:ROWS])

        return keep

    handles = [layer.register_forward_pre_hook(note(path)) for path, layer in layers.items()]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def _weights(layer: MoeMlp) -> Tensor:
    return torch.cat([stacked.float().flatten(1) for stacked in whole_experts(layer).values()], 1)


def _cosine(x_ED: Tensor) -> Tensor:
    unit_ED = nn.functional.normalize(x_ED, dim=1)
    return (unit_ED @ unit_ED.T).cpu()


def _outputs_alike(layer: MoeMlp, x_TD: Tensor) -> Tensor:
    output_ETD = torch.stack([_output(layer, expert, x_TD).float() for expert in range(layer.num_experts)])
    unit_ETD = nn.functional.normalize(output_ETD, dim=2)
    return torch.einsum("etd,ftd->ef", unit_ETD, unit_ETD).cpu() / len(x_TD)


def _output(layer: MoeMlp, expert: int, x_TD: Tensor) -> Tensor:
    """What one expert makes of all rows."""
    choice_T1 = torch.full((len(x_TD), 1), expert, device=x_TD.device)
    routing = routing_to(choice_T1, torch.ones_like(choice_T1, dtype=x_TD.dtype), layer.num_experts)
    return MoeMlp.forward(layer, x_TD, routing=routing)
