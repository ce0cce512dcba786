"""The registered models: importing this package makes them known to timm's factory."""

from . import vision_transformer

__all__ = ["vision_transformer"]
