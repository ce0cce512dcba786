"""What export wrote goes to the Hugging Face Hub, with a model card."""

from .push import push_dense, push_folder, push_moe

__all__ = ["push_dense", "push_folder", "push_moe"]
