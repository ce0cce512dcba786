"""Registered names and every road by which weights reach them."""

import json
from contextlib import nullcontext

import pytest
import timm
import torch
from common import FAMILIES as KINDS
from common import OPTIONS, SMALL_VIT, family, make_model
from devices import equal_slots
from processes import run_code
from safetensors.torch import save_file
from timm.layers import set_fused_attn
from timm.models import create_feature_extractor, get_arch_pretrained_cfgs, save_for_hf
from timm.models.vision_transformer import VisionTransformer
from torchvision.models import feature_extraction

import timm_moe
from timm_moe.models.registered import (
    is_named_after_stock,
    registered_models,
    weightless,
    weightless_model,
)

SIZES = ("tiny", "small", "base", "large")


@pytest.mark.parametrize("size", SIZES)
def test_names_take_over_every_pretrained_tag_of_their_stock_model(size):
    stock = get_arch_pretrained_cfgs(f"vit_{size}_patch16_224")
    ours = get_arch_pretrained_cfgs(f"vit_{size}_ewa_moe")
    assert [cfg.tag for cfg in ours.values()] == [cfg.tag for cfg in stock.values()]
    assert [cfg.hf_hub_id for cfg in ours.values()] == [cfg.hf_hub_id for cfg in stock.values()]
    assert all(cfg.architecture == f"vit_{size}_ewa_moe" for cfg in ours.values())
    assert set(timm.list_models(f"vit_{size}_ewa_moe", module="vision_transformer"))


def test_parameter_ratio_of_the_papers_table_1():
    # numbers.json: V-MoE-S with 8 experts in every other block is 3.25 times ViT-S, 3.2505 without
    # routers
    with weightless():
        moe = timm.create_model("vit_small_ewa_moe", num_experts=8)
        dense = timm.create_model("vit_small_patch16_224")
    ratio = sum(p.numel() for p in moe.parameters()) / sum(p.numel() for p in dense.parameters())
    assert round(ratio, 4) == 3.2505


def test_xtiny_is_the_papers_small_data_model():
    with weightless():
        model = timm.create_model("vit_xtiny_ewa_moe")
    # arXiv 2112.13492.
    assert round(sum(p.numel() for p in timm_moe.to_dense(model).parameters()) / 1e6, 2) == 2.71
    assert list(timm_moe.moe_layers(model)) == [f"blocks.{block}.mlp" for block in (1, 3, 5, 7)]
    assert model.pretrained_cfg["input_size"] == (3, 32, 32)


def test_from_scratch_experts_differ_and_the_option_makes_them_equal():
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    assert not torch.equal(model.blocks[1].mlp.fc1.weight[0], model.blocks[1].mlp.fc1.weight[1])
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, expert_init="same")
    assert torch.equal(model.blocks[1].mlp.fc1.weight[0], model.blocks[1].mlp.fc1.weight[1])


def test_is_a_stock_class_to_timm(ewa_vit, images):
    assert isinstance(ewa_vit, VisionTransformer)
    assert len(ewa_vit.forward_intermediates(images)[1]) == 4
    features = timm.create_model("vit_tiny_ewa_moe", features_only=True, **SMALL_VIT)(images)
    assert [tuple(feature.shape) for feature in features] == [(6, 32, 4, 4)] * 3


@pytest.mark.parametrize(
    ("name", "options", "out_indices", "told"),
    [
        ("vit_tiny_moe", SMALL_VIT, (0, 3), None),
        ("vit_xtiny", {}, (0, 3), None),
        ("widenet_b", {**SMALL_VIT, "num_experts": 0}, (0, 3), None),
        ("vit_tiny_moe", SMALL_VIT, (0, 2), "1 of 2 expert layers"),
        ("vit_tiny_ewa_moe", SMALL_VIT, [0], "2 of 2 expert layers"),
        (
            "swin_tiny_patch4_window7_224_ewa_moe",
            dict(img_size=64, embed_dim=12, depths=(1, 1, 1, 1), moe_layers="tail-1"),
            (0, 1),
            "All expert layers",
        ),
    ],
)
def test_experts_that_a_feature_extractor_leaves_out_are_told_of(
    name, options, out_indices, told, caplog
):
    timm.create_model(name, features_only=True, out_indices=out_indices, **options)
    found = [line for line in caplog.messages if "feature extractor leaves out" in line]
    assert [line.partition(" are")[0] for line in found] == ([told] if told else [])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", {}),
        ("vit_tiny_moe", dict(top_k=2, capacity_factor=1.0, eval_capacity_factor=0.6)),
        ("vit_tiny_moe", dict(shared_expert=True)),
        ("widenet_b", dict(routing_groups=2)),
        ("t2t_i2_32_ewa_moe", {}),
        ("vmoe_pbe_s32", {}),
    ],
)
@pytest.mark.first_case
def test_feature_extraction_by_torchvision_and_by_timm(name, options, training, images):
    set_fused_attn(False)  # some pairs of timm and torch cannot trace the fused one
    try:
        model = make_model(name, **options).train(training)
    finally:
        set_fused_attn(True)
    heads = []
    model.head.register_forward_hook(lambda *call: heads.append(call[2]))
    torch.manual_seed(0)
    model(images)
    for create in (feature_extraction.create_feature_extractor, create_feature_extractor):
        extractor = create(model, ["blocks.1", "head"])
        torch.manual_seed(0)
        features = extractor.train(training)(images)
        torch.testing.assert_close(features["head"], heads[0])
        assert len(timm_moe.moe_layers(extractor)) == len(timm_moe.moe_layers(model))


