"""An ensemble inside one model: repeated images, and the members' outputs and losses combined.

Shape suffixes: B images, M members, C classes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .living import find
from .moe_mlp import MoeMlp


def tile(blocks: Sequence[nn.Module], copies: int) -> list[RemovableHandle]:
    """Let blocks see each image M times in a row, by hooks (pBE, arXiv 2110.03360, section 4).

    The input of the first block is repeated. A mask of attention for each image, (B, 1, N, N), and
    padding that another hook noted for the expert layers of a block hold for all copies of the
    image.

    Args:
        blocks: blocks that follow each other.
        copies: M.

    Returns:
        The handles of the hooks.
    """
    hook = partial(_tile, copies=copies)
    return [
        block.register_forward_pre_hook(
            partial(hook, is_first=block is blocks[0]), with_kwargs=True
        )
        for block in blocks
    ]


def _tile(
    block: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    copies: int,
    is_first: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat what a block gets for each image; a forward pre-hook."""
    x = inputs[0].repeat_interleave(copies, 0) if is_first else inputs[0]
    mask = kwargs.get("attn_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4 and len(mask) * copies == len(x):
        kwargs = {**kwargs, "attn_mask": mask.repeat_interleave(copies, 0)}
    # The hook that notes padding may come before this one or after it, so the length is looked at.
    # An order by prepend=True would confuse compiled code of torch before 2.14.
    for layer in find(MoeMlp, block):
        padding = layer.padding
        if padding is not None and len(padding) * copies == len(x):
            layer.padding = padding.repeat_interleave(copies, 0)
    return (x, *inputs[1:]), kwargs


def ensemble_log_probabilities(log_p_BMC: Tensor) -> Tensor:
    """Return the logarithm of the members' mean probabilities, (B, C)."""
    return log_p_BMC.logsumexp(1) - math.log(log_p_BMC.shape[1])


class MemberLoss(nn.Module):
    """Mean loss of the members of an ensemble (pBE, section 4.1).

    Every member's output is compared with its image's target.

    Args:
        criterion: any loss of outputs (B, C) and targets (B,) or (B, C).
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.criterion = criterion

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Compare outputs (B, M, C) with the targets of the B images.

        Outputs of other shapes go to the criterion as they are.
        """
        if output.ndim != 3:
            return self.criterion(output, target)
        return self.criterion(output.flatten(0, 1), target.repeat_interleave(output.shape[1], 0))
