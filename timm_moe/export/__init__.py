"""Export: a trained model becomes a checked folder.

The folder goes to the Hugging Face Hub with a model card.
"""

from .export import export_dense, export_moe
from .options import ModelOptions, PushOptions
from .push import push_dense, push_moe

__all__ = [
    "ModelOptions",
    "PushOptions",
    "export_dense",
    "export_moe",
    "push_dense",
    "push_moe",
]
