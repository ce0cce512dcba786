"""A tensor that grows with the batches of a pass over images."""

import torch
from torch import Tensor


class Rows:
    """Rows of a tensor on the CPU, added batch by batch to one piece of memory.

    If each batch kept a tensor of its own, these would lie between large tensors that are freed,
    and the memory of those would not go back to the system.
    """

    def __init__(self) -> None:
        self._rows = torch.empty(0)
        self._number = 0

    def __len__(self) -> int:
        return self._number

    def add(self, rows: Tensor) -> None:
        """Add rows (N, ...), which have the same type and shape each time, from any device."""
        end = self._number + len(rows)
        if end > len(self._rows):
            # An inference tensor could not be changed outside of inference mode.
            with torch.inference_mode(False):
                grown = torch.empty(
                    max(end, 2 * len(self._rows)), *rows.shape[1:], dtype=rows.dtype
                )
            if self._number:
                grown[: self._number] = self.tensor()
            self._rows = grown
        self._rows[self._number : end] = rows
        self._number = end

    def tensor(self) -> Tensor:
        """Return all rows so far, without a copy."""
        return self._rows[: self._number]
