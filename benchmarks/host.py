"""Kernels and host time of expert layers and of a step, where a GPU waits for Python.

A CPU with tiny tensors takes the form of a GPU: the operators are those that a GPU would start, and
computing them takes no time. So what is timed is the host. Kernels are counted exactly and do not
depend on the machine or its load.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from unittest import mock

import timm
import torch
from timm.layers import Mlp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import timm_moe
from timm_moe.layers import (
    CosineRouter,
    EnsembleRouter,
    EwaMlp,
    ExpertChoiceRouter,
    ImageRouter,
    MoeMlp,
    RandomPartition,
    SoftMoeMlp,
    SoftRouter,
    TopKRouter,
)

from .protocol import Contest, Row, Setting, Work
from .steps import Make, step

IMAGES, TOKENS, WIDTH, HIDDEN = 2, 16, 32, 128
CLASSES = 10
#: Beginnings of the names of operators that start no kernel, beside views.
_NO_KERNELS = ("empty", "new_empty", "_unsafe_view", "promote_types")


def measure(setting: Setting) -> Iterator[Contest | Row]:
    """Time and count a layer's forward and backward, and a step of a ViT.

    The ViT has experts in every second block.
    """
    with form_of_a_gpu():
        for name, makes in (
            (
                "layer, forward and backward",
                {name: partial(pass_of, make, setting) for name, make in layers().items()},
            ),
            (
                "step of 12 blocks, fused AdamW",
                {name: partial(step_of, make, setting) for name, make in models().items()},
            ),
        ):
            yield from counted(f"kernels of a {name}", makes)
            yield Contest(f"host time of a {name}", makes)


@contextlib.contextmanager
def form_of_a_gpu() -> Iterator[None]:
    """Let the layers run on a CPU what they run on a GPU.

    There each expert has equally many slots, and products are batched.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("timm_moe.layers")]
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "has_equal_slots"):
                stack.enter_context(mock.patch.object(module, "has_equal_slots", return_value=True))
        yield


def layers() -> dict[str, Callable[[], nn.Module]]:
    """Return functions that make the layers, each with the losses that it is trained with."""
    options: dict[str, Any] = {"capacity_factor": 1.05, "loss_weights": {"balance": 0.01}}
    vmoe: dict[str, Any] = {
        **options,
        "loss_weights": {"importance": 0.005, "load": 0.005},
        "noise_std": 1.0,
    }
    unlimited = {"loss_weights": options["loss_weights"]}

    def routed(router: nn.Module) -> nn.Module:
        return MoeMlp(mlp(), router)

    return {
        "dense": mlp,
        "EWA, 4 experts": lambda: EwaMlp(mlp(), RandomPartition(4)),
        "top-1 of 8, capacity": lambda: routed(TopKRouter(WIDTH, 8, 1, **options)),
        "top-2 of 8, capacity": lambda: routed(TopKRouter(WIDTH, 8, 2, **options)),
        "V-MoE: top-2 of 8, importance, load, noise": lambda: routed(
            TopKRouter(WIDTH, 8, 2, **vmoe)
        ),
        "top-1 of 8, capacity, cosine score": lambda: routed(CosineRouter(WIDTH, 8, 1, **options)),
        "Expert Choice of 8": lambda: routed(ExpertChoiceRouter(WIDTH, 8)),
        "Soft MoE of 8": lambda: SoftMoeMlp(mlp(), SoftRouter(WIDTH, 8, 2)),
        "pBE, two members, top-1 of 8, capacity": lambda: routed(
            EnsembleRouter(WIDTH, 8, 1, ensemble_size=2, **options)
        ),
        "image-level top-1 of 8": lambda: routed(ImageRouter(WIDTH, 8, 1, **unlimited)),
    }


def mlp() -> Mlp:
    return Mlp(WIDTH, HIDDEN)


def models() -> dict[str, Make]:
    """Return functions that make a tiny ViT of 12 blocks, without and with experts every-2."""
    size = dict(img_size=64, embed_dim=WIDTH, num_heads=2, num_classes=CLASSES)
    overlay = dict(input_size=(3, 64, 64))
    create = partial(timm.create_model, pretrained_cfg_overlay=overlay, **size)
    return {
        "dense": partial(create, "vit_tiny_patch16_224"),
        "EWA, 4 experts every-2": partial(create, "vit_tiny_ewa_moe", num_experts=4),
        "naive MoE, top-1 of 8 every-2": partial(create, "vit_tiny_moe", num_experts=8),
    }


def pass_of(make: Callable[[], nn.Module], setting: Setting) -> Work:
    """Make a forward and backward pass of a layer.

    Its input, its parameters and its losses get gradients.
    """
    layer = nn.Sequential(make()).train()
    has_losses = any(getattr(module, "loss_weights", None) for module in layer.modules())
    x = torch.randn(IMAGES, TOKENS, WIDTH, requires_grad=True)
    grad = torch.randn_like(x)

    def work() -> None:
        x.grad = None
        layer.zero_grad()
        with setting.autocast():
            y = layer(x)
        if has_losses:
            torch.autograd.backward([y, timm_moe.auxiliary_loss(layer)], [grad.to(y.dtype), None])
        else:
            y.backward(grad.to(y.dtype))

    return work


def step_of(make: Make, setting: Setting) -> Work:
    return step(make, IMAGES, True, setting, CLASSES)


def counted(name: str, makes: Mapping[str, Callable[[], Work]]) -> Iterator[Row]:
    """Count the kernels of each work in its second run; the first run may do more."""
    numbers = {}
    for entry, make in makes.items():
        work = make()
        work()
        with Kernels() as kernels:
            work()
        numbers[entry] = kernels.number
    for entry, number in numbers.items():
        ratio = number / numbers["dense"]
        yield Row(name, entry, ratio, ratio, ratio, number, "kernels")


class Kernels(TorchDispatchMode):
    """Counts the operators that start a kernel on a GPU.

    These are all but views and new memory. An operator of this package counts as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += not (func.is_view or func.overloadpacket.__name__.startswith(_NO_KERNELS))
        return func(*args, **kwargs or {})
