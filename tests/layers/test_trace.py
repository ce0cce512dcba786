"""TorchScript traces of routed models keep the capacities of each batch."""

import pytest
import torch
from routed_loop import routed_model
from torch import nn

import timm_moe


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_moe", dict(num_experts=8, eval_capacity_factor=0.5, top_k=2)),
        (
            "vmoe_b32",
            dict(
                num_experts=6,
                eval_capacity_factor=1.1,
                capacity_rounding="floor",
                batch_priority=True,
            ),
        ),
        ("vimoe_s14", dict(num_experts=4, eval_capacity_factor=2.5, capacity_rounding="round")),
        ("widenet_b", dict(eval_capacity_factor=1.2)),
        ("vit_tiny_moe", dict(num_experts=4, eval_capacity_factor=0.6, top_k=2, group_images=2)),
        ("vit_tiny_moe", dict(num_experts=4, top_k=2, group_images=3)),
        ("vit_tiny_moe", dict(num_experts=4, router="expert_choice", group_images=2)),
    ],
)
@pytest.mark.first_case
def test_a_trace_has_the_capacities_of_each_batch(name, options):
    model = routed_model(name, **options).eval()
    for layer in timm_moe.moe_layers(model).values():  # experts that differ
        nn.init.normal_(layer.fc2.weight, std=0.3)
    images = torch.randn(7, 3, 32, 32)
    traced = torch.jit.trace(model, images[:2])
    for part in (images, images[:6], images[:3], images[:1]):
        torch.testing.assert_close(traced(part), model(part))
