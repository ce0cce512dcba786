"""``<architecture>_ewa_moe``: names, tags, loading roads, and a small model of each family."""

import pickle
import sys
from importlib import import_module

import pytest
import timm
import torch
from common import ROOT
from every_model import check
from families import SMALL
from processes import run_code
from safetensors.torch import save_file
from timm.models import get_arch_pretrained_cfgs, list_models, model_entrypoint

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe.model_config import records_arguments
from timm_moe.models import ewa
from timm_moe.models.registered import registered_models, weightless

sys.path.insert(0, str(ROOT / "docs"))
row = import_module("model_tables").row

TINY_SWIN = dict(SMALL["swin_tiny_patch4_window7_224"], num_classes=5)


@pytest.mark.parametrize("architecture", SMALL)
@pytest.mark.first_case
def test_a_small_one_of_each_family(architecture):
    check(architecture, SMALL[architecture])


@pytest.mark.parametrize("architecture", SMALL)
@pytest.mark.first_case
def test_experts_that_differ_become_their_mean(architecture, tmp_path):
    """Wherever the network stands: CoaT's blocks have it in three places."""
    model = timm.create_model(f"{architecture}_ewa_moe", **SMALL[architecture])
    assert all(spread(layer) > 0 for layer in timm_moe.moe_layers(model).values())
    assert timm_moe.export_dense(model, tmp_path / "dense", model_args=SMALL[architecture]).exact


@pytest.mark.parametrize("name", ["vit_small_resnet26d_224", "vit_base_resnet50d_224"])
@pytest.mark.first_case
def test_a_backbone_that_timm_builds_first_is_built_as_it_is(name):
    model = timm.create_model(f"{name}_ewa_moe", img_size=64, embed_dim=32, depth=2, num_heads=2)
    stock = timm.create_model(name, img_size=64, embed_dim=32, depth=2, num_heads=2)
    assert list(timm_moe.moe_layers(model)) == ["blocks.1.mlp"]
    assert type(model.patch_embed.backbone) is type(stock.patch_embed.backbone)
    assert timm_moe.to_dense(model).state_dict().keys() == stock.state_dict().keys()


def spread(layer):
    return max(
        (stacked - stacked.mean(0)).abs().max() for _, stacked in layer.named_expert_parameters()
    )


def test_windows_that_were_changed_later_are_not_lost(tmp_path):
    model = timm.create_model("swin_tiny_patch4_window7_224_ewa_moe", **TINY_SWIN, window_size=2)
    model.set_input_size((128, 128))
    stated = {}
    if not records_arguments():  # nor does timm then record a change
        with pytest.raises(ValueError, match=r"relative_position_bias_table .*model_args"):
            timm_moe.export_dense(model, tmp_path / "swin")
        stated = {**TINY_SWIN, "img_size": 128, "window_size": 4}
    exported = timm_moe.export_dense(model, tmp_path / "swin", model_args=stated)
    assert exported.largest_difference == 0


def test_every_family_has_a_small_one_here():
    families = {model_entrypoint(name).__module__ for name in SMALL}
    with_models = {
        f"timm.models.{name}" for name, module in ewa._families.items() if module.__all__
    }
    assert families == with_models


def test_every_pretrained_tag_of_timm_is_there_with_its_repository():
    assert len(ewa.architectures()) > 450
    for architecture in ewa.architectures():
        stock, ours = (
            get_arch_pretrained_cfgs(name) for name in (architecture, f"{architecture}_ewa_moe")
        )
        assert [(cfg.tag, cfg.hf_hub_id) for cfg in ours.values()] == [
            (cfg.tag, cfg.hf_hub_id) for cfg in stock.values()
        ]
        assert all(cfg.architecture == f"{architecture}_ewa_moe" for cfg in ours.values())


def test_timm_lists_them_with_their_family():
    listed = list_models("swin_tiny*", module="swin_transformer")
    assert {"swin_tiny_patch4_window7_224", "swin_tiny_patch4_window7_224_ewa_moe"} <= set(listed)
    assert "swin_tiny_patch4_window7_224_ewa_moe.ms_in1k" in timm.list_pretrained("swin_tiny*")


def test_short_names_stay_what_they_were():
    assert model_entrypoint("vit_small_ewa_moe").__module__ == "timm_moe.models.vision_transformer"
    assert {"vit_tiny", "vit_small", "vit_base", "vit_large", "vit_xtiny"}.isdisjoint(
        ewa.architectures()
    )


def test_stock_models_stay_stock():
    timm.create_model("swin_tiny_patch4_window7_224_ewa_moe", **TINY_SWIN)
    stock = timm.create_model("swin_tiny_patch4_window7_224", **TINY_SWIN)
    assert type(stock) is timm.models.SwinTransformer
    assert not timm_moe.moe_layers(stock)


