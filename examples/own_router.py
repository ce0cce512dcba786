"""Route tokens by their norm with a router of your own, and run a script with it registered:

python examples/own_router.py train.py --model vit_small_ewa_moe … --model-kwargs router=norm
per_image=True python examples/own_router.py "$(which timm-moe)" routes last.pth.tar --data-dir DIR
FOLDER
"""

import runpy
import sys

import torch

import timm_moe
from timm_moe.layers import Router, routing_to


class NormRouter(Router):
    """Sends the 1/E of the tokens with the smallest norm to the first expert, and so on.

    Each expert has a learned scale.
    """

    def __init__(self, dim, num_experts, per_image):
        super().__init__(num_experts)
        self.per_image = per_image
        self.scale = torch.nn.Parameter(torch.ones(num_experts))

    def reset_parameters(self):
        torch.nn.init.ones_(self.scale)

    def forward(self, x):
        norm = x.flatten(1, -2).norm(dim=-1)
        norm = norm if self.per_image else norm.view(1, -1)
        rank = norm.argsort(1).argsort(1)
        expert_TK = (rank * self.num_experts // norm.shape[1]).view(-1, 1)
        return routing_to(expert_TK, self.scale[expert_TK], self.num_experts)


timm_moe.register_router(timm_moe.RouterSpec("norm", NormRouter, options={"per_image": False}))

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
