"""Route tokens by a router of your own with a loss of its own, in timm's unmodified train.py.

The router and its layer are used by every script that this one runs:

    python examples/own_router.py train.py --model vit_small_ewa_moe OPTIONS \
        --model-kwargs router=sparse_gate top_k=2 target=0.5
    python examples/own_router.py "$(which timm-moe)" routes last.pth.tar --data-dir DIR routes
"""

import runpy
import sys

import torch
from torch import nn

import timm_moe
from timm_moe.layers import RecordingRouter, linear_logits, routing_to


class SparseGateRouter(RecordingRouter):
    """Sends each token to the K experts of largest sigmoid gate.

    A loss keeps the mean gate near a target. It does not balance the experts.

    Args:
        dim: width of the tokens.
        num_experts: E.
        top_k: K.
        target: mean of all gates that the loss aims at.
        gate_loss_weight: weight of the loss.
    """

    def __init__(self, dim, num_experts, top_k, target, gate_loss_weight):
        super().__init__(num_experts, {"gate": gate_loss_weight})
        self.top_k = top_k
        self.target = target
        self.weight = nn.Parameter(torch.empty(num_experts, dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.trunc_normal_(self.weight, std=0.02)

    def experts_of_row(self):
        return self.top_k

    def probabilities(self, x):
        gate_TE = self._gates(x)
        return gate_TE / gate_TE.sum(1, keepdim=True)

    def _gates(self, x):
        return linear_logits(x.flatten(0, -2), self.weight).sigmoid()

    def forward(self, x):
        all_gates_TE = self._gates(x)
        gate_TK, expert_TK = all_gates_TE.topk(self.top_k, dim=1)
        if self.is_recording():
            is_chosen_TE = torch.zeros_like(all_gates_TE, dtype=torch.long).scatter(1, expert_TK, 1)
            mean = all_gates_TE.sum() / max(1, all_gates_TE.numel())  # A batch may be empty.
            loss = (mean - self.target).square()
            self.record({"gate": loss}, is_chosen_TE.sum(0, keepdim=True))
        return routing_to(expert_TK, gate_TK, self.num_experts)


timm_moe.register_router(
    timm_moe.RouterSpec(
        "sparse_gate",
        SparseGateRouter,
        options={"top_k": 1, "target": 0.5, "gate_loss_weight": 0.01},
    )
)

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(f"usage: python {sys.argv[0]} SCRIPT [OPTIONS]")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
