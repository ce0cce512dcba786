"""Expert models in folders of their own."""

import argparse
import os

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, save_as_train_py
from hub_client import output_of
from safetensors.torch import load_file

import timm_moe
from timm_moe.export.export import export_moe
from timm_moe_cli import main


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_ewa_moe", {"drop_path_rate": 0.1}),
        ("vimoe_s14_shared", {"shared_init": "zero_out"}),
        ("widenet_b", {"routing_groups": 2, "num_experts": 3}),
        ("vmoe_pbe_s32", {"num_experts": 4, "ensemble": "tiling"}),
        (
            "vmoe_b32",
            {"num_experts": 2, "moe_layers": "1", "pre_logits": True, "capacity_factor": "none"},
        ),
    ],
)
@pytest.mark.first_case
def test_every_kind_comes_back(name, options, tmp_path):
    model = timm.create_model(name, **{**SMALL_VIT, **options})
    model.reset_classifier(3)
    cfg = dict(model.pretrained_cfg)
    export_moe(model, tmp_path / "moe", model_args={**OPTIONS, **options})
    assert model.pretrained_cfg == cfg
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True)
    assert type(loaded) is type(model)
    assert torch.equal(output_of(loaded), output_of(model))
    export_moe(model, tmp_path / "untold")
    assert (tmp_path / "untold/model.safetensors").is_file()
    saved = load_file(tmp_path / "moe/model.safetensors")
    assert all(torch.equal(saved[key], value) for key, value in loaded.state_dict().items())


def test_arguments_that_nobody_told(tmp_path):
    model = timm.create_model("vit_tiny_moe", num_experts=3, top_k=2, **SMALL_VIT)
    model._model_args = {**SMALL_VIT, "num_experts": 3, "top_k": 1}
    with pytest.raises(ValueError, match="outputs differ"):
        export_moe(model, tmp_path / "moe")
    export_moe(model, tmp_path / "moe", model_args={"top_k": 2})
    converted = timm_moe.convert_to_moe(timm.create_model("vit_tiny_patch16_224", **SMALL_VIT))
    with pytest.raises(ValueError, match="converted in memory"):
        export_moe(converted, tmp_path / "converted")
    assert os.listdir(tmp_path) == ["moe"]


def test_a_dense_name_of_this_package_creates_no_experts(tmp_path):
    """The name was that of the dense model before it was converted."""
    dense = timm.create_model("vit_xtiny", **SMALL_VIT)
    converted = timm_moe.convert_to_moe(dense, router="top_k", num_experts=2)
    message = r"by convert_to_moe, and has no name .*: save its state_dict\(\).* vit_small_ewa_moe"
    with pytest.raises(ValueError, match=message):
        export_moe(converted, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_the_expert_model_itself(tmp_path, images, capsys):
    """A folder that timm's scripts take as a teacher."""
    model = timm.create_model("widenet_b", mlp_ratio=2, official_compat=True, **SMALL_VIT).eval()
    kwargs = OPTIONS | {"mlp_ratio": 2, "official_compat": True}
    save_as_train_py(tmp_path / "last.pth.tar", model, "widenet_b", model_kwargs=kwargs)
    assert main(["export", "--moe", str(tmp_path / "last.pth.tar"), str(tmp_path / "teacher")]) == 0
    assert "timm with this package loads it bit for bit" in capsys.readouterr().out
    assert main(["export", "--moe", str(tmp_path / "teacher"), str(tmp_path / "again")]) == 0
    for folder in ("teacher", "again"):
        loaded = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


def test_options_that_have_no_place(dense_vit, tmp_path, capsys):
    torch.save(
        {"state_dict": {}, "args": argparse.Namespace(model="local-dir:gone")},
        tmp_path / "a.pth.tar",
    )
    assert (
        main(
            [
                "export",
                str(tmp_path / "a.pth.tar"),
                str(tmp_path / "vit"),
                "--model",
                "local-dir:gone",
            ]
        )
        == 1
    )
    assert "no folder gone" in capsys.readouterr().err
    assert (
        main(
            [
                "export",
                "--moe",
                str(tmp_path / "a.pth.tar"),
                str(tmp_path / "vit"),
                "--method",
                "svd",
            ]
        )
        == 1
    )
    assert "--method and --svd-ratio" in capsys.readouterr().err
