"""Soft MoE (arXiv 2308.00951): each expert computes mixtures of an image's tokens.

Nothing is chosen or dropped. Shape suffixes: B images, N tokens of an image, D width, E experts, P
slots of an expert, S slots of all experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .checks import check_integer
from .functional import Mode, current_mode, no_autocast
from .moe_mlp import MoeMlp
from .router import Router
from .routing import AnyRouting


class SoftRouter(Router):
    """Weights that mix tokens into slots, and slots into tokens (section 2.1).

    The logit of a token and a slot is the cosine of the token and the slot's parameters, times a
    learned scale (section 2.3). It is computed in float32 at least, under autocast too.

    Args:
        dim: D.
        num_experts: E.
        slots_per_expert: P.

    Attributes:
        slots: (E, P, D) parameter.
        scale: (1,) parameter, which starts at 1.

    Raises:
        ValueError: if ``slots_per_expert`` is below 1.
    """

    depends_on_input = False  # Tokens are not routed, so there are no routes of classes.
    needs_whole_images = True

    def __init__(self, dim: int, num_experts: int, slots_per_expert: int = 1):
        check_integer("slots_per_expert", slots_per_expert, 1)
        super().__init__(num_experts)
        self.slots_per_expert = slots_per_expert
        self.slots = nn.Parameter(torch.empty(num_experts, slots_per_expert, dim))
        self.scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw from the truncated normal distribution of V-MoE's code, of variance 1 / (E D)."""
        # The number is the standard deviation of a normal one that is cut at two deviations.
        std = (self.num_experts * self.slots.shape[2]) ** -0.5 / 0.87962566
        nn.init.trunc_normal_(self.slots, std=std, a=-2 * std, b=2 * std)
        nn.init.ones_(self.scale)

    def experts_of_row(self) -> int:
        """Return E, since a token is part of all slots."""
        return self.num_experts

    def forward(self, x_BND: Tensor, padding_BN: Tensor | None = None) -> Any:
        """Compute the weights of the tokens in each slot and of the slots in each token's output.

        Args:
            x_BND: the tokens.
            padding_BN: boolean, true for padding.

        Returns:
            Two tensors (B, N, S), S = E P: the first adds up to 1 over the tokens that are no
            padding, the second over the slots.
        """
        with no_autocast(x_BND):
            dtype = torch.promote_types(x_BND.dtype, torch.float32)
            slot_SD = _unit(self.slots.to(dtype)).flatten(0, 1) * self.scale.to(dtype)
            logits_BNS = nn.functional.linear(_unit(x_BND.to(dtype)), slot_SD)
            masked_BNS = logits_BNS
            if padding_BN is not None:
                # With -inf an image that is padding alone would give NaN.
                least = torch.finfo(dtype).min
                masked_BNS = logits_BNS.masked_fill(padding_BN.unsqueeze(2), least)
            return masked_BNS.softmax(1), logits_BNS.softmax(2)

    def extra_repr(self) -> str:
        """Return the options that printing the module shows."""
        return f"num_experts={self.num_experts}, slots_per_expert={self.slots_per_expert}"


def _unit(x: Tensor) -> Tensor:
    """Scale rows (..., D) to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class SoftMoeMlp(MoeMlp):
    """The layer of Soft MoE: every expert computes P slots of each image.

    A slot is a weighted mean of all tokens, an output a weighted mean of all slots (section 2.1,
    algorithm 1). Outputs are differentiable in all weights, need no auxiliary loss, and cost the
    same for any number of experts with the same number of slots. An upcycled layer does not start
    as the dense network.

    It takes the arguments of :class:`MoeMlp`, the router being a :class:`SoftRouter`.
    """

    def padding_of(self, x: Tensor) -> None:
        """Return None: :meth:`compute` masks padding, since images must keep their shape."""

    def compute(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Map the tokens (B, ..., D) of B images, to zero for padding, which takes part in no slot.

        Raises:
            ValueError: if a routing is given, or x has less than three dimensions.
        """
        if routing is not None:
            raise ValueError("Soft MoE mixes the tokens of an image: there is no routing to give.")
        if x.ndim < 3:
            raise ValueError(
                f"Soft MoE needs the tokens of images, (B, ..., D), got a tensor {tuple(x.shape)}."
            )
        padding = self.padding
        if padding is not None:
            padding = padding.flatten(1) if padding.shape == x.shape[:-1] else None

        x_BND = x.flatten(1, -2)
        dispatch_BNS, combine_BNS = self.router(x_BND, padding)
        x_BSD = dispatch_BNS.transpose(1, 2).to(x.dtype) @ x_BND
        x_ECD = x_BSD.unflatten(1, (self.num_experts, -1)).transpose(0, 1).flatten(1, 2)  # C = B P
        y_EBPD = self._run_slots(x_ECD).unflatten(1, (-1, self.router.slots_per_expert))
        y_BSD = y_EBPD.transpose(0, 1).flatten(1, 2)
        y_BND = combine_BNS.to(y_BSD.dtype) @ y_BSD
        if padding is not None:
            y_BND = y_BND.masked_fill(padding.unsqueeze(2), 0)
        return y_BND.unflatten(1, x.shape[1:-1])

    def _run_slots(self, x_ECD: Tensor) -> Tensor:
        """Apply each expert to its C rows, (E, C, D) -> (E, C, width of the outputs).

        The rows are runs for a dispatcher to other processes, and on a CPU, where that is faster.
        """
        experts, rows, _ = x_ECD.shape
        mode = current_mode()
        x_ND = x_ECD.flatten(0, 1)
        has_runs = x_ECD.is_cpu and self.is_grouped and mode in (Mode.EAGER, Mode.COMPILED)
        if self.dispatcher is None and not has_runs:
            return self.run_batched(x_ND, mode)
        offsets = torch.arange(1, experts + 1, device=x_ECD.device) * rows
        return self.run(x_ND, offsets, None, mode).unflatten(0, x_ECD.shape[:2])
