"""The registered models: importing this package makes them known to timm's factory.

``small_data`` and ``swin_moe`` need more of timm than the other modules. If the installed timm
lacks what one of them needs, its models are left out, with a warning.
"""

import warnings
from importlib import import_module

from . import ensemble, ewa, vision_transformer, widenet

for _name in ("small_data", "swin_moe"):
    try:
        import_module(f"{__name__}.{_name}")
    except ImportError as error:
        if not (error.name or "").startswith("timm."):
            raise
        warnings.warn(
            f"The models of {__name__}.{_name} are missing, as timm has changed: {error}",
            stacklevel=2,
        )

__all__ = ["ensemble", "ewa", "small_data", "swin_moe", "vision_transformer", "widenet"]
