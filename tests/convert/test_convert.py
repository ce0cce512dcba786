"""Placement rules, conversion and the way back."""

import copy
import logging

import pytest
import timm
import torch
from common import SMALL_VIT
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import timm_moe
from timm_moe.convert.blocks import select_blocks
from timm_moe.convert.find import ffn_paths
from timm_moe.layers import MoeMlp


@pytest.mark.parametrize(
    ("rule", "depth", "blocks"),
    [  # as V-MoE places them
        ("every-2", 12, [1, 3, 5, 7, 9, 11]),
        ("every-1", 3, [0, 1, 2]),
        ("last-2", 8, [5, 7]),
        ("last-2", 12, [9, 11]),
        ("last-4", 12, [5, 7, 9, 11]),
        ("last-5", 32, [23, 25, 27, 29, 31]),
        ("tail-3", 12, [9, 10, 11]),
        ("1,3,5", 12, [1, 3, 5]),
        ((5, 1), 12, [1, 5]),
        ("1,1", 12, [1]),
        (3, 12, [3]),
    ],
)
def test_placement_rules(rule, depth, blocks):
    assert select_blocks(rule, depth) == blocks


@given(
    rule=st.sampled_from(["every", "last", "tail"]),
    number=st.integers(0, 40),
    depth=st.integers(1, 40),
)
def test_a_rule_gives_sorted_blocks_of_the_model_or_an_error(rule, number, depth):
    available = depth // 2 if rule == "last" else depth
    if not 1 <= number <= available:
        with pytest.raises(ValueError, match=rf"'{rule}-{number}'.* 1 and {available}\b"):
            select_blocks(f"{rule}-{number}", depth)
        return
    blocks = select_blocks(f"{rule}-{number}", depth)
    assert blocks
    assert blocks == sorted(set(blocks))
    assert set(blocks) <= set(range(depth))
    assert rule == "every" or len(blocks) == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moe_layers": "some"}, "moe_layers .*'every-n', 'last-n', 'tail-n'.*'some'"),
        ({"moe_layers": ""}, "moe_layers must be"),
        ({"moe_layers": "every-x"}, "moe_layers must be"),
        ({"moe_layers": [1.5]}, "moe_layers must be"),
        ({"moe_layers": []}, "moe_layers must be"),
        ({"moe_layers": "every-5"}, r"'every-5'.* 1 and 4\b"),
        ({"moe_layers": "last-3"}, "'last-3'.* 1 and 2, .*odd-numbered"),
        ({"moe_layers": "tail-0"}, r"'tail-0'.* 1 and 4\b"),
        ({"moe_layers": "1,4"}, "block 4, .*blocks 0 to 3"),
        ({"moe_layers": -1}, "names block -1"),
        ({"num_experts": 0}, r"num_experts .*integer.* 0\."),
        ({"num_experts": 2.0}, r"num_experts .*integer.* 2\.0"),
        ({"share_rate": 0.76}, r"share_rate .*0\.75 for 4 experts, .*0\.76"),
        ({"share_rate": -0.1}, r"share_rate .*-0\.1"),
        ({"num_experts": 1}, "num_experts=1 needs share_rate=0"),
        ({"share_rate": float("nan")}, "share_rate .*nan"),
        ({"share_schedule": "cosine"}, "share_schedule .*linear, constant, early, late.*'cosine'"),
        ({"share_schedule": min}, "share_schedule .*linear, constant, early, late.*function min"),
        ({"router": "magic"}, "router .*random, top_k, expert_choice, soft.*'magic'"),
        ({"expert_init": "zero"}, "expert_init .*'zero'"),
    ],
)
@pytest.mark.first_case
def test_bad_options_leave_the_model_as_it_was(dense_vit, options, message):
    with pytest.raises(ValueError, match=message):
        timm_moe.convert_to_moe(dense_vit, **options)
    assert not timm_moe.moe_layers(dense_vit)
    with pytest.raises(ValueError, match=message):
        timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, **options)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"ResNet .*modules="):
        timm_moe.convert_to_moe(timm.create_model("resnet18"))