def test_options_and_features():
    model = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe",
        num_experts=3,
        moe_layers="1,2",
        share_rate=0.1,
        **TINY_SWIN,
    )
    assert list(timm_moe.moe_layers(model)) == ["layers.1.blocks.0.mlp", "layers.2.blocks.0.mlp"]
    assert {
        (layer.num_experts, layer.share_rate) for layer in timm_moe.moe_layers(model).values()
    } == {(3, 0.1)}
    weight = model.layers[1].blocks[0].mlp.fc1.weight
    assert not torch.equal(weight[0], weight[1])  # from scratch
    features = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe", features_only=True, **TINY_SWIN
    )
    assert [feature.shape[-1] for feature in features(torch.randn(1, 3, 64, 64))] == [
        16,
        32,
        64,
        128,
    ]
    with pytest.raises(ValueError, match=r"share_rate .*0\.75 .* 2\."):
        timm.create_model("swin_tiny_patch4_window7_224_ewa_moe", share_rate=2, **TINY_SWIN)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224_ewa_moe", {**TINY_SWIN, "router": "top_k"}),
        ("swin_tiny_patch2_window4_32_ewa_moe", {"img_size": 64, "router": "top_k"}),
        ("swin_moe_small_patch4_window12_192_8e", {**TINY_SWIN, "depths": (2, 2, 2, 2)}),
    ],
)
def test_a_list_of_features_watches_what_it_loads(name, options):
    """timm's FeatureListNet holds the stages of a Swin without the model that they are of."""
    one, two = (
        timm.create_model(name, features_only=True, moe_layers=where, **options)
        for where in ("1", "1,3")
    )
    with pytest.raises(RuntimeError, match="use its moe_layers"):
        two.load_state_dict(one.state_dict(), strict=False)
    images = torch.rand(2, 3, 64, 64)
    one.train()(images)
    one(images)
    router = next(iter(timm_moe.moe_layers(one).values())).router
    assert len(router.waiting()) == 1  # The first forward's loss was dropped.


@pytest.mark.ci
def test_a_model_is_pickled_and_saved_as_it_is(tmp_path):
    model = timm.create_model("swin_tiny_patch4_window7_224_ewa_moe", **TINY_SWIN).eval()
    (tmp_path / "model.pickle").write_bytes(pickle.dumps(model))
    export_moe(model, tmp_path / "moe")
    images = torch.randn(2, 3, 64, 64)
    torch.save((images, model(images).detach()), tmp_path / "outputs.pt")
    code = f"""
import pickle, timm, torch, timm_moe
images, expected = torch.load({str(tmp_path / "outputs.pt")!r})
with open({str(tmp_path / "model.pickle")!r}, "rb") as file:
    model = pickle.load(file)
assert torch.equal(model(images), expected)
loaded = timm.create_model("local-dir:{tmp_path}/moe", pretrained=True).eval()
assert type(loaded) is type(model) and torch.equal(loaded(images), expected)
"""
    done = run_code(code)
    assert done.returncode == 0, done.stderr


def test_a_dense_checkpoint_is_upcycled_from_a_file(tmp_path):
    dense = timm.create_model("swin_tiny_patch4_window7_224", **TINY_SWIN).eval()
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    images = torch.randn(2, 3, 64, 64)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe",
        checkpoint_path=str(tmp_path / "dense.safetensors"),
        **TINY_SWIN,
    )
    assert torch.equal(model.eval()(images), dense(images))
    overlay = dict(file=str(tmp_path / "dense.safetensors"), num_classes=5)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224_ewa_moe.ms_in22k",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        **TINY_SWIN,
    )
    assert torch.equal(model.eval()(images), dense(images))


@pytest.mark.parametrize(
    "architecture", ["deit_tiny_patch16_224", "tnt_s_patch16_224", "caformer_s18"]
)
@pytest.mark.first_case
def test_the_page_of_the_models(architecture):
    page = (ROOT / "docs/generated/models.md").read_text()
    assert row(architecture) in page.splitlines()


@pytest.mark.skipif(
    timm.__version__ != "1.0.31", reason="the documents give the numbers of timm 1.0.31"
)
def test_the_numbers_of_names_in_the_documents():
    names, forms = len(registered_models("*")), len(ewa.architectures())
    for file, text in (
        ("README.md", f"and {names} names to"),
        ("docs/models.md", f"has an EWA form, {forms} of timm 1.0.31"),
        ("CONTRIBUTING.md", f"all models, {forms} EWA forms included"),
        ("CONTRIBUTING.md", f"of the {forms} EWA forms"),
        ("CONTRIBUTING.md", f"All {forms} were checked"),
        ("CONTRIBUTING.md", f"of the {names - forms} models"),
        ("CHANGELOG.md", f"- {forms} `<architecture>_ewa_moe`"),
        ("CHANGELOG.md", f"and {names - forms} models with names of their own"),
    ):
        assert text in (ROOT / file).read_text(), text


def test_networks_that_must_not_be_divided_are_not_found():
    with weightless():
        mixer = timm.create_model("mixer_s16_224")
        relative = timm.create_model("vit_srelpos_small_patch16_224")
        pooling = timm.create_model("vit_base_patch16_siglip_224")
        tnt = timm.create_model("tnt_s_patch16_224", depth=2)
        gmlp = timm.create_model("gmlp_ti16_224")
    paths = timm_moe.convert.ffn_paths
    assert paths(mixer) == [f"blocks.{block}.mlp_channels" for block in range(8)]
    assert paths(relative) == [f"blocks.{block}.mlp" for block in range(12)]
    assert paths(pooling) == [f"blocks.{block}.mlp" for block in range(12)]
    assert paths(tnt) == ["blocks.0.mlp_in", "blocks.0.mlp", "blocks.1.mlp_in", "blocks.1.mlp"]
    assert paths(gmlp) == []
