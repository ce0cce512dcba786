"""Layers and steps at the papers' sizes.

They are V-MoE-B/32's layer beside other packages, and whole steps of ViT-B/16 and WideNet-B.
"""

from collections.abc import Iterator
from functools import partial

import timm
import torch

from timm_moe.layers import EwaMlp, MoeMlp, RandomPartition

from . import peers
from .layers import mlp, router, training
from .protocol import Contest, Setting
from .steps import CLASSES, contenders, step

#: An image of 224 pixels has 49 patches and a class token.
VMOE_B32 = peers.Size("V-MoE-B/32: ", width=768, hidden=3072, experts=32, tokens=50)


def measure(setting: Setting) -> Iterator[Contest]:
    yield from layers(setting)
    yield from steps(setting)


def layers(setting: Setting) -> Iterator[Contest]:
    size, experts = VMOE_B32, VMOE_B32.experts
    x = torch.randn(setting.pick(32, 1024), size.tokens, size.width, device=setting.device)
    dense, route = (
        partial(mlp, size.hidden, size.width),
        partial(router, experts, 2, width=size.width),
    )
    entries = {
        "dense": partial(mlp, 2 * size.hidden, size.width),
        "top-2 of 32, capacity 1.05": lambda: MoeMlp(dense(), route(capacity_factor=1.05)),
        "top-2 of 32, nothing dropped": lambda: MoeMlp(dense(), route()),
    }
    yield Contest("V-MoE-B/32: layer, two experts a row", training(entries, x, setting))
    entries = {
        "dense": dense,
        "random partition, 4 experts": lambda: EwaMlp(dense(), RandomPartition(4)),
    }
    yield Contest("V-MoE-B/32: layer, one expert a row", training(entries, x, setting))
    yield from peers.contests(setting, size)


def steps(setting: Setting) -> Iterator[Contest]:
    batch, create = setting.pick(4, 128), partial(timm.create_model, num_classes=CLASSES)
    widenet = "WideNet-B, top-2 of 4, capacity 1.2"
    dense = partial(create, "vit_base_patch16_224", mlp_ratio=2 * 4096 / 768)
    for name, models, notes in (
        ("ViT-B/16", contenders("vit_base_patch16_224", "vit_base"), {}),
        (
            "WideNet-B",
            {"dense": dense, widenet: partial(create, "widenet_b")},
            {widenet: "its 12 blocks share the layer that the dense model has 12 times"},
        ),
    ):
        entries = {
            entry: partial(step, make, batch, True, setting) for entry, make in models.items()
        }
        yield Contest(f"step of {name}, 224 px, batch {batch}, fused AdamW", entries, notes)