class Counting(nn.GELU):
    """An activation that holds a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


@pytest.mark.parametrize(
    ("holding", "rule", "places"),
    [
        ((1,), "every-2", [3]),
        ((0,), "every-2", [1, 3]),
        ((0, 2), "every-2", [1, 3]),
        ((3,), "tail-2", [2]),
        ((3,), "last-2", [1]),
        ((1,), "0,2", [0, 2]),
        ((1,), "every-1", [0, 2, 3]),
    ],
)
def test_a_block_that_holds_buffers_is_told_and_counted(
    dense_vit, images, caplog, holding, rule, places
):
    for block in holding:
        dense_vit.blocks[block].mlp.act = Counting()
    expected = dense_vit(images)
    timm_moe.convert_to_moe(dense_vit, moe_layers=rule)
    assert list(timm_moe.moe_layers(dense_vit)) == [f"blocks.{block}.mlp" for block in places]
    told = (
        f"Left as it is: blocks.{holding[0]}.mlp, a Mlp, cannot become experts: it holds a buffer "
        "(act.calls)"
    )
    assert [
        record.getMessage()[: len(told)]
        for record in caplog.records
        if record.levelname == "WARNING"
    ] == [told]
    assert torch.equal(dense_vit(images), expected)


@pytest.mark.parametrize("rule", ["1", "1,3", [1], "last-1"])
def test_a_block_that_holds_buffers_is_refused_by_its_number(dense_vit, rule):
    for block in (1, 3):
        dense_vit.blocks[block].mlp.act = Counting()
    with pytest.raises(ValueError, match=r"blocks\.[13]\.mlp, .*buffer \(act\.calls"):
        timm_moe.convert_to_moe(dense_vit, moe_layers=rule)
    assert not timm_moe.moe_layers(dense_vit)


def test_a_layer_is_not_converted_twice(ewa_vit):
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp .*expert layer"):
        timm_moe.convert_to_moe(ewa_vit)
    timm_moe.convert_to_moe(ewa_vit, moe_layers="0,2")
    assert len(timm_moe.moe_layers(ewa_vit)) == 4


def test_convert_and_back_gives_the_dense_model_bit_for_bit(dense_vit, images):
    expected, weights = dense_vit(images), copy.deepcopy(dense_vit.state_dict())
    model = timm_moe.convert_to_moe(dense_vit, num_experts=4)
    assert list(timm_moe.moe_layers(model)) == ["blocks.1.mlp", "blocks.3.mlp"]
    assert not model.blocks[1].mlp.training
    assert torch.equal(model(images), expected)
    torch.testing.assert_close(model.train()(images), expected)
    dense = timm_moe.to_dense(model)
    assert type(dense) is VisionTransformer
    assert dense.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize(
    "arch", ["deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224"]
)
@pytest.mark.first_case
def test_other_families_convert_in_memory(arch):
    model = (
        timm.create_model(arch, depth=2)
        if "swin" not in arch
        else timm.create_model(arch, depths=(1, 1, 1, 1))
    )
    model.eval()
    x = torch.randn(1, 3, 224, 224)
    expected = model(x)
    timm_moe.convert_to_moe(model, num_experts=2)
    assert torch.equal(model(x), expected)
    assert torch.equal(timm_moe.to_dense(model)(x), expected)


def test_a_layer_that_two_networks_share_stays_shared(dense_vit, caplog):
    """Experts of each would have a copy of its own. Blocks may share a whole network."""
    blocks = dense_vit.blocks
    blocks[3].mlp.fc1 = blocks[1].mlp.fc1
    size = sum(parameter.numel() for parameter in dense_vit.parameters())
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp, .*also called blocks\.3\.mlp\.fc1\."):
        timm_moe.convert_to_moe(dense_vit, moe_layers="1")
    dense = timm_moe.to_dense(timm_moe.convert_to_moe(dense_vit, moe_layers="tail-2"))
    assert "Left as it is: blocks.1.mlp, " in caplog.text
    assert sum(parameter.numel() for parameter in dense.parameters()) == size
    blocks[3].mlp = blocks[1].mlp
    timm_moe.convert_to_moe(dense_vit, moe_layers="1")
    assert isinstance(blocks[3].mlp, MoeMlp)


class WithAdapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.adapter = base, nn.Linear(32, 32)

    def forward(self, x):
        return self.base(x) + self.adapter(x)


@pytest.mark.parametrize(
    "replace",
    [
        WithAdapter,
        lambda mlp: nn.Sequential(mlp, nn.Linear(32, 32)),
        lambda mlp: nn.Identity(),
        checkpoint_wrapper,
    ],
)
def test_a_block_whose_network_was_replaced_counts_too(replace, dense_vit, caplog):
    dense_vit.blocks[0].mlp = replace(dense_vit.blocks[0].mlp)
    other = copy.deepcopy(dense_vit)
    timm_moe.convert_to_moe(dense_vit)
    assert list(timm_moe.moe_layers(dense_vit)) == ["blocks.1.mlp", "blocks.3.mlp"]
    timm_moe.convert_to_moe(other, moe_layers="1")
    assert list(timm_moe.moe_layers(other)) == ["blocks.1.mlp"]
    assert caplog.text.count("Left as it is: blocks.0.mlp cannot become experts: it is ") == 2
    message = r"blocks\.0\.mlp cannot .* it is (an Identity|of an unknown class, \w+ \(modules=)"
    with pytest.raises(ValueError, match=message):
        timm_moe.convert_to_moe(other, moe_layers="0")


class OwnNorm(nn.LayerNorm):
    """A norm of a class of one's own."""


