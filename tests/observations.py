"""Observations of models, and made-up ones of routers."""

from dataclasses import replace

import torch

from timm_moe.analysis.data import Inference, image_folder, load_classifiers
from timm_moe.analysis.report.observe import LayerObservation, Observation, Patch, observe
from timm_moe.analysis.routes.statistics import Routes

HERE = Inference(batch_size=7, workers=0, device="cpu")


def observed(model, data, ood=None):
    images = image_folder(data)
    (model,), images = load_classifiers([model], images, inference=HERE)
    return observe(model, "model", images, ood, HERE)


def layer_of(load, dropped=0, labels=(0,), classes=("cat",), name="blocks.1.mlp", top_k=1):
    """Make a layer with these loads.

    A load is that of one image, of each of several images, or of each of their members.
    """
    count_IME = torch.tensor(load)
    count_IME = count_IME.view(-1, 1, count_IME.shape[-1]) if count_IME.ndim < 3 else count_IME
    experts = count_IME.shape[2]
    return LayerObservation(
        routes=Routes(name, top_k, experts, count_IME, torch.tensor(labels), classes),
        by_image=False,
        dropped=dropped,
        entropy=torch.ones(20),
        grid=(2, 2),
        expert_SMP=torch.zeros(1, 1, 4, dtype=torch.long),
        gate_SMP=torch.full((1, 1, 4), 0.5),
        surest=[[Patch(0.5, torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] for _ in range(experts)],
    )


def with_two_members(layer):
    return replace(
        layer,
        routes=replace(layer.routes, counts=layer.routes.counts.repeat(1, 2, 1)),
        expert_SMP=layer.expert_SMP.repeat(1, 2, 1),
        gate_SMP=layer.gate_SMP.repeat(1, 2, 1),
    )


def seen_as(layers, confidence=(0.9,), predicted=(0,), classes=("cat", "dog")):
    labels = torch.zeros(len(confidence), dtype=torch.long)
    return Observation(
        classes=list(classes),
        labels=labels,
        predicted=torch.tensor(predicted),
        confidence=torch.tensor(confidence),
        ood_confidence=None,
        figures=dict(
            images=len(confidence), members=1, nll=0.1, accuracy=1.0, error=0.0, ece=0.1, brier=0.3
        ),
        layers=layers,
        shown=[0],
        shown_pixels=torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
    )
