"""Models built on the meta device, materialised and initialised by timm's init_weights.

They are as if built in the ordinary way.
"""

import pytest
import timm
import torch
from common import SMALL_VIT
from torch.nn.utils import prune

import timm_moe

MODELS = {
    "vit_tiny_ewa_moe": {},
    "vit_tiny_ewa_moe, equal": dict(expert_init="same"),
    "vit_tiny_ewa_moe, jax": dict(weight_init="jax"),
    "vit_tiny_ewa_moe, skip": dict(weight_init="skip"),
    "vit_tiny_ewa_moe, scaled": dict(fix_init=True),
    "vit_tiny_moe": dict(num_experts=3),
    "vmoe_b16": dict(num_experts=3, pre_logits=True),
    "vmoe_pbe_b16": dict(num_experts=4),
    "vimoe_s14_shared": dict(patch_size=8),
    "vimoe_s14_shared, zero": dict(shared_init="zero_out"),
    "vit_tiny_moe, fine-grained": dict(num_experts=8, expert_width=0.25, shared_expert=True),
    "vit_tiny_moe, parts left over": dict(num_experts=6, expert_width=0.25),
    "vit_tiny_moe, one part of two": dict(num_experts=1, expert_width=0.5),
    "vit_tiny_moe, drop": dict(expert_init="drop"),
    "soft_moe_s16": dict(num_experts=3, moe_layers="every-2"),
    "vit_tiny_moe, expert choice": dict(num_experts=3, router="expert_choice"),
    "widenet_b": {},
    "widenet_b, official": dict(official_compat=True),
    "beit_base_patch16_224_ewa_moe": {},
    "eva02_tiny_patch14_224_ewa_moe": {},
    "deit_tiny_distilled_patch16_224_ewa_moe": {},
    "swin_tiny_patch4_window7_224_ewa_moe": dict(
        img_size=56, patch_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 2), window_size=7
    ),
    "swin_moe_small_patch4_window12_192_32e_cosine": dict(
        **dict(img_size=56, embed_dim=32, depths=(2, 2), num_heads=(2, 2), window_size=7),
        **dict(num_experts=3, moe_layers="every-2"),
    ),
}


def make(case, **kwargs):
    name = case.partition(",")[0]
    size = {} if "swin" in name else SMALL_VIT
    torch.manual_seed(0)
    return timm.create_model(name, **{**size, **MODELS[case], **kwargs})


def spread(values):
    return values.float().std(correction=0).item(), values.float().mean().item()


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.first_case
def test_a_model_from_meta_is_initialised_like_one_that_was_built_in_memory(case):
    expected = make(case)
    with torch.device("meta"):
        model = make(case)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(77)
    kept = dict(model.named_parameters())
    model.init_weights()
    assert list(timm_moe.moe_layers(model)) == list(timm_moe.moe_layers(expected))
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    for path, layer in timm_moe.moe_layers(model).items():
        reference = expected.get_submodule(path)
        for (name, got), like in zip(layer.named_parameters(), reference.parameters(), strict=True):
            std, mean = spread(like)
            assert spread(got) == (
                pytest.approx(std, rel=0.5, abs=1e-7),
                pytest.approx(mean, abs=std + 1e-6),
            )
            if name.startswith("fc1.weight"):
                assert torch.equal(got[0], got[-1]) == torch.equal(like[0], like[-1])
    images = torch.randn(2, 3, *([56, 56] if "swin" in case else [32, 32]))
    # Skipped, it is as memory happened to be.
    for module in (model,) if case.endswith("skip") else (model, expected):
        assert module.eval()(images).isfinite().all()


def test_a_model_in_memory_is_initialised_before_its_conversion():
    for name in ("vit_tiny_patch16_224", "beit_base_patch16_224"):
        model = timm_moe.convert_to_moe(timm.create_model(name, **SMALL_VIT), router="top_k")
        with pytest.raises(RuntimeError, match=r"init_weights\(\) .*before convert_to_moe"):
            model.init_weights()


def test_a_failure_leaves_the_experts_where_they_are():
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    before = {name: value.clone() for name, value in model.state_dict().items() if "mlp.fc" in name}
    with pytest.raises(AssertionError):
        model.init_weights("unknown")
    assert len(timm_moe.moe_layers(model)) == 2
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_a_family_without_init_weights_says_so():
    model = timm.create_model("pit_ti_224_ewa_moe", img_size=64)
    with pytest.raises(AttributeError, match=r"PoolingVisionTransformer has no init_weights\(\)"):
        model.init_weights()


def test_experts_whose_weights_are_computed_are_refused():
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    prune.random_unstructured(timm_moe.moe_layers(model)["blocks.1.mlp"].fc1, "weight", 0.5)
    with pytest.raises(ValueError, match="which would not take the new weights: "):
        model.init_weights()
