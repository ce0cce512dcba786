"""The registered models: importing this package makes them known to timm's factory."""

from . import batch_ensemble, ensemble, ewa, mimo, small_data, vision_transformer, widenet

__all__ = ["batch_ensemble", "ensemble", "ewa", "mimo", "small_data", "vision_transformer", "widenet"]
