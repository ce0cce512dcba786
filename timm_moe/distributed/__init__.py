"""Expert models that outgrow one device: which part of the experts each process holds."""

from .placement import expert_placement, local_part

__all__ = ["expert_placement", "local_part"]
