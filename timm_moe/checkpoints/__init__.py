"""Reading: from whatever holds a model to the model, this package's own (source.py) and official V-MoE's (vmoe.py)."""

from . import vmoe

__all__ = ["vmoe"]
