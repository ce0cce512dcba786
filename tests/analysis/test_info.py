"""Sizes of models, see also the tests of the command in tests/scripts."""

import timm

import timm_moe
from timm_moe.analysis.info import measure


def test_a_model_with_averaged_and_routed_layers_is_not_exported_as_a_mean():
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    timm_moe.convert_to_moe(model, num_experts=2, moe_layers="1")
    timm_moe.convert_to_moe(model, router="top_k", num_experts=2, moe_layers="3")
    found = measure(model.to("meta"), "x")
    assert found.moe_layers == ["blocks.1.mlp", "blocks.3.mlp"]
    assert found.exported is None
