"""Whole training steps of ViT-S: eager, as CUDA graphs, and compiled.

CUDA graphs are torch.compile's ``mode="reduce-overhead"``. A limit of time may end the suite
anywhere, so the contests are in the order of their worth.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import timm

from .protocol import Contest, Setting
from .steps import CLASSES, Make, contenders, step

#: Seconds that a contest may take on a GPU. Compiling for CUDA graphs fills the cache of the mode
#: "compiled".
SECONDS = {"eager": 20, "reduce-overhead": 120, "compiled": 60}


def measure(setting: Setting) -> Iterator[Contest]:
    """Compare steps of ViT-S/16 at 224 px in bfloat16.

    On a CPU, which only tries the suite, the model is a tiny ViT.
    """
    for mode in ("eager", "reduce-overhead", "compiled"):
        yield contest(models(setting)[0], "bfloat16", mode, setting)


def contest(
    model: tuple[str, dict[str, Make], int], dtype: str, mode: str, setting: Setting
) -> Contest:
    """Compare the steps of a dense model and of its forms with experts."""
    name, makes, batch = model
    chosen = replace(setting, mode=mode, dtype=dtype)
    return Contest(
        f"step of {name}, {dtype}, {mode}, batch {batch}, fused AdamW",
        {entry: partial(step, make, batch, True, chosen) for entry, make in makes.items()},
        seconds=SECONDS[mode],
    )


def models(setting: Setting) -> list[tuple[str, dict[str, Make], int]]:
    """Names, makers and batches of the models: dense, with EWA and with top-1 routing."""
    if setting.device == "cpu":
        size = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=CLASSES)
        create = partial(
            timm.create_model, pretrained_cfg_overlay=dict(input_size=(3, 32, 32)), **size
        )
        names = ("vit_tiny_patch16_224", "vit_tiny_ewa_moe", "vit_tiny_moe")
        makes = {
            entry: partial(create, name)
            for entry, name in zip(("dense", "EWA", "top-1"), names, strict=True)
        }
        return [("a tiny ViT", makes, 4)]
    found = []
    for name, size in (("ViT-S/16", "small"), ("ViT-B/16", "base")):
        every = contenders(f"vit_{size}_patch16_224", f"vit_{size}")
        found.append(
            (name, {entry: make for entry, make in every.items() if "8 experts" not in entry}, 128)
        )
    return found
