"""The divergence of the layer norms of a model's blocks.

WideNet's blocks do not share their norms (arXiv 2107.11817).
"""

import re

import torch
from torch import Tensor, nn

from ..convert.wrappers import unwrapped


def norm_divergence(model: nn.Module) -> dict[str, Tensor]:
    """Return the divergence of the layer norms of all blocks, a number for each element.

    It is WideNet's, eq. 9. Every element of a block's scale (or bias) is compared with every
    element in the other blocks: with N blocks of width D,
    ``y_i = 1 / (D N^2) * sum over j, n, m, where n != j, of |scale_ij - scale_mn|``. It measures
    the spread within a norm too, and is 0 only if all elements are equal.

    Args:
        model: has ``blocks``, as timm's ViTs and all WideNets; perhaps in a wrapper.

    Returns:
        (D,) in float64 on the CPU, by the name of the tensor in a block: ``"norm1.weight"``,
        ``"norm1.bias"``, ``"norm2.weight"``, ... The paper shows ``norm2``, before the feed-forward
        network.

    Raises:
        ValueError: if no two blocks have layer norms in the same place, or blocks share a norm.
    """
    places: dict[str, list[nn.LayerNorm]] = {}
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        inside = re.fullmatch(r"blocks\.(?:\d+\.)+(.+)", name)  # WideNet may have groups of blocks
        if inside and isinstance(module, nn.LayerNorm):
            places.setdefault(inside[1], []).append(module)
    divergence = {}
    for place, of_blocks in places.items():
        if len(of_blocks) == 1 or len({norm.normalized_shape for norm in of_blocks}) > 1:
            continue
        if len(set(of_blocks)) < len(of_blocks):
            raise ValueError(
                f"The blocks of this {type(unwrapped(model)).__name__} share their {place}."
            )
        for name in ("weight", "bias"):
            tensors = [getattr(norm, name) for norm in of_blocks]
            if all(tensor is not None for tensor in tensors):
                values_ND = torch.stack(
                    [tensor.detach().cpu().double().flatten() for tensor in tensors]
                )
                divergence[f"{place}.{name}"] = _divergence(values_ND)
    if not divergence:
        raise ValueError(
            f"This {type(unwrapped(model)).__name__} has no blocks with layer norms to compare."
        )
    return divergence


def _divergence(values_ND: Tensor) -> Tensor:
    """Compute (D,) by eq. 9."""
    blocks, width = values_ND.shape
    everywhere = values_ND.flatten()
    total_D = sum(_distances(own_D, everywhere) - _distances(own_D, own_D) for own_D in values_ND)
    # Rounding may make a sum of distances negative.
    return torch.as_tensor(total_D).clamp(min=0) / (width * blocks**2)


def _distances(x: Tensor, others: Tensor) -> Tensor:
    """Add up each entry's distances to all others, by partial sums of the sorted others."""
    ordered = others.sort().values
    below = torch.searchsorted(ordered, x)
    sums = torch.nn.functional.pad(ordered.cumsum(0), (1, 0))
    return x * (2 * below - len(ordered)) + sums[-1] - 2 * sums[below]
