"""The registered models: importing this package makes them known to timm's factory."""

from . import ensemble, vision_transformer, widenet

__all__ = ["ensemble", "vision_transformer", "widenet"]
