"""Models in eval mode, compared with dense models of equal FLOPs.

They take single images and batches.
"""

from collections.abc import Callable, Iterator
from functools import partial

import timm
import torch
from torch import Tensor, nn

from timm_moe.layers import ImageRouter, MoeMlp

from .layers import HIDDEN, TOKENS, WIDTH, mlp, router
from .protocol import Contest, Setting, Work


def measure(setting: Setting) -> Iterator[Contest]:
    for batch in (1, 32):
        yield from contests(batch, setting)


def contests(batch: int, setting: Setting) -> Iterator[Contest]:
    tokens = torch.randn(batch, TOKENS, WIDTH, device=setting.device)
    layers = {
        "dense": mlp,
        "image-level top-1 of 8": lambda: MoeMlp(mlp(), router(8, kind=ImageRouter)),
        "top-1 of 8": lambda: MoeMlp(mlp(), router(8)),
    }
    yield Contest(f"layer in eval mode, batch {batch}", _works(layers, tokens, setting))
    layers = {
        "dense": lambda: mlp(2 * HIDDEN),
        "V-MoE: top-2 of 32": lambda: MoeMlp(mlp(), router(32, 2)),
    }
    yield Contest(
        f"layer of two experts in eval mode, batch {batch}", _works(layers, tokens, setting)
    )
    images = torch.randn(batch, 3, 224, 224, device=setting.device)
    vimoe = partial(timm.create_model, "vimoe_s14", num_experts=8)
    models = {
        "dense": partial(
            timm.create_model, "vit_small_patch14_dinov2", img_size=224, num_classes=1000
        ),
        "ViMoE: image-level top-1 of 8 in the last two blocks": vimoe,
        "ViMoE: the same in all blocks": partial(vimoe, moe_layers="tail-12"),
    }
    yield Contest(f"ViT-S/14 in eval mode, batch {batch}", _works(models, images, setting))
    models = {
        "dense": partial(timm.create_model, "vit_small_patch16_224"),
        "EWA, 4 experts, not exported": partial(timm.create_model, "vit_small_ewa_moe"),
    }
    notes = {"EWA, 4 experts, not exported": "takes the mean of its experts at each forward"}
    yield Contest(f"ViT-S/16 in eval mode, batch {batch}", _works(models, images, setting), notes)


def _works(
    models: dict[str, Callable[[], nn.Module]], x: Tensor, setting: Setting
) -> dict[str, Callable[[], Work]]:
    return {name: partial(evaluate, make, x, setting) for name, make in models.items()}


def evaluate(make: Callable[[], nn.Module], x: Tensor, setting: Setting) -> Work:
    model = setting.prepare(make().eval())

    def work() -> None:
        with torch.inference_mode(), setting.autocast():
            model(x)

    return work
