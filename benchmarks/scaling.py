"""Layers by number of experts, number of rows and width.

They are compared with dense layers of equal FLOPs.
"""

from collections.abc import Iterator
from functools import partial

import torch

from timm_moe.layers import EwaMlp, MoeMlp, RandomPartition

from .layers import WIDTH, mlp, router, training
from .protocol import Contest, Setting

EXPERTS = (1, 2, 4, 8, 16, 32, 64)
ROWS = (64, 256, 1024, 4096, 16384, 50176)
WIDTHS = (96, 192, 384, 768, 1024)


def measure(setting: Setting) -> Iterator[Contest]:
    """Vary one of 8 experts, 6272 rows and a width of 384 at a time."""
    rows = 6272
    for number in EXPERTS:
        yield _contest(f"{number} experts", number, rows, WIDTH, setting)
    for number in ROWS:
        yield _contest(f"{number} rows", 8, number, WIDTH, setting)
    for width in WIDTHS:
        yield _contest(f"width {width}", 8, rows, width, setting)


def _contest(name: str, num_experts: int, rows: int, width: int, setting: Setting) -> Contest:
    x = torch.randn(1, rows, width, device=setting.device)
    dense = partial(mlp, 4 * width, width)
    layers = {
        "dense": dense,
        "random partition": lambda: EwaMlp(dense(), RandomPartition(num_experts)),
        "top-1": lambda: MoeMlp(dense(), router(num_experts, width=width)),
    }
    return Contest(name, training(layers, x, setting))
