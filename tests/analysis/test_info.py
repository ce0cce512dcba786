"""Sizes of models, see also the tests of the command in tests/scripts."""

import pytest
import timm
from common import SMALL_VIT

import timm_moe
from timm_moe.analysis.info import measure, model_info


def test_a_model_with_averaged_and_routed_layers_is_not_exported_as_a_mean():
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    timm_moe.convert_to_moe(model, num_experts=2, moe_layers="1")
    timm_moe.convert_to_moe(model, router="top_k", num_experts=2, moe_layers="3")
    found = measure(model.to("meta"), "x")
    assert found.moe_layers == ["blocks.1.mlp", "blocks.3.mlp"]
    assert found.exported is None


def test_layers_that_differ_are_told_of():
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    timm_moe.convert_to_moe(model, router="top_k", num_experts=12, top_k=10, moe_layers="1")
    timm_moe.convert_to_moe(model, router="top_k", num_experts=4, top_k=2, moe_layers="3")
    text = measure(model.to("meta"), "x").rows()["experts"]
    assert text == "4/12 in each of 2 layers, the model has 4 blocks, a token takes 2/10"


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("vit_small_ewa_moe", "vit_small_patch16_224"),
        ("deit_tiny_patch16_224_ewa_moe", "deit_tiny_patch16_224"),
        ("vit_xtiny_ewa_moe", "vit_xtiny"),
        ("vmoe_b16", "vit_base_patch16_224"),
        ("widenet_b", "ones_b"),
        ("vmoe_s32", None),  # of V-MoE's own size
        ("vimoe_s14", None),  # at 224 pixels instead of 518
        ("soft_moe_s14", None),
        ("vit_xtiny", None),
    ],
)
@pytest.mark.first_case
def test_the_dense_twin_differs_in_the_experts_alone(name, twin):
    assert model_info(name).dense_twin == twin
    rows = model_info(name).rows()
    assert rows.get("dense twin") == twin


@pytest.mark.parametrize(
    ("name", "options", "twin"),
    [
        ("vit_xtiny_ewa_moe", {"img_size": 96, "num_experts": 2}, "vit_xtiny"),
        ("vit_tiny_ewa_moe", {"depth": 4, "router": "top_k", "top_k": 2}, "vit_tiny_patch16_224"),
        ("vit_tiny_ewa_moe", {"num_classes": 7, "drop_path_rate": 0.1}, "vit_tiny_patch16_224"),
        ("vmoe_b16", {"img_size": 96, "capacity_factor": "none"}, "vit_base_patch16_224"),
        ("vmoe_s32", {"img_size": 96}, None),
        ("vmoe_b16", {"pre_logits": True}, None),  # timm's ViT has no such layer
    ],
)
@pytest.mark.first_case
def test_the_dense_twin_takes_the_same_options(name, options, twin):
    assert model_info(name, **options).dense_twin == twin


def test_experts_that_choose_take_a_token_so_often_on_average():
    """Both are counted by the mean, which may be below one expert."""
    options = {**SMALL_VIT, "router": "expert_choice", "num_experts": 8}
    info = {
        factor: model_info("vit_tiny_moe", capacity_factor=factor, **options)
        for factor in (0.5, 1.0, 2.5)
    }
    assert [each.experts_of_row for each in info.values()] == [
        "0.5 on average",
        "1",
        "2.5 on average",
    ]
    of_half = info[1.0].activated - info[0.5].activated
    assert info[2.5].activated - info[1.0].activated == 3 * of_half > 0


@pytest.mark.parametrize(
    ("name", "options", "takes"),
    [
        ("vimoe_s14", {}, ", an image takes 1"),
        ("vmoe_pbe_s32", {"num_experts": 4}, "; 2 members, a token of each takes 1"),
    ],
)
def test_what_is_routed_is_told(name, options, takes):
    assert model_info(name, **SMALL_VIT, **options).rows()["experts"].endswith(f"blocks{takes}")
