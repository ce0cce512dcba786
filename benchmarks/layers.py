"""Expert layers, compared with timm's Mlp of equal active FLOPs.

The time of forward and backward is measured, and the saved memory.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from timm.layers import Mlp
from torch import Tensor, nn

import timm_moe
from timm_moe.analysis import info
from timm_moe.layers import (
    CosineRouter,
    EnsembleRouter,
    EwaMlp,
    ExpertChoiceRouter,
    ImageRouter,
    MoeMlp,
    RandomPartition,
    SharedExpertMlp,
    SoftMoeMlp,
    SoftRouter,
    TopKRouter,
)

from .protocol import Contest, Row, Setting, Work

WIDTH, HIDDEN, TOKENS = 384, 1536, 197  # ViT-S/16 at 224 px
BALANCE = {"balance": 0.01}
SIGMOID = {"score": "sigmoid", "bias_rate": 0.001}


def measure(setting: Setting) -> Iterator[Contest | Row]:
    """Compare the layers; images per batch: 64 on CPUs, 128 on GPUs."""
    yield from contests(setting)
    if setting.mode == "eager":
        yield from saved_bytes(setting)


def contests(setting: Setting) -> Iterator[Contest]:
    x = torch.randn(setting.pick(64, 128), TOKENS, WIDTH, device=setting.device)
    slots = math.ceil(TOKENS / 8)
    layers: dict[str, Callable[[], nn.Module]] = {
        "dense": mlp,
        "random partition, 2 experts": lambda: EwaMlp(mlp(), RandomPartition(2)),
        "random partition, 4 experts": lambda: EwaMlp(mlp(), RandomPartition(4)),
        "random partition, 8 experts": lambda: EwaMlp(mlp(), RandomPartition(8)),
        "top-1 of 8": lambda: MoeMlp(mlp(), router(8)),
        "top-1 of 8, capacity 1.05": lambda: MoeMlp(mlp(), router(8, capacity_factor=1.05)),
        "image-level top-1 of 8": lambda: MoeMlp(mlp(), router(8, kind=ImageRouter)),
        "pBE, two members, top-1 of 8": lambda: MoeMlp(
            mlp(), router(8, kind=EnsembleRouter, ensemble_size=2)
        ),
        "top-1 of 8, cosine score": lambda: MoeMlp(mlp(), router(8, kind=CosineRouter)),
        "top-1 of 8, sigmoid and bias": lambda: MoeMlp(mlp(), TopKRouter(WIDTH, 8, **SIGMOID)),
        "top-2 of 16 halves": lambda: MoeMlp(mlp(), router(16, 2), expert_width=0.5),
        "top-3 of 32 quarters and a shared one": lambda: SharedExpertMlp(
            mlp(), router(32, 3), expert_width=0.25
        ),
        "Expert Choice of 8": lambda: MoeMlp(mlp(), ExpertChoiceRouter(WIDTH, 8)),
        "Soft MoE of 8": lambda: SoftMoeMlp(mlp(), SoftRouter(WIDTH, 8, slots)),
    }
    notes = {"Soft MoE of 8": f"{8 * slots} slots for the {TOKENS} tokens of an image"}
    yield Contest("layer, one expert a row", training(layers, x, setting), notes)
    layers = {
        "dense": lambda: mlp(2 * HIDDEN),
        "top-2 of 8": lambda: MoeMlp(mlp(), router(8, 2)),
        "top-2 of 8, capacity 1.05": lambda: MoeMlp(mlp(), router(8, 2, capacity_factor=1.05)),
        "WideNet: top-2 of 4, capacity 1.2": lambda: MoeMlp(
            mlp(), router(4, 2, capacity_factor=1.2)
        ),
        "image-level top-1 of 8 and a shared expert": lambda: SharedExpertMlp(
            mlp(), router(8, kind=ImageRouter)
        ),
    }
    notes = {"WideNet: top-2 of 4, capacity 1.2": "a row whose two choices are full costs nothing"}
    yield Contest("layer, two experts a row", training(layers, x, setting), notes)


def training(
    layers: Mapping[str, Callable[[], nn.Module]], x: Tensor, setting: Setting
) -> dict[str, Callable[[], Work]]:
    """Make entries of a contest that train layers."""
    return {name: partial(train_layer, make, x, setting) for name, make in layers.items()}


def mlp(hidden: int = HIDDEN, width: int = WIDTH) -> Mlp:
    return Mlp(width, hidden)


def router(
    num_experts: int,
    top_k: int = 1,
    kind: type[TopKRouter] = TopKRouter,
    width: int = WIDTH,
    **options,
) -> TopKRouter:
    return kind(width, num_experts, top_k, loss_weights=BALANCE, **options)


def train_layer(make: Callable[[], nn.Module], x: Tensor, setting: Setting) -> Work:
    """Make a forward and backward pass with gradients of the input and of every parameter.

    Layers of other packages return the output and the weighted sum of their losses.
    """
    model = nn.Sequential(make().train())  # auxiliary_loss() takes a model
    compiled = setting.prepare(model)
    x = x.clone().requires_grad_()
    grad = torch.randn_like(x)

    def work() -> None:
        x.grad = None
        model.zero_grad()
        with setting.autocast():
            y = compiled(x)
        y, auxiliary = y[:2] if isinstance(y, tuple) else (y, timm_moe.auxiliary_loss(model))
        ((y * grad).sum() + auxiliary).backward()

    return work


def saved_bytes(setting: Setting) -> Iterator[Row]:
    x = torch.randn(setting.pick(64, 128), TOKENS, WIDTH, device=setting.device)
    layers: dict[str, Callable[[], nn.Module]] = {
        "dense": mlp,
        "random partition, 4 experts": lambda: EwaMlp(mlp(), RandomPartition(4)),
        "random partition, 8 experts": lambda: EwaMlp(mlp(), RandomPartition(8)),
        "top-1 of 8": lambda: MoeMlp(mlp(), router(8)),
    }
    kept = {}
    for name, make in layers.items():
        layer = make().to(setting.device).train()
        with setting.autocast():
            kept[name] = info.saved_bytes(layer, x.clone().requires_grad_())
    for name, number in kept.items():
        ratio = number / kept["dense"]
        yield Row("saved for the backward", name, ratio, ratio, ratio, number / 2**20, "MiB")
