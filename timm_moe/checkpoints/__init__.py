"""Readers of other projects' checkpoints."""

from . import vmoe

__all__ = ["vmoe"]
