"""An ensemble inside one model: repeated images, and the members' outputs and losses combined.

Shape suffixes: B images, M members, C classes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .moe_mlp import MoeMlp


def tile(blocks: Sequence[nn.Module], copies: int) -> list[RemovableHandle]:
    """Let blocks that follow each other see each image M times in a row, by hooks (pBE, arXiv 2110.03360, section 4).

    The input of the first is repeated. A mask of attention for each image, (B, 1, N, N), and
    padding that another hook noted for the expert layers of a block hold for all copies of the
    image.
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
    x = inputs[0].repeat_interleave(copies, 0) if is_first else inputs[0]
    mask = kwargs.get("attn_mask")
    if isinstance(mask, Tensor) and mask.ndim == 4 and len(mask) * copies == len(x):
        kwargs = {**kwargs, "attn_mask": mask.repeat_interleave(copies, 0)}
    # The hook that notes padding comes before or after: compiled, torch before 2.14 confuses hooks
    # with prepend=True.
    for layer in block.children():
        if (
            isinstance(layer, MoeMlp)
            and layer.padding is not None
            and len(layer.padding) * copies == len(x)
        ):
            layer.padding = layer.padding.repeat_interleave(copies, 0)
    return (x, *inputs[1:]), kwargs


def ensemble_log_probabilities(log_p_BMC: Tensor) -> Tensor:
    """Logarithm of the members' mean probabilities, (B, C)."""
    return log_p_BMC.logsumexp(1) - math.log(log_p_BMC.shape[1])


class MemberLoss(nn.Module):
    """The mean loss of the members: every member's output is compared with its image's target (pBE, section 4.1).

    The criterion is any loss on outputs (B, C) and targets (B,) or (B, C).
    """

    def __init__(self, criterion: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.criterion = criterion

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """The criterion of outputs (B, M, C) and the targets of the B images; outputs of other shapes go unchanged."""
        if output.ndim != 3:
            return self.criterion(output, target)
        return self.criterion(output.flatten(0, 1), target.repeat_interleave(output.shape[1], 0))
