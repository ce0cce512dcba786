"""Padding tokens change nothing: not what tokens give, nor capacities, losses and loads."""

import copy

import pytest
import timm
import torch
from torch import nn

import timm_moe
from timm_moe.training.router_losses import routing_summary

OPTIONS = dict(router="top_k", num_experts=4, top_k=2, capacity_factor=1.0, batch_priority=True, moe_layers="every-1")
NAFLEX = dict(embed_dim=32, depth=2, num_heads=2, patch_size=8, num_classes=5, pos_embed_grid_size=(4, 4))


def naflex(tokens, padded):
    """Two images as patches, of which the second has three tokens less, and room for more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, tokens, 192, generator=generator)
    places = torch.stack([torch.arange(tokens) // 4, torch.arange(tokens) % 4], -1).expand(2, -1, -1)
    valid = torch.arange(tokens).expand(2, -1) < torch.tensor([[tokens], [tokens - 3]])
    room = (0, 0, 0, padded)
    return dict(
        patches=nn.functional.pad(x, room, value=7.0),
        patch_coord=nn.functional.pad(places, room),
        patch_valid=nn.functional.pad(valid, room[2:], value=False),
    )


def randomised(model):
    torch.manual_seed(1)
    for layer in timm_moe.moe_layers(model).values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
    return model


def naflex_vit(**options):
    model = timm.create_model("naflexvit_base_patch16_gap", **NAFLEX)
    return randomised(timm_moe.convert_to_moe(model, **{**OPTIONS, **options}))


def assert_same(model, forward, other):
    """Compare outputs, losses, loads and gradients of two batches that differ in padding alone."""
    twin, results = copy.deepcopy(model), []
    for each, batch in ((model, forward), (twin, other)):
        torch.manual_seed(2)
        output = batch(each)
        loss = output.square().sum() + timm_moe.auxiliary_loss(each)
        loss.backward()
        summary = routing_summary(each)
        gradients = [
            parameter.grad for parameter in timm_moe.moe_layers(each).values().__iter__().__next__().parameters()
        ]
        results.append((output, summary, gradients))
    (output, summary, gradients), (other_output, other_summary, other_gradients) = results
    torch.testing.assert_close(output, other_output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, other_gradients, rtol=1e-3, atol=1e-4)
    assert summary.keys() == other_summary.keys()
    for path in summary:
        torch.testing.assert_close(summary[path], other_summary[path], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, dict(shared_expert=True), dict(capacity_factor="none", aux_loss="importance")])
@pytest.mark.parametrize("training", [True, False])
def test_naflexvit(options, training):
    model = naflex_vit(eval_capacity_factor=0.8, **options).train(training)
    if training:
        assert_same(model, lambda each: each(naflex(9, 0)), lambda each: each(naflex(9, 20)))
    else:
        torch.testing.assert_close(model(naflex(9, 0)), model(naflex(9, 20)))
