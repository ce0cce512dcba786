"""Weights that a file replaces at once are not drawn; all others are."""

import timm
import torch
from conftest import SMALL_VIT
from torch import nn

import timm_moe
from timm_moe.checkpoints.source import ModelSpec, load_source
from timm_moe.uninitialized import uninitialized


def test_nothing_is_drawn_in_the_block():
    state = torch.get_rng_state()
    with uninitialized():
        timm.create_model("vit_tiny_moe", **SMALL_VIT)
        nn.init.uniform_(tensor=torch.empty(3))
        assert torch.equal(torch.get_rng_state(), state)
    timm.create_model("vit_tiny_moe", **SMALL_VIT)
    assert not torch.equal(torch.get_rng_state(), state)


def test_routers_that_a_dense_checkpoint_lacks_are_drawn(tmp_path):
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    torch.save({"state_dict": dense.state_dict()}, tmp_path / "dense.pth")
    spec = ModelSpec(name="vit_tiny_moe", kwargs=SMALL_VIT)
    model = load_source(tmp_path / "dense.pth", spec)
    for layer in timm_moe.moe_layers(model).values():
        assert 0.01 < layer.router.weight.std() < 0.04
        assert torch.equal(layer.fc1.weight[0], layer.fc1.weight[1])
