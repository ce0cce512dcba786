"""Starts of upcycled routed models, scaled by gates or dense by ``renorm`` (docs/vmoe.md)."""

import pytest
import torch
from common import make_model
from torch.nn import functional as F

from timm_moe import moe_layers


@pytest.mark.parametrize(
    ("dim", "experts", "top_k", "share"), [(768, 32, 2, 0.16), (384, 4, 1, 0.35)]
)
def test_the_gates_of_a_new_router_sum_to(dim, experts, top_k, share):
    torch.manual_seed(0)
    sums = []
    for _ in range(20):
        weight = torch.nn.init.trunc_normal_(torch.empty(experts, dim), std=0.02)
        gates = F.linear(F.layer_norm(torch.randn(512, dim), (dim,)), weight).softmax(1)
        sums.append(gates.topk(top_k, 1).values.sum(1).mean())
    assert torch.stack(sums).mean().item() == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("name", ["vit_tiny_moe", "vmoe_s32"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_only_renormalised_gates_start_as_the_dense_model(name, top_k):
    torch.manual_seed(0)
    routed = {
        mode: make_model(name, gate_mode=mode, top_k=top_k).eval() for mode in ("prob", "renorm")
    }
    dense = make_model("vit_tiny_patch16_224").eval()
    images = torch.randn(2, *dense.pretrained_cfg["input_size"])[..., :32, :32]
    for model in routed.values():
        model.load_state_dict(dense.state_dict(), strict=False)  # the routers keep their weights
    torch.testing.assert_close(routed["renorm"](images), dense(images))
    assert (routed["prob"](images) - dense(images)).abs().max() > 1e-3


def test_with_one_renormalised_gate_the_router_learns_from_its_losses_alone():
    model = make_model("vit_tiny_moe", gate_mode="renorm", top_k=1)
    (layer, *_) = moe_layers(model).values()
    images = torch.randn(2, 3, 32, 32)
    model.train()(images).sum().backward()
    gradient = layer.router.weight.grad
    assert gradient is None or gradient.abs().max() < 1e-6
