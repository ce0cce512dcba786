"""The registered models: importing this package makes them known to timm's factory."""

from . import ensemble, ewa, small_data, swin_moe, vision_transformer, widenet

__all__ = ["ensemble", "ewa", "small_data", "swin_moe", "vision_transformer", "widenet"]
