"""Sizes of models, see also the tests of the command in tests/scripts."""

import pytest
import timm

import timm_moe
from timm_moe.analysis.info import measure, model_info


def test_a_model_with_averaged_and_routed_layers_is_not_exported_as_a_mean():
    model = timm.create_model("vit_tiny_patch16_224", depth=4)
    timm_moe.convert_to_moe(model, num_experts=2, moe_layers="1")
    timm_moe.convert_to_moe(model, router="top_k", num_experts=2, moe_layers="3")
    found = measure(model.to("meta"), "x")
    assert found.moe_layers == ["blocks.1.mlp", "blocks.3.mlp"]
    assert found.exported is None


@pytest.mark.parametrize("name", ["vit_small_ewa_moe", "vmoe_s32", "vit_xtiny_ewa_moe"])
def test_the_dense_twin_is_the_model_without_experts(name):
    """The exported model of EWA, and what a dense student of V-MoE is compared with."""
    twin, *options = model_info(name).dense_twin.split()
    assert options[:1] in ([], ["--model-kwargs"])
    stated = (option.split("=") for option in options[1:])
    kwargs = {option: int(value) for option, value in stated}
    dense = timm.create_model(twin, num_classes=10, **kwargs)
    experts = timm.create_model(name, num_classes=10)
    of_dense = {path: tuple(weight.shape) for path, weight in dense.state_dict().items()}
    of_experts = {path: tuple(weight.shape) for path, weight in experts.state_dict().items()}
    routed = {path for path in of_experts if ".router." in path}
    assert of_dense.keys() == of_experts.keys() - routed
    assert all(shape == of_experts[path][-len(shape) :] for path, shape in of_dense.items())