# --- every road upcycles a dense checkpoint: the model gives the dense model's outputs, every
# expert is a copy


@pytest.fixture
def dense_file(dense_vit, tmp_path):
    save_file(dense_vit.state_dict(), tmp_path / "dense.safetensors")
    return str(tmp_path / "dense.safetensors")


def pretrained_overlay(file, **kwargs):
    return timm.create_model(
        "vit_tiny_ewa_moe",
        pretrained=True,
        pretrained_cfg_overlay=dict(file=file, **kwargs),
        **SMALL_VIT,
    )


def assert_upcycled(model, dense, images):
    assert len(timm_moe.moe_layers(model)) == 2
    weight = model.blocks[1].mlp.fc1.weight
    assert all(torch.equal(weight[expert], dense.blocks[1].mlp.fc1.weight) for expert in range(4))
    assert torch.equal(model.eval()(images), dense(images))
    torch.testing.assert_close(model.train()(images), dense(images))


def test_road_pretrained_cfg_overlay(dense_vit, dense_file, images):
    assert_upcycled(pretrained_overlay(dense_file, num_classes=5), dense_vit, images)


def test_road_pretrained_path_of_train_py_resets_the_head(dense_vit, dense_file, images):
    # What train.py --pretrained --pretrained-path does.
    model = pretrained_overlay(dense_file, num_classes=-1)
    assert not torch.equal(model.head.weight, dense_vit.head.weight)
    model.head.load_state_dict(dense_vit.head.state_dict())
    assert_upcycled(model, dense_vit, images)


def test_road_initial_checkpoint(dense_vit, dense_file, images):
    model = timm.create_model("vit_tiny_ewa_moe", checkpoint_path=dense_file, **SMALL_VIT)
    assert_upcycled(model, dense_vit, images)


def test_road_train_py_checkpoint_of_a_dense_run(dense_vit, tmp_path, images):
    torch.save({"state_dict": dense_vit.state_dict(), "epoch": 3}, tmp_path / "last.pth.tar")
    model = timm.create_model(
        "vit_tiny_ewa_moe", checkpoint_path=str(tmp_path / "last.pth.tar"), **SMALL_VIT
    )
    assert_upcycled(model, dense_vit, images)


def test_road_state_dict_in_the_config(dense_vit, images):
    model = timm.create_model(
        "vit_tiny_ewa_moe",
        pretrained=True,
        pretrained_cfg_overlay=dict(state_dict=dense_vit.state_dict(), num_classes=5),
        **SMALL_VIT,
    )
    assert_upcycled(model, dense_vit, images)


