"""Reading: a file or folder becomes a model (source.py), official V-MoE checkpoints too (vmoe.py)."""

from . import vmoe

__all__ = ["vmoe"]