def test_other_parts_of_a_block_are_no_networks(dense_vit, caplog):
    for block in dense_vit.blocks:
        block.mlp_norm, block.mlp_drop_path = OwnNorm(32), nn.Identity()
    timm_moe.convert_to_moe(dense_vit)
    assert list(timm_moe.moe_layers(dense_vit)) == ["blocks.1.mlp", "blocks.3.mlp"]
    assert not caplog.messages


def test_to_dense_is_the_mean_of_the_experts_and_shares_nothing(ewa_vit, images):
    ewa_vit.train()
    dense = timm_moe.to_dense(ewa_vit)
    assert dense.training
    assert type(dense) is VisionTransformer
    assert torch.equal(dense.blocks[1].mlp.fc1.weight, ewa_vit.blocks[1].mlp.fc1.weight.mean(0))
    assert torch.equal(dense.eval()(images), ewa_vit.eval()(images))
    for parameter in dense.parameters():
        parameter.data.zero_()
    assert ewa_vit.eval()(images).abs().max() > 0
    assert len(timm_moe.moe_layers(ewa_vit)) == 2


def test_to_dense_leaves_the_modes_of_a_graph(images):
    """torchvision's graphs come out of deepcopy in training mode."""
    model = timm.create_model(
        "vit_tiny_ewa_moe", features_only=True, feature_cls="fx", out_indices=(1, 3), **SMALL_VIT
    ).eval()
    before = model(images)
    dense = timm_moe.to_dense(model)
    for network in (model, dense):
        assert not any(module.training for module in network.modules())
        for features, expected in zip(network(images), before, strict=True):
            assert torch.equal(features, expected)


def test_the_network_of_a_pooling_head_is_in_no_block():
    vit = timm.create_model(
        "vit_tiny_patch16_224", global_pool="map", class_token=False, **SMALL_VIT
    )
    alone = ffn_paths(vit)
    assert alone == [f"blocks.{block}.mlp" for block in range(4)]
    assert ffn_paths(nn.Sequential(vit, nn.Linear(2, 2))) == [f"0.{path}" for path in alone]


def test_to_dense_refuses_a_dense_model_and_unknown_methods(dense_vit, ewa_vit):
    with pytest.raises(ValueError, match="has no expert layers"):
        timm_moe.to_dense(dense_vit)
    with pytest.raises(ValueError, match=r"method .*average, sum, topk, svd, random.*'best'"):
        timm_moe.to_dense(ewa_vit, method="best")


@pytest.mark.parametrize("router", ["random", "top_k"])
def test_to_dense_has_nothing_of_the_conversion(dense_vit, router):
    """The experts take over what the dense network is now.

    That is which parameters are trained, the dropout, and the mode.
    """
    dense_vit.blocks[1].mlp.drop1.p = 0.2
    dense_vit.blocks[3].mlp.fc1.weight.requires_grad_(False)
    options = dict(shared_expert=True) if router == "top_k" else {}
    model = timm_moe.convert_to_moe(dense_vit, router=router, expert_dropout=0.5, **options)
    assert not model.blocks[3].mlp.fc1.weight.requires_grad
    model.requires_grad_(True)
    model.blocks[1].mlp.fc2.requires_grad_(False)
    model.train()
    dense = timm_moe.to_dense(model)
    frozen = [name for name, parameter in dense.named_parameters() if not parameter.requires_grad]
    assert frozen == ["blocks.1.mlp.fc2.weight", "blocks.1.mlp.fc2.bias"]
    rates = {
        name: module.p
        for name, module in dense.named_modules()
        if isinstance(module, nn.Dropout) and module.p
    }
    assert rates == {"blocks.1.mlp.drop1": 0.2}
    assert all(module.training for module in dense.modules())
    assert not any(module.training for module in timm_moe.to_dense(model.eval()).modules())


def test_to_dense_has_a_dropout_that_was_changed_since(dense_vit):
    model = timm_moe.convert_to_moe(dense_vit)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    assert {
        module.p for module in timm_moe.to_dense(model).modules() if isinstance(module, nn.Dropout)
    } == {0.3}


def test_says_in_a_line_what_it_replaced(dense_vit, caplog):
    caplog.set_level(logging.INFO)
    timm_moe.convert_to_moe(dense_vit, router="top_k", shared_expert=True, moe_layers="3")
    timm.create_model("vit_tiny_moe", **SMALL_VIT)
    assert caplog.messages == [
        "VisionTransformer has 4 experts and a shared one in blocks.3.mlp, by "
        "TopKRouter(num_experts=4, top_k=1)."
    ]
