"""Swin-MoE: places of the experts, options, parameters, dense weights in and out."""

import pytest
import timm
import torch

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe.layers import CosineRouter, TopKRouter
from timm_moe.models.registered import weightless_model
from timm_moe.models.swin_moe import VARIANTS

SMALL = dict(img_size=64, window_size=4, embed_dim=16, depths=(1, 1, 2, 2), num_heads=(1, 2, 2, 4))
DENSE = "swin_small_patch4_window7_224"


def small(name="swin_moe_small_patch4_window12_192_8e", **options):
    torch.manual_seed(0)
    return timm.create_model(
        name, **{**SMALL, "moe_layers": "last-2", "num_experts": 3, "num_classes": 5, **options}
    )


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.first_case
def test_the_published_places_options_and_parameters(name):
    model = weightless_model(name, num_classes=21841)
    layers = timm_moe.moe_layers(model)
    blocks = [f"layers.2.blocks.{block}.mlp" for block in range(1, 18, 2)] + [
        "layers.3.blocks.1.mlp"
    ]
    assert list(layers) == blocks
    dim, experts = (
        {"small": 96, "base": 128}[name.split("_")[2]],
        int(name.split("_")[6].removesuffix("e")),
    )
    dense = weightless_model(
        f"swin_{name.split('_')[2]}_patch4_window7_224",
        img_size=192,
        window_size=12,
        num_classes=21841,
    )
    expected = sum(parameter.numel() for parameter in dense.parameters())
    for layer in layers.values():
        router, width = layer.router, layer.fc1.weight.shape[2]
        assert layer.num_experts == experts
        assert type(router) is (CosineRouter if name.endswith("cosine") else TopKRouter)
        assert (router.top_k, router.noise_std, router.batch_priority, router.gate_mode) == (
            1,
            1.0,
            True,
            "prob",
        )
        assert (router.capacity_factor, router.eval_capacity_factor) == (1.25, None)
        assert (router.capacity_rounding, router.capacity_multiple) == ("floor", 32 // experts)
        assert router.loss_weights == {"importance": 0.005, "load": 0.005}
        assert layer.drop1.p == 0.1
        expected += (experts - 1) * (8 * width**2 + 5 * width)  # fc1, fc2 and their biases
        expected += 256 * (width + 1 + experts) + 1 if name.endswith("cosine") else experts * width
    assert layers["layers.2.blocks.1.mlp"].fc1.weight.shape[2] == 4 * dim
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert model.layers[2].blocks[1].attn.window_size == (12, 12)
    assert model.layers[3].blocks[1].attn.window_size == (6, 6)
    assert model.pretrained_cfg["input_size"] == (3, 192, 192)


def test_all_parameters_of_a_new_or_pretrained_model_and_of_its_student_are_trained(tmp_path):
    dense = timm.create_model("swin_tiny_patch4_window7_224", **SMALL, num_classes=5)
    torch.nn.init.ones_(dense.layers[0].blocks[0].mlp.fc2.bias)
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    model = small(
        pretrained=True,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "dense.pth"), num_classes=5),
    )
    for network in (small(), model, timm_moe.to_dense(model, "sum")):
        assert all(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("score", ["softmax", "cosine"])
@pytest.mark.first_case
def test_initial_weights_of_linear_layers_have_the_published_deviation(score, again):
    model = small(score=score, embed_dim=64)
    if again:
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        model.init_weights()
    layer = model.layers[3].blocks[1].mlp
    gate = layer.router.projection if score == "cosine" else layer.router.weight
    drawn = [layer.fc1.weight, layer.fc2.weight, gate, model.layers[0].blocks[0].attn.qkv.weight]
    drawn += [model.layers[0].blocks[0].mlp.fc1.weight, model.layers[1].downsample.reduction.weight]
    for weight in drawn:
        assert weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert layer.fc1.weight[0].ne(layer.fc1.weight[1]).all()
    assert not any(bias.any() for bias in (layer.fc1.bias, layer.fc2.bias))
    if score == "cosine":
        assert layer.router.weight.std().item() == pytest.approx(0.01, rel=0.1)
        assert not layer.router.projection_bias.any()


def test_weight_decay_is_that_of_the_reference():
    """It spares biases, norms, position biases and all of a cosine router.

    It does not spare the linear gate.
    """
    for score in ("softmax", "cosine"):
        model = small(score=score)
        groups = timm.optim.create_optimizer_v2(
            model, "adamw", lr=0.1, weight_decay=0.1
        ).param_groups
        decayed = {
            id(parameter)
            for group in groups
            if group["weight_decay"]
            for parameter in group["params"]
        }
        spared = [
            name for name, parameter in model.named_parameters() if id(parameter) not in decayed
        ]
        routers = {name for name in spared if ".router." in name}
        assert len(routers) == (8 if score == "cosine" else 0)
        rest = [name for name in spared if name not in routers]
        assert all(
            name.endswith(("bias", "relative_position_bias_table")) or "norm" in name
            for name in rest
        )
        assert len({name for name in rest if name.endswith("relative_position_bias_table")}) == 6


def test_dense_weights_go_into_every_expert(tmp_path):
    dense = timm.create_model(DENSE, **SMALL, num_classes=5)
    torch.nn.init.normal_(dense.layers[3].blocks[1].mlp.fc2.bias)
    torch.save(dense.state_dict(), tmp_path / "dense.pth")
    layer = small(checkpoint_path=str(tmp_path / "dense.pth")).layers[3].blocks[1].mlp
    for name, weight in dense.layers[3].blocks[1].mlp.named_parameters():
        assert all(torch.equal(expert, weight) for expert in layer.get_parameter(name))


@pytest.mark.parametrize(
    "name",
    ["swin_moe_small_patch4_window12_192_8e", "swin_moe_small_patch4_window12_192_32e_cosine"],
)
@pytest.mark.first_case
def test_saved_with_its_experts_and_as_a_swin_of_timm(name, tmp_path):
    model = small(name).eval()
    images = torch.randn(2, 3, 64, 64)
    options = {**SMALL, "moe_layers": "last-2", "num_experts": 3}
    export_moe(model, tmp_path / "moe", model_args=options)
    again = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True).eval()
    torch.testing.assert_close(again(images), model(images))
    timm_moe.export_dense(tmp_path / "moe", tmp_path / "dense", method="average")
    dense = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True)
    assert type(dense) is timm.models.SwinTransformer
    assert dense.pretrained_cfg["architecture"] == DENSE


def test_features_of_all_stages():
    features = small(features_only=True).eval()(torch.randn(1, 3, 64, 64))
    assert [tuple(x.shape) for x in features] == [
        (1, 16, 16, 16),
        (1, 8, 8, 32),
        (1, 4, 4, 64),
        (1, 2, 2, 128),
    ]
