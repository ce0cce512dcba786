"""Models with fine-grained experts, from dense and back.

There are also experts whose hidden units are partly drawn again.
"""

import copy

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT
from families import SMALL
from safetensors.torch import save_file

import timm_moe
from timm_moe.analysis.info import model_info
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.convert.expert_layers import parameters
from timm_moe.convert.gather import METHODS
from timm_moe.export.export import export_moe
from timm_moe.layers import SharedExpertMlp

#: All four parts of a copy for every token, without gates: the upcycled model is the dense one.
EXACT = dict(
    router="top_k",
    top_k=4,
    num_experts=8,
    expert_width=0.25,
    gate_mode="one",
    capacity_factor="none",
)


def dense_and_images():
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
    for block in dense.blocks:
        torch.nn.init.normal_(block.mlp.fc1.bias)
        torch.nn.init.normal_(block.mlp.fc2.bias)
    return dense, torch.randn(2, 3, 32, 32)


def with_tied_routers(model):
    """Let every token choose the first experts, the parts of one copy."""
    for layer in timm_moe.moe_layers(model).values():
        torch.nn.init.zeros_(layer.router.weight)
    return model.eval()


def upcycled_later(road, dense, tmp_path, **options):
    """An expert model that gets dense weights after it was made."""
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    created = dict(SMALL_VIT, **options)
    if road == "pretrained":
        overlay = dict(file=str(tmp_path / "dense.safetensors"), num_classes=5)
        return timm.create_model(
            "vit_tiny_moe", pretrained=True, pretrained_cfg_overlay=overlay, **created
        )
    if road == "file":
        return load_source(
            tmp_path / "dense.safetensors", ModelSpec("vit_tiny_moe", 5, {**OPTIONS, **options})
        )
    if road == "checkpoint_path":
        return timm.create_model(
            "vit_tiny_moe", checkpoint_path=str(tmp_path / "dense.safetensors"), **created
        )
    model = timm.create_model("vit_tiny_moe", **created)
    model.load_state_dict(dense.state_dict(), strict=False)
    return model


ROADS = ("pretrained", "file", "checkpoint_path", "load_state_dict")


@pytest.mark.parametrize("expert_init", ["same", "independent"])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.first_case
def test_dense_weights_are_cut_on_every_road(road, expert_init, tmp_path):
    dense, images = dense_and_images()
    model = upcycled_later(road, dense, tmp_path, expert_init=expert_init, **EXACT)
    torch.testing.assert_close(with_tied_routers(model)(images), dense(images))


@pytest.mark.parametrize("expert_width", [1, 0.25])
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.first_case
def test_drop_happens_on_every_road(road, expert_width, tmp_path):
    dense, _ = dense_and_images()
    options = dict(num_experts=4, expert_width=expert_width)
    model = upcycled_later(road, dense, tmp_path, expert_init="drop", **options)
    same = upcycled_later(road, dense, tmp_path, **options)
    for path, layer in timm_moe.moe_layers(model).items():
        kept = (layer.fc1.weight == same.get_submodule(path).fc1.weight).all(2).float()
        assert kept.mean(1).tolist() == [0.5] * 4


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "random"])
@pytest.mark.first_case
def test_an_upcycled_model_exports_the_dense_networks_that_it_was_cut_from(
    method, shared, tmp_path
):
    dense, images = dense_and_images()
    model = timm_moe.convert_to_moe(copy.deepcopy(dense), **{**EXACT, "shared_expert": shared})
    joined = timm_moe.to_dense(model, method).eval()
    # With experts of the whole width, two copies for eight parts and one for the shared expert.
    whole = timm_moe.convert_to_moe(copy.deepcopy(dense), 2 + shared, router="top_k")
    expected = timm_moe.to_dense(whole, method).eval()
    torch.testing.assert_close(joined.state_dict(), expected.state_dict())
    if method == "average":
        torch.testing.assert_close(joined(images), dense(images))
        export = timm_moe.export_dense(model, tmp_path / "dense")
        assert export.parameters == parameters(dense)


def test_an_expert_model_comes_back(tmp_path):
    options = dict(
        num_experts=6, expert_width=0.25, expert_init="drop", shared_expert=True, top_k=4
    )
    model = timm.create_model("vit_tiny_moe", **SMALL_VIT, **options).eval()
    export_moe(model, tmp_path / "moe", model_args={**OPTIONS, **options})
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(loaded(images), model(images))
    with pytest.raises(ValueError, match=r"6 experts of 1/4 .*num_experts .*4\."):
        timm_moe.export_dense(model, tmp_path / "dense")
    assert not (tmp_path / "dense").exists()


