"""Who moves the rows: to their experts and back."""

import torch
from torch import Tensor


def dispatch(x_TD: Tensor, order: Tensor) -> Tensor:
    """Rows in expert order: row i of the result is row ``order[i]`` of ``x_TD``."""
    return x_TD.index_select(0, order)


def undispatch(y_TD: Tensor, order: Tensor) -> Tensor:
    """The inverse of :func:`dispatch`: rows back in their first order."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return y_TD.index_select(0, inverse)
