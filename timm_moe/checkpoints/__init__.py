"""Reading: a file or folder becomes a model (source.py), official V-MoE and Swin-MoE checkpoints too."""

from . import swin_moe, vmoe

__all__ = ["swin_moe", "vmoe"]
