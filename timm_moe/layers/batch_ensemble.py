"""Linear layers that the members of an ensemble share but for factors (BatchEnsemble, arXiv 2002.06715; pBE, appendix).

Shape suffixes: B images, M members, D width.
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from .checks import check_integer

FACTOR_INITS = ("sign", "normal")


class BatchEnsembleLinear(nn.Module):
    """``((x * r_m) U) * s_m + b_m`` for the m-th member: one matrix U for all, two vectors and a bias for each.

    The batch holds each image M times in a row, once for each member.

    Args:
        linear: the layer to replace. All members begin with its weight and its bias.
        ensemble_size: M.
        factor_init: how the factors begin: ``"sign"``, 1 or -1 with equal probability, or ``"normal"``, N(1, 0.5).

    Attributes:
        weight: (D', D), U.
        bias: (M, D'), or None.
        input_factor: (M, D), r.
        output_factor: (M, D'), s.

    Raises:
        ValueError: if M is no positive integer, or on an unknown ``factor_init``.
    """

    def __init__(self, linear: nn.Linear, ensemble_size: int, factor_init: str = "sign"):
        super().__init__()
        check_integer("ensemble_size", ensemble_size, 1)
        if not isinstance(factor_init, str) or factor_init not in FACTOR_INITS:
            raise ValueError(f"factor_init must be one of {', '.join(FACTOR_INITS)}, got {factor_init!r}.")
        self.ensemble_size = ensemble_size
        self.factor_init = factor_init
        self.weight = linear.weight
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().repeat(ensemble_size, 1))
        self.input_factor = nn.Parameter(linear.weight.new_empty(ensemble_size, linear.in_features))
        self.output_factor = nn.Parameter(linear.weight.new_empty(ensemble_size, linear.out_features))
        self._draw_factors()

    @torch.no_grad()
    def _draw_factors(self) -> None:
        for factor in (self.input_factor, self.output_factor):
            if self.factor_init == "sign":
                factor.bernoulli_(0.5).mul_(2).sub_(1)
            else:
                factor.normal_(1, 0.5)

    def init_weights(self) -> None:
        """As timm's linear layers in a ViT; the factors anew."""
        trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self._draw_factors()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """A dense layer's bias becomes that of every member, and the factors stay as they were drawn."""
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None and bias.ndim == 1:
            state_dict[f"{prefix}bias"] = bias.repeat(self.ensemble_size, 1)
            for name in ("input_factor", "output_factor"):
                state_dict.setdefault(prefix + name, getattr(self, name).detach())
        elif bias is not None and bias.shape[0] != self.ensemble_size:
            raise ValueError(
                f"The checkpoint has {bias.shape[0]} members in {prefix}bias, the model has {self.ensemble_size}: "
                f"create the model with ensemble_size={bias.shape[0]}."
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        """Map x of shape (B M, ..., D) to (B M, ..., D').

        Raises:
            ValueError: if M does not divide the batch.
        """
        members = self.ensemble_size
        if x.shape[0] % members:
            raise ValueError(f"A batch of {x.shape[0]} does not hold each image {members} times, once for each member.")
        x = x.unflatten(0, (x.shape[0] // members, members))
        y = nn.functional.linear(x * _like(self.input_factor, x), self.weight)
        y = y * _like(self.output_factor, y)
        return (y if self.bias is None else y + _like(self.bias, y)).flatten(0, 1)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, ensemble_size={self.ensemble_size}"


def _like(factor_MD: Tensor, x: Tensor) -> Tensor:
    """For x of shape (B, M, ..., D)."""
    return factor_MD.view(factor_MD.shape[0], *[1] * (x.ndim - 3), factor_MD.shape[1])
