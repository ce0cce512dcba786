"""Whole training steps in which the GPU has more to do: ViT-B, and float32."""

from collections.abc import Iterator

from .modes import contest, models
from .protocol import Contest, Setting


def measure(setting: Setting) -> Iterator[Contest]:
    """Compare steps of ViT-B/16 at 224 px in bfloat16, and of ViT-S/16 in float32."""
    small, large = models(setting)[0], models(setting)[-1]
    yield contest(large, "bfloat16", "eager", setting)
    yield contest(large, "bfloat16", "reduce-overhead", setting)
    yield contest(small, "float32", "eager", setting)
