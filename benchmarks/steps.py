"""Whole training steps: forward, backward, AdamW and averaging of the experts."""

from collections.abc import Callable, Iterator
from functools import partial

import timm
import torch
from torch import nn

import timm_moe
from timm_moe.layers import RecordingRouter

from .protocol import Contest, Setting, Work

CLASSES = 100
Make = Callable[[], nn.Module]


def measure(setting: Setting) -> Iterator[Contest]:
    """Compare steps of ViT-S/16 at 224 px and of the EWA paper's ViT-XT/4 at 32 px."""
    for name, models, batch in (
        ("ViT-S/16, 224 px", vit_small(), setting.pick(16, 128)),
        ("ViT-XT/4, 32 px", vit_xtiny(), setting.pick(64, 128)),
    ):
        for fused in (True, False):
            optimizer = "fused AdamW" if fused else "AdamW"
            entries = {
                entry: partial(step, make, batch, fused, setting) for entry, make in models.items()
            }
            yield Contest(f"step of {name}, batch {batch}, {optimizer}", entries)


def vit_small() -> dict[str, Make]:
    return contenders("vit_small_patch16_224", "vit_small")


def vit_xtiny() -> dict[str, Make]:
    return contenders("vit_xtiny", "vit_xtiny")


def contenders(dense: str, prefix: str) -> dict[str, Make]:
    """Make a dense model and its forms with experts in every second block."""
    create = partial(timm.create_model, num_classes=CLASSES)
    return {
        "dense": partial(create, dense),
        "EWA, 4 experts every-2": partial(create, f"{prefix}_ewa_moe", num_experts=4),
        "EWA, 8 experts every-2": partial(create, f"{prefix}_ewa_moe", num_experts=8),
        "naive MoE, top-1 of 8 every-2": partial(create, f"{prefix}_moe", num_experts=8),
    }


def step(make: Make, batch: int, fused: bool, setting: Setting, classes: int = CLASSES) -> Work:
    model = make().to(setting.device).train()
    layers = list(timm_moe.moe_layers(model).values())
    has_losses = any(isinstance(layer.router, RecordingRouter) for layer in layers)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
        weight_decay=0.05,
        # False would also turn off foreach, which train.py's optimizer uses on a GPU.
        fused=fused or None,
    )
    if any(layer.share_rate for layer in layers):
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=10_000)
    images = torch.randn(batch, *model.pretrained_cfg["input_size"], device=setting.device)
    targets = torch.randint(classes, (batch,), device=setting.device)
    criterion = nn.CrossEntropyLoss()
    forward = setting.prepare(model)

    def work() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with setting.autocast():
            loss = criterion(forward(images), targets)
        if has_losses:  # train.py adds nothing for EWA either
            loss = loss + timm_moe.auxiliary_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return work
