"""Reading: a file or folder becomes a model (source.py).

The official checkpoints of V-MoE and Swin-MoE can be imported, too.
"""

from . import swin_moe, vmoe

__all__ = ["swin_moe", "vmoe"]
