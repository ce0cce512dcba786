"""Image-level routing and shared experts (ViMoE) against the golden file."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import Mlp, SwiGLU
from timm.models import PretrainedCfg
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import timm_moe
from timm_moe.layers import ImageRouter, MoeMlp, SharedExpertMlp, TopKRouter


@pytest.fixture
def case(golden):
    return golden("vimoe_layer")


def layer(case, router_class=ImageRouter, layer_class=MoeMlp, **options):
    router = router_class(8, 4, loss_weights={"balance": 1.0}, **options)
    made = layer_class(Mlp(8, 12), router).double()
    names = {
        "fc1.weight": "W1",
        "fc1.bias": "b1",
        "fc2.weight": "W2",
        "fc2.bias": "b2",
        "router.weight": "gate_W",
    }
    if layer_class is SharedExpertMlp:
        names |= {
            f"shared.{name}": f"shared_{key}"
            for name, key in names.items()
            if name != "router.weight"
        }
    made.load_state_dict({name: case[key] for name, key in names.items()})
    return made


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(), "image_y_routed"),
        (dict(layer_class=SharedExpertMlp), "image_y_with_shared"),
        (dict(layer_class=SharedExpertMlp, gate_mode="one"), "image_y_ungated_with_shared"),
        (dict(layer_class=SharedExpertMlp, gate_mode="renorm"), "image_y_ungated_with_shared"),
        (dict(router_class=TopKRouter), "token_y_routed"),
        (dict(router_class=TopKRouter, layer_class=SharedExpertMlp), "token_y_with_shared"),
    ],
)
@pytest.mark.parametrize("road", ["eager", "compiled"])
@pytest.mark.first_case
def test_outputs_and_loss_of_the_golden_file(case, options, expected, road, monkeypatch):
    made = layer(case, **options)
    if road == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(made(case["x"]), case[expected], rtol=0, atol=1e-9)
    loss = case["image_aux_alpha1" if options.get("router_class") is None else "token_aux_alpha1"]
    torch.testing.assert_close(made.router.records[0].weighted_loss, loss, rtol=1e-9, atol=0)


@pytest.mark.parametrize("road", ["eager", "compiled"])
def test_an_image_is_dropped_as_a_whole(case, road, monkeypatch):
    if road == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    made = layer(case, capacity_factor=0.5, capacity_multiple=1)
    y = made(case["x"])
    zero = (y == 0).all(2)
    assert torch.equal(zero.any(1), zero.all(1))
    assert 2 <= zero.all(1).sum() == made.router.records[0].dropped
    torch.testing.assert_close(y[~zero], case["image_y_routed"][~zero], rtol=0, atol=1e-9)


def test_a_dense_checkpoint_becomes_routed_and_shared_experts():
    dense = Mlp(8, 12)
    made = SharedExpertMlp(Mlp(8, 12), ImageRouter(8, 1))
    made.load_state_dict(dense.state_dict())
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(made(x), 2 * dense(x))  # a single expert has gate 1


def test_torch_loads_a_dense_checkpoint_into_the_shared_expert_too():
    """torch adds the shared expert's present weights to the dense ones before it loads them."""
    dense = Mlp(8, 12)
    made = SharedExpertMlp(Mlp(8, 12), ImageRouter(8, 1))
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(made, dense.state_dict(), options=whole)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(made(x), 2 * dense(x))


@pytest.mark.parametrize("ffn", [Mlp, SwiGLU])
def test_a_shared_expert_that_starts_at_zero_adds_nothing(ffn):
    made = SharedExpertMlp(ffn(8, 12), ImageRouter(8, 1), shared_init="zero_out")
    x = torch.randn(3, 5, 8)
    assert not made.shared(x).any()
    dense = ffn(8, 12)
    made.load_state_dict(dense.state_dict())
    torch.testing.assert_close(made(x), dense(x))
    trained = {name: torch.randn_like(value) for name, value in made.state_dict().items()}
    made.load_state_dict(trained)
    torch.testing.assert_close(made.state_dict(), trained)


