"""The registered models: importing this package makes them known to timm's factory."""

from . import ensemble, small_data, vision_transformer, widenet

__all__ = ["ensemble", "small_data", "vision_transformer", "widenet"]