def test_road_hub(dense_vit, tmp_path, images):
    """``pretrained=True`` from the Hub's cache, in a process without network."""
    repo = tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True, exist_ok=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    save_file(dense_vit.state_dict(), snapshot / "model.safetensors")
    torch.save(images, tmp_path / "images.pt")
    code = f"""
import timm, torch
model = timm.create_model(
    "vit_tiny_ewa_moe.augreg_in21k",
    pretrained=True,
    cache_dir={str(tmp_path)!r},
    pretrained_cfg_overlay=dict(num_classes=5),
    **{SMALL_VIT!r},
)
images = torch.load({str(tmp_path / "images.pt")!r})
torch.save(model.eval()(images).detach(), {str(tmp_path / "out.pt")!r})
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "out.pt"), dense_vit(images))


def test_road_local_dir_and_an_moe_checkpoint_loads_as_it_is(ewa_vit, tmp_path, images):
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    assert (
        json.loads((tmp_path / "moe/config.json").read_text())["architecture"] == "vit_tiny_ewa_moe"
    )
    model = timm.create_model(f"local-dir:{tmp_path}/moe", pretrained=True)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), ewa_vit.parameters(), strict=True)
    )
    assert torch.equal(model.eval()(images), ewa_vit.eval()(images))


def test_resized_images_channels_and_classes_compose_with_upcycling(dense_file, dense_vit):
    kwargs = {**SMALL_VIT, "img_size": 48, "in_chans": 1, "num_classes": 7}
    roads = {}
    for name in ("vit_tiny_patch16_224", "vit_tiny_ewa_moe"):
        torch.manual_seed(0)
        roads[name] = timm.create_model(
            name,
            pretrained=True,
            pretrained_cfg_overlay=dict(
                file=dense_file, num_classes=5, input_size=(3, 32, 32), custom_load=False
            ),
            **kwargs,
        ).eval()
    dense, model = roads.values()
    model.head.load_state_dict(dense.head.state_dict())
    x = torch.randn(2, 1, 48, 48)
    assert torch.equal(model(x), dense(x))


# --- routed experts

ROUTED = {
    "vit_tiny_moe": "vit_tiny_patch16_224",
    "vit_small_moe": "vit_small_patch16_224",
    "vit_base_moe": "vit_base_patch16_224",
    "vmoe_b32": "vit_base_patch32_224",
    "vmoe_b16": "vit_base_patch16_224",
    "vmoe_l32": "vit_large_patch32_224",
    "vmoe_l16": "vit_large_patch16_224",
    "vmoe_h14": "vit_huge_patch14_224",
}


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        pytest.param(*pair, marks=[] if pair[0] in ("vit_tiny_moe", "vmoe_b32") else pytest.mark.ci)
        for pair in ROUTED.items()
    ],
)
def test_routed_models_have_the_weights_and_the_size_of_their_stock_model(name, stock):
    weights = [(cfg.tag, cfg.hf_hub_id) for cfg in get_arch_pretrained_cfgs(stock).values()]
    assert [(cfg.tag, cfg.hf_hub_id) for cfg in get_arch_pretrained_cfgs(name).values()] == weights
    with weightless():
        dense, model = timm.create_model(stock), timm.create_model(name)
    shapes = {key: value.shape for key, value in dense.state_dict().items()}
    assert {
        key: value.shape for key, value in timm_moe.to_dense(model).state_dict().items()
    } == shapes


@pytest.mark.parametrize(
    ("name", "layers", "experts", "options"),
    [
        (
            "vit_small_moe",
            range(1, 12, 2),
            4,
            dict(top_k=1, noise_std=0, loss_weights={"balance": 0.01}),
        ),
        ("vmoe_s32", (5, 7), 32, {}),
        ("vmoe_b16", (9, 11), 32, {}),
        ("vmoe_l32", (21, 23), 32, {}),
        ("vmoe_h14", (23, 25, 27, 29, 31), 32, {}),
    ],
)
@pytest.mark.first_case
def test_routed_models_are_the_papers(name, layers, experts, options):
    with weightless():
        model = timm.create_model(name)
    assert list(timm_moe.moe_layers(model)) == [f"blocks.{block}.mlp" for block in layers]
    for path, layer in timm_moe.moe_layers(model).items():
        assert (layer.path, layer.num_experts, layer.share_rate) == (path, experts, 0)
        defaults = dict(top_k=2, noise_std=1.0, loss_weights={"importance": 0.005, "load": 0.005})
        router = {
            "capacity_factor": 1.05,
            "eval_capacity_factor": None,
            "batch_priority": False,
            **defaults,
            **options,
        }
        assert {option: getattr(layer.router, option) for option in router} == router


OWN_NAMES = [
    name
    for name in registered_models("*")
    if not is_named_after_stock(name) and ("moe" in name or name.startswith("widenet"))
]


@pytest.mark.parametrize("name", OWN_NAMES)
@pytest.mark.first_case
def test_the_dense_form_of_every_model_is_one_of_a_registered_name(name):
    """Its export could not be loaded otherwise."""
    model = weightless_model(name, num_classes=10)
    dense = weightless_model(
        model.stock_form.architecture, **{**model.stock_form.args, "num_classes": 10}
    )
    if name.startswith("vimoe"):  # at 224 pixels, and DINOv2's form is at 518
        dense.set_input_size(224)
    shapes = {key: value.shape for key, value in dense.state_dict().items()}
    with weightless():
        gathered = timm_moe.to_dense(model)
    assert {key: value.shape for key, value in gathered.state_dict().items()} == shapes


def test_experts_of_v_moe_start_equal_and_those_of_the_naive_moe_apart():
    naive = timm.create_model("vit_tiny_moe", **SMALL_VIT).blocks[1].mlp
    vmoe = timm.create_model("vmoe_b32", moe_layers="1,3", **SMALL_VIT).blocks[1].mlp
    assert not torch.equal(naive.fc1.weight[0], naive.fc1.weight[1])
    assert torch.equal(vmoe.fc1.weight[0], vmoe.fc1.weight[31])
    assert 0.015 < vmoe.router.weight.std() < 0.025


@pytest.mark.parametrize("road", ["overlay", "checkpoint"])
def test_routed_experts_are_upcycled_from_a_dense_checkpoint(dense_vit, dense_file, images, road):
    # With all experts chosen, the dense model's outputs.
    options = dict(top_k=4, capacity_factor=None)
    if road == "overlay":
        overlay = dict(file=dense_file, num_classes=5)
        model = timm.create_model(
            "vit_tiny_moe", pretrained=True, pretrained_cfg_overlay=overlay, **options, **SMALL_VIT
        )
    else:
        model = timm.create_model(
            "vit_tiny_moe", checkpoint_path=dense_file, **options, **SMALL_VIT
        )
    weight = model.blocks[1].mlp.fc1.weight
    assert all(
        torch.equal(weight[expert], dense_vit.blocks[1].mlp.fc1.weight) for expert in range(4)
    )
    assert model.blocks[1].mlp.router.weight.std() > 0.01
    torch.testing.assert_close(model.eval()(images), dense_vit(images), rtol=1e-4, atol=1e-5)


def test_a_routed_model_is_a_stock_class_to_timm(images):
    model = timm.create_model("vit_tiny_moe", **SMALL_VIT).eval()
    assert isinstance(model, VisionTransformer)
    features = timm.create_model("vit_tiny_moe", features_only=True, **SMALL_VIT)(images)
    assert [tuple(feature.shape) for feature in features] == [(6, 32, 4, 4)] * 3
    model.reset_classifier(3)
    assert model(images).shape == (6, 3)


@pytest.mark.ci  # tests/layers/test_grouped.py exports every way to route, not strictly
@pytest.mark.parametrize(
    ("name", "options", "strict"),
    [
        ("widenet_b", {"routing_groups": 2}, False),
        ("vit_tiny_ewa_moe", {}, True),
        ("vmoe_pbe_s32", {"num_experts": 4}, True),
    ],
)
def test_exports_with_a_dynamic_batch(name, options, strict, images):
    model = timm.create_model(name, **options, **SMALL_VIT).eval()
    shapes = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    exported = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=strict).module()
    for batch in (images, images[:3]):
        torch.testing.assert_close(exported(batch), model(batch))


@pytest.mark.parametrize(
    "name", ["vit_tiny_ewa_moe", "vmoe_b16", "vimoe_s14_shared", "vmoe_pbe_b16", "widenet_b"]
)
@pytest.mark.first_case
def test_device_and_dtype_are_those_asked_for(name, images):
    options = {**SMALL_VIT, "num_experts": 4}
    model = timm.create_model(name, **options, pre_logits=True, device="meta", dtype=torch.bfloat16)
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {
        ("meta", torch.bfloat16)
    }
    model = timm.create_model(name, **options, dtype=torch.bfloat16).eval()
    is_mean_of_members = name == "vmoe_pbe_b16"  # whose rounding would change predictions
    assert model(images.bfloat16()).dtype == (
        torch.float32 if is_mean_of_members else torch.bfloat16
    )


def test_pre_logits():
    model = timm.create_model("vit_tiny_moe", pre_logits=True, **SMALL_VIT).eval()
    x = torch.randn(2, 3, 32, 32)
    features = model.forward_head(model.forward_features(x), pre_logits=True)
    expected = torch.tanh(model.representation.fc(model.forward_features(x)[:, 0]))
    torch.testing.assert_close(features, expected)
    torch.testing.assert_close(model(x), model.head(expected))
    with pytest.raises(ValueError, match="pre_logits=True"):
        timm_moe.to_dense(model)


def test_the_classifier_comes_last_for_timms_adaptive_clipping():
    model = timm.create_model("vit_tiny_ewa_moe", pre_logits=True, **SMALL_VIT)
    names = [name for name, _ in model.named_parameters()]
    assert names[-2:] == ["head.weight", "head.bias"]


def test_the_layer_before_the_classifier_begins_as_timms_linear_layers():
    model = timm.create_model("vit_tiny_ewa_moe", pre_logits=True, **{**SMALL_VIT, "embed_dim": 96})
    linear = model.representation.fc
    assert linear.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not linear.bias.any()


def test_pre_logits_is_a_flag():
    with pytest.raises(ValueError, match=r"pre_logits .*True or False, .*'no'"):
        timm.create_model("vit_tiny_ewa_moe", pre_logits="no", **SMALL_VIT)


def test_a_dense_model_has_no_note_of_pre_logits_that_are_absent(tmp_path):
    model = timm.create_model("vit_tiny_ewa_moe", pre_logits=False, **SMALL_VIT)
    folder = timm_moe.export_dense(model, tmp_path / "vit").path
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert type(loaded) is timm.models.VisionTransformer


def test_checkpoints_of_another_kind_of_model_are_named():
    routed, ewa = (
        timm.create_model(name, **SMALL_VIT) for name in ("vit_tiny_moe", "vit_tiny_ewa_moe")
    )
    with pytest.raises(RuntimeError, match=r"experts in blocks\.1\.mlp .* by the name and the opt"):
        ewa.load_state_dict(routed.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.1\.mlp\.router\.weight"):
        routed.load_state_dict(ewa.state_dict())
    deeper = timm.create_model("vit_tiny_moe", pre_logits=True, **SMALL_VIT)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*representation\.fc\.weight"):
        routed.load_state_dict(deeper.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*representation\.fc\.weight"):
        deeper.load_state_dict(routed.state_dict())


FAMILIES = (
    "vit_small_ewa_moe",
    "vit_base_moe",
    "vit_xtiny",
    "pit_xs_32_ewa_moe",
    "vmoe_s32",
    "vimoe_s14",
    "widenet_b",
)
OTHERS = (
    *(
        "vit_xtiny_ewa_moe",
        "vit_xtiny_moe",
        "pit_xs_32",
        "swin_tiny_patch2_window4_32",
        "t2t_i2_32_ewa_moe",
        "vmoe_b16",
        "vimoe_s14_shared",
        "soft_moe_s16",
        "swin_moe_small_patch4_window12_192_8e",
    ),
    *(
        "swin_tiny_patch2_window4_32_ewa_moe",
        "vimoe_b14",
        "vimoe_b14_shared",
        "ones_b",
        "vmoe_pbe_s32",
        "vmoe_pbe_b32",
    ),
    *("deit_tiny_patch16_224_ewa_moe", "twins_pcpvt_small_ewa_moe"),
)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
@pytest.mark.first_case
def test_a_folder_needs_to_state_its_classes_only_once(name, tmp_path):
    """At the top of config.json, where transformers looks for them too."""
    cfg = timm.models.get_pretrained_cfg(name).to_dict()
    config = {"architecture": name, "num_classes": 7, "pretrained_cfg": {**cfg, "num_classes": 7}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with weightless():
        assert timm.create_model(f"local-dir:{tmp_path}").num_classes == 7
        assert timm.create_model(f"local-dir:{tmp_path}", num_classes=3).num_classes == 3


@pytest.mark.parametrize(
    ("name", "default"), [("vimoe_s14", 1000), ("vit_xtiny_ewa_moe", 100), ("pit_xs_32", 100)]
)
@pytest.mark.first_case
def test_classes_that_nobody_states(name, default):
    with weightless():
        assert timm.create_model(name).num_classes == default
        assert timm.create_model(name, num_classes=0).num_classes == 0
        assert timm.create_model(name, pretrained_cfg_overlay={"num_classes": 7}).num_classes == 7
        registered = timm.models.get_pretrained_cfg(name)
        assert timm.create_model(name, pretrained_cfg=registered).num_classes == default
        # As of a folder.
        headless = {**registered.to_dict(), "num_classes": 0, "source": "local-dir"}
        assert timm.create_model(name, pretrained_cfg=headless).num_classes == 0


def test_the_short_and_the_long_name_are_one_model():
    names = ("vit_tiny_ewa_moe", "vit_tiny_patch16_224_ewa_moe")
    short, long = (timm.create_model(name, **SMALL_VIT) for name in names)
    assert type(short) is type(long)
    long.load_state_dict(short.state_dict())
    assert (
        type(timm_moe.to_dense(long))
        is type(timm_moe.to_dense(short))
        is timm.models.VisionTransformer
    )


@pytest.mark.parametrize("slots", [nullcontext, equal_slots])
@pytest.mark.first_case
def test_a_batch_without_images(slots):
    """A process may get one, as the last of an epoch; the others wait for its gradients."""
    for name in KINDS:
        model, images = family(name), torch.randn(0, 3, 32, 32)
        with slots():
            (model(images).sum() + timm_moe.auxiliary_loss(model)).backward()
            assert model.eval()(images).shape == (0, 5), name
        for path, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), (name, path)