def test_a_checkpoint_with_a_shared_expert_does_not_load_without_one():
    checkpoint = timm.create_model("vimoe_s14_shared", **DINO).state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*blocks\.2\.mlp\.shared\.fc1\.weight"):
        timm.create_model("vimoe_s14", **DINO).load_state_dict(checkpoint)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", dict(class_token=False, global_pool="avg")),
        ("swin_tiny_patch4_window7_224", {}),
        *(
            (name, dict(depth=2))
            for name in ("cait_xxs24_224", "xcit_nano_12_p16_224", "convit_tiny")
        ),
    ],
)
def test_image_routing_needs_the_class_token_as_first(name, options):
    with torch.device("meta"):
        model = timm.create_model(name, **options)
    with pytest.raises(ValueError, match=f"routing_unit='image' .*this {type(model).__name__} "):
        timm_moe.convert_to_moe(model, router="top_k", routing_unit="image")


def test_the_dense_control_is_the_sum_of_two_networks():
    """ViMoE, table 6: two networks, both always on."""
    control = timm.create_model("vimoe_s14", num_experts=2, top_k=2, gate_mode="one", **DINO).eval()
    layer = timm_moe.moe_layers(control)["blocks.3.mlp"]
    x = torch.randn(2, 5, 32)
    experts = [
        layer.to_ffn({n: w[e].detach() for n, w in layer.named_expert_parameters()})
        for e in range(2)
    ]
    torch.testing.assert_close(layer(x), experts[0](x) + experts[1](x))


def test_all_tokens_of_an_image_have_the_probabilities_of_its_class_token():
    router = ImageRouter(8, 4)
    torch.nn.init.normal_(router.weight)
    x = torch.randn(3, 2, 8)
    of_images = (x[:, 0] @ router.weight.T).softmax(1)
    of_tokens = router.probabilities(x).unflatten(0, (3, 2))
    for token in range(2):
        torch.testing.assert_close(of_tokens[:, token], of_images)


def test_image_routing_needs_images():
    with pytest.raises(ValueError, match=r"\(B, N, D\), .*\(4, 8\)"):
        ImageRouter(8, 2)(torch.randn(4, 8))


DINO = dict(img_size=28, embed_dim=32, depth=4, num_heads=2, num_classes=5, init_values=0.1)


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [
        ("vimoe_s14", dict(num_experts=1), 1),
        ("vimoe_s14", dict(gate_mode="one"), 1),
        ("vimoe_s14", dict(routing_unit="token", gate_mode="renorm"), 1),
        ("vimoe_s14_shared", dict(gate_mode="one"), 2),
        ("vimoe_s14_shared", dict(gate_mode="one", shared_init="zero_out"), 1),
    ],
)
def test_upcycled_models_compute_what_their_gates_say(tmp_path, name, options, factor):
    """Without a gate the upcycled model is the dense one.

    A shared expert adds the dense network once more.
    """
    dense = timm.create_model("vit_small_patch14_dinov2", **DINO).eval()
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    overlay = dict(file=str(tmp_path / "dense.safetensors"), num_classes=5)
    model = timm.create_model(
        name, pretrained=True, pretrained_cfg_overlay=overlay, **DINO, **options
    ).eval()
    assert list(timm_moe.moe_layers(model)) == ["blocks.2.mlp", "blocks.3.mlp"]
    with torch.no_grad():
        for block in dense.blocks[2:]:
            block.mlp.fc2.weight *= factor
            block.mlp.fc2.bias *= factor
    images = torch.randn(3, 3, 28, 28)
    torch.testing.assert_close(model(images), dense(images), rtol=1e-4, atol=1e-5)


def test_an_image_is_routed_by_itself_in_training_too():
    model = timm.create_model("vimoe_s14", **DINO)
    for layer in timm_moe.moe_layers(model).values():
        torch.nn.init.normal_(layer.router.weight)
    images = torch.randn(6, 3, 28, 28)
    torch.testing.assert_close(model(images)[2:3], model(images[2:3]), rtol=1e-4, atol=1e-5)
    assert timm_moe.auxiliary_loss(model) > 0


BACKBONE = dict(features_only=True, routing_unit="token", **DINO)


