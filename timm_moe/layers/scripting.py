"""Expert layers in the part of Python that TorchScript understands, for evaluation.

Shape suffixes: T rows, D width, E experts, K choices of a row, B images, N rows of an image.
"""

import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

#: By what stands for them, modules that torch.jit.script has replaced. It knows what it has seen by ``id``, which the
#: next module would get if one of them were gone, and then its weights.
_replaced: "weakref.WeakKeyDictionary[nn.Module, nn.Module]" = weakref.WeakKeyDictionary()


def replacing(original: nn.Module, scriptable: nn.Module) -> nn.Module:
    """The scriptable module, in the original's mode; the original lives as long."""
    _replaced[scriptable] = original
    return scriptable.train(original.training)


def in_plain_operators() -> bool:
    """Whether this is for a trace or for ONNX, whose files others read: they know the operators of no package."""
    return torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


@functools.cache
def checked_in_trace() -> Callable[[Tensor], Tensor]:
    """What a trace holds of the check of a capacity: a trace has no branches, but for functions that are scripted."""
    return torch.jit.script(_checked)


def _checked(capacity: Tensor) -> Tensor:
    if int(capacity) < 1:
        raise ValueError("The capacity_factor leaves no place: this batch gives a capacity below 1.")
    return capacity


class ScriptableMlp(nn.Module):
    """The mean of experts in eval mode.

    Args:
        ffn: the feed-forward network of the mean weights.
    """

    def __init__(self, ffn: nn.Module):
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (B, N, D) to the same shape."""
        if self.training:
            raise RuntimeError("TorchScript has no experts in training: call eval() first.")
        return self.ffn(x)


class ScriptableMoeMlp(nn.Module):
    """A routed expert layer in eval mode, with one module for each expert; where nothing is dropped, nobody queues.

    Args:
        experts: E feed-forward networks.
        weight_ED: that of the router.
        top_k: K.
        gate_mode: see :class:`TopKRouter`.
        by_image: the first row of an image decides for all of them.
        shared: a network that every row passes through besides.
    """

    def __init__(
        self,
        experts: Iterable[nn.Module],
        weight_ED: Tensor,
        top_k: int,
        gate_mode: str,
        by_image: bool,
        shared: nn.Module | None,
    ):
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.weight_ED = weight_ED
        self.top_k = top_k
        self.gate_mode = gate_mode
        self.by_image = by_image
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (B, N, D) to the same shape."""
        if self.training:
            raise RuntimeError("TorchScript has no experts in training: call eval() first.")
        weight_TK, expert_TK = self.choose(x)
        x_TD = x.flatten(0, 1)
        y_TD = torch.zeros_like(x_TD)
        for index, expert in enumerate(self.experts):
            row, choice = torch.where(expert_TK == index)
            output = weight_TK[row, choice].unsqueeze(1).to(x.dtype) * expert(x_TD[row])
            y_TD = y_TD.index_add(0, row, output.to(x.dtype))
        y = y_TD.view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The factors and the indices of each row's experts, (T, K) both."""
        deciding = x[:, :1] if self.by_image else x
        dtype = torch.promote_types(x.dtype, torch.float32)
        gate_BNE = nn.functional.linear(deciding.to(dtype), self.weight_ED.to(dtype)).softmax(2)
        sorted_BNE, order_BNE = gate_BNE.sort(dim=2, descending=True, stable=True)  # of equal ones the first
        weight_BNK = sorted_BNE[:, :, : self.top_k]
        if self.gate_mode == "one":
            weight_BNK = torch.ones_like(weight_BNK)
        elif self.gate_mode == "renorm":
            weight_BNK = weight_BNK / weight_BNK.sum(2, keepdim=True)
        shape = [x.shape[0], x.shape[1], self.top_k]
        return weight_BNK.expand(shape).flatten(0, 1), order_BNE[:, :, : self.top_k].expand(shape).flatten(0, 1)
