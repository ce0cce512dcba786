"""A router of your own, by position: neighbouring patches share an expert. It runs a script with the router registered:

python examples/own_router.py train.py --model vit_small_ewa_moe --data-dir DIR --model-kwargs router=position stripes=2
python examples/own_router.py "$(which timm-moe)" routes last.pth.tar --data-dir DIR FOLDER
"""

import runpy
import sys

import torch

import timm_moe
from timm_moe.layers import Router, routing_to


class PositionRouter(Router):
    """Each stripe of an image's tokens goes to the next of E experts; a learned scale of each is its factor."""

    def __init__(self, dim, num_experts, stripes):
        super().__init__(num_experts)
        self.stripes = stripes
        self.scale = torch.nn.Parameter(torch.ones(num_experts))

    def reset_parameters(self):
        torch.nn.init.ones_(self.scale)

    def forward(self, x):
        images, tokens = x.shape[0], x[0, ..., 0].numel()
        stripe = torch.arange(tokens, device=x.device) * self.stripes // tokens
        expert_T = (stripe % self.num_experts).repeat(images)
        return routing_to(expert_T[:, None], self.scale[expert_T][:, None], self.num_experts)


timm_moe.register_router(timm_moe.RouterSpec("position", PositionRouter, options={"stripes": 4}))

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