@pytest.mark.parametrize("name", ["vimoe_s14", "vimoe_s14_shared"])
@pytest.mark.parametrize(
    ("out_indices", "blocks"), [(2, [2, 3]), ([-1], [3]), ([0, 2], [0, 2]), ([1], [1])]
)
def test_feature_maps_for_dense_prediction(name, out_indices, blocks):
    """They are the patch tokens that the blocks give, the last n for an n."""
    model = timm.create_model(name, routing_unit="token", **DINO)
    backbone = timm.create_model(name, out_indices=out_indices, **BACKBONE)
    # No head, nor blocks behind the last map.
    backbone.model.load_state_dict(model.state_dict(), strict=False)
    maps = []
    for block in blocks:
        model.blocks[block].register_forward_hook(
            lambda _, args, tokens: maps.append(tokens[:, 1:].transpose(1, 2).unflatten(2, (2, 2)))
        )
    images = torch.randn(2, 3, 28, 28)
    model(images)
    expected = list(maps)
    torch.testing.assert_close(backbone(images), expected)
    torch.testing.assert_close(
        model.forward_intermediates(images, indices=out_indices)[1], expected
    )
    assert backbone.feature_info.module_name() == [f"blocks.{block}" for block in blocks]
    assert backbone.feature_info.channels() == [32] * len(blocks)


def test_the_classes_of_a_config_object_count():
    cfg = PretrainedCfg(url="", num_classes=7, input_size=(3, 28, 28))
    model = timm.create_model("vimoe_s14", pretrained_cfg=cfg, depth=2, embed_dim=32, num_heads=2)
    assert model.num_classes == 7


def test_a_pretrained_backbone(tmp_path):
    """DINOv2's weights come without a classifier."""
    dense = timm.create_model("vit_small_patch14_dinov2", features_only=True, **DINO)
    norm = {"norm.weight": torch.ones(32), "norm.bias": torch.zeros(32)}  # the backbone dropped it
    save_file(dense.model.state_dict() | norm, tmp_path / "dense.safetensors")
    overlay = dict(file=str(tmp_path / "dense.safetensors"), num_classes=0)
    backbone = timm.create_model(
        "vimoe_s14", True, pretrained_cfg_overlay=overlay, gate_mode="one", **BACKBONE
    )
    images = torch.randn(2, 3, 28, 28)
    torch.testing.assert_close(backbone(images), dense(images), rtol=1e-4, atol=1e-5)


def test_training_of_a_backbone():
    """timm's wrapper does not call the model itself.

    What gradient checkpointing repeats in backward does not count.
    """
    images, weights = torch.randn(2, 3, 28, 28), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        backbone = timm.create_model("vimoe_s14_shared", **BACKBONE)
        backbone.model.set_grad_checkpointing(checkpointing)
        optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1)
        for _ in range(3):
            loss = backbone(images)[-1].square().mean() + timm_moe.auxiliary_loss(backbone)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights.append(backbone.state_dict())
        backbone(images)[-1].mean().backward()
        with pytest.raises(RuntimeError, match="were not added"):
            optimizer.step()
    torch.testing.assert_close(*weights)


def test_a_backbones_forward_replaces_the_losses_of_the_one_before():
    backbone = timm.create_model("vimoe_s14", **BACKBONE)
    first, second = torch.randn(2, 3, 28, 28), torch.randn(2, 3, 28, 28)
    backbone(second)
    expected = timm_moe.auxiliary_loss(backbone)
    backbone(first)
    backbone(second)
    torch.testing.assert_close(timm_moe.auxiliary_loss(backbone), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing_unit": "batch"}, "routing_unit .*token, image, .*'batch'"),
        ({"gate_mode": "sum"}, "gate_mode .*prob, one, renorm, .*'sum'"),
        ({"shared_expert": "yes"}, "shared_expert .*True or False, .*'yes'"),
        ({"shared_init": "zero_out"}, "shared_init='zero_out' .*shared_expert=True"),
        (
            {"shared_expert": True, "shared_init": "zero"},
            "shared_init .*pretrained, zero_out, .*'zero'",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("vimoe_s14", **DINO, **options)