def test_parameters_and_operations_are_those_of_whole_experts():
    options = dict(gate_mode="prob", capacity_factor="none")
    whole = model_info("vit_tiny_moe", num_experts=4, top_k=1, **options)
    parts = model_info("vit_tiny_moe", num_experts=16, top_k=4, expert_width=0.25, **options)
    more_routers, more_biases = 6 * 12 * 192, 6 * 12 * 192  # in six layers
    assert parts.total - whole.total == more_routers + more_biases
    assert parts.activated - whole.activated == more_routers + 6 * 3 * 192
    assert parts.gflops - whole.gflops == pytest.approx(2 * 197 * more_routers / 1e9)
    shared = model_info(
        "vit_tiny_moe", num_experts=16, top_k=4, expert_width=0.25, shared_expert=True, **options
    )
    assert shared.activated - parts.activated == 6 * (2 * 192 * 192 + 2 * 192)


# Of 85 hidden units.
@pytest.mark.parametrize("name", [name for name in SMALL if name != "eva02_tiny_patch14_224"])
@pytest.mark.ci
def test_every_family_is_cut(name):
    dense = timm.create_model(name, num_classes=5, **SMALL[name]).eval()
    size = SMALL[name].get("img_size") or dense.default_cfg["input_size"][-1]
    images = torch.randn(2, 3, size, size)
    options = {**EXACT, "expert_width": 0.5, "top_k": 2, "num_experts": 4}
    with torch.no_grad():
        expected = dense(images)
        model = with_tied_routers(timm_moe.convert_to_moe(dense, **options))
        assert all(layer.parts == 2 for layer in timm_moe.moe_layers(model).values())
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "router",
    ["expert_choice", lambda dim, num_experts: timm_moe.layers.TopKRouter(dim, num_experts)],
)
def test_other_routers_have_the_option(router):
    dense, images = dense_and_images()
    model = timm_moe.convert_to_moe(dense, 8, router=router, expert_width=0.25, shared_expert=True)
    layer = model.blocks[1].mlp
    assert type(layer) is SharedExpertMlp
    assert (layer.fc1.weight.shape, layer.shared.fc1.weight.shape) == ((8, 32, 32), (32, 32))
    model(images).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(expert_width=0.3), r"expert_width .*whole number.* 0\.3\."),
        (dict(expert_width=1 / 3), r"expert_width=0\.33.* 128 into 3\b"),
        (dict(expert_width=0.5, share_rate=0.1), "expert_width .*share_rate=0"),
        (dict(expert_width=0.5, share_schedule="early"), "expert_width .*share_rate=0"),
        (dict(expert_width=0.5, router="random"), "expert_width .*router='top_k'.*'random'"),
        (dict(expert_width=0.5, router="soft"), "expert_width .*router='top_k'.*'soft'"),
    ],
)
def test_bad_options_leave_the_model_as_it_was(options, message):
    dense, _ = dense_and_images()
    with pytest.raises(ValueError, match=message):
        timm_moe.convert_to_moe(dense, **{"router": "top_k", **options})
    assert not timm_moe.moe_layers(dense)


def test_a_norm_of_the_hidden_units_is_refused():
    model = timm.create_model(
        "eva02_base_patch14_224", img_size=28, embed_dim=48, depth=2, num_heads=2
    )
    assert model.blocks[0].mlp.norm.weight.ndim == 1
    for options in (dict(expert_width=0.5), dict(expert_init="drop")):
        with pytest.raises(ValueError, match=r"expert_width .*expert_init='drop'.*SwiGLU"):
            timm_moe.convert_to_moe(model, router="top_k", **options)
    assert not timm_moe.moe_layers(model)


def test_different_units_are_not_averaged_by_hand():
    model = timm.create_model("vit_tiny_moe", expert_width=0.5, **SMALL_VIT)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"expert_width .*beta=0"):
        timm_moe.average_experts_(model, 0.1)
    timm_moe.average_experts_(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"expert_width .*share_rate=0"):
        timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=2, share_rate=0.3)
    with pytest.raises(ValueError, match=r"expert_width .*share_rate=0"):
        timm_moe.ExpertWeightAveraging(
            model, optimizer, total_updates=2, schedule=lambda progress, share_rate: 0.1
        )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
