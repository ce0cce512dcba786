"""Experts that are fused into one network by learned weights (ExFusion, arXiv 2603.27965).

They are fused before each forward.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from timm_moe.convert.registry import RouterSpec, register_router
from timm_moe.layers import AnyRouting, MoeMlp, Router
from timm_moe.layers.checks import check_number
from timm_moe.layers.functional import no_autocast


class Fusion(Router):
    """Learned weights that fuse the experts of a layer. It routes nothing.

    The weights are the softmax of E logits that start at zero, so the network starts as the mean of
    the experts. With a ``common_share`` the first expert has this weight always, and the others
    divide the rest by their softmax (XFT, arXiv 2404.15247, section 3.2). The full text of
    ExFusion's paper was not available: softmax and initial logits are choices made here.

    Args:
        num_experts: E.
        common_share: fixed weight of the first expert, in [0, 1); 0 for none.

    Attributes:
        logits: parameter (E,); (E - 1,) with a common expert.

    Raises:
        ValueError: if the share is out of range, or the common expert is the only one.
    """

    depends_on_input = False

    def __init__(self, num_experts: int, common_share: float = 0.0):
        check_number("common_share", common_share, 0)
        if common_share >= 1 or (common_share and num_experts == 1):
            raise ValueError(
                "common_share must lie below 1 and leave something for other experts, got "
                f"{common_share!r} for {num_experts} experts."
            )
        super().__init__(num_experts)
        self.common_share = common_share
        self.logits = nn.Parameter(torch.zeros(num_experts - bool(common_share)))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.logits)

    def experts_of_row(self) -> int:
        return self.num_experts

    def weights(self) -> Tensor:
        """Compute the weights (E,), which add up to 1, in float32 or wider."""
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32))
        if not self.common_share:
            return logits.softmax(0)
        others = (1 - self.common_share) * logits.softmax(0)
        return torch.cat([others.new_full((1,), self.common_share), others])

    forward = weights

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, common_share={self.common_share}"


class FusedMlp(MoeMlp):
    """E experts that every forward, also in training, computes as one network.

    The network is their sum with learned weights.

    A step costs a dense step and the fusion, as no token is dispatched. The fused network is
    exported.

    It takes the arguments of :class:`MoeMlp`, the router being a :class:`Fusion`, and warns of
    experts that start as copies, also from a dense checkpoint: they get the same gradients and stay
    copies.
    """

    deploys_dense = True

    def __init__(
        self,
        ffn: nn.Module,
        router: Fusion,
        expert_init: str = "same",
        **options: Any,
    ):
        super().__init__(ffn, router, expert_init, **options)
        if expert_init == "same":
            self._warn_of_copies()

    def _warn_of_copies(self) -> None:
        if self.num_experts > 1:
            warnings.warn(
                "Fused experts that begin as copies of one network have the same gradients and "
                "remain copies, so this trains a dense network: use expert_init='independent', or "
                "a checkpoint of experts.",
                stacklevel=3,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Start with equal weights if the checkpoint has experts but no weights to fuse them."""
        loaded = [
            state_dict[prefix + name] for name in self.stacked_shapes if prefix + name in state_dict
        ]
        if len(loaded) == len(self.stacked_shapes):
            for name, value in self.router.state_dict(prefix=f"{prefix}router.").items():
                state_dict.setdefault(name, torch.zeros_like(value, device=loaded[0].device))
        if self._dense_in(state_dict, prefix) and self.expert_init != "drop":
            self._warn_of_copies()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def stacked_weights(self) -> dict[str, Tensor]:
        """Return the fused network as the only one."""
        self._require_merged(self.adapted())
        with torch.no_grad():
            return {name: fused.unsqueeze(0) for name, fused in self._fused().items()}

    def _fused(self) -> dict[str, Tensor]:
        """Add up the experts by their weights, in float32 or wider.

        Raises:
            ValueError: if other processes hold some of the experts.
        """
        if self.dispatcher is not None:
            raise ValueError(
                f"{self.path} merges its experts, which needs all of them in each process."
            )
        weights_E, fused = self.router(), {}
        with no_autocast(weights_E):
            for name, stacked in self.expert_weights().items():
                # Torch multiplies weights on meta to what nobody wrote.
                if stacked.device != weights_E.device:
                    raise RuntimeError(
                        f"{name} and its weight are on different devices: move the model to one "
                        "device."
                    )
                wide = stacked.to(torch.promote_types(stacked.dtype, weights_E.dtype))
                summed = weights_E.to(wide.dtype) @ wide.reshape(self.num_experts, -1)
                fused[name] = summed.view(wide.shape[1:]).to(stacked.dtype)
        return fused

    def compute(self, x: Tensor, routing: AnyRouting | None) -> Tensor:
        """Map each row of x (..., D) by the fused network, which has no use for a routing."""
        return self.run_network(self._fused(), x)


def _fusion(dim: int, num_experts: int, *, common_share: float) -> Fusion:
    return Fusion(num_experts, common_share)


register_router(
    RouterSpec(
        "fused", _fusion, dict(common_share=0.0), layer=FusedMlp, layer_options={}, built_in=True
    )
)
