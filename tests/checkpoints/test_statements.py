"""Statements on a model: those of a checkpoint, and those of the user, which come first."""

import argparse

import pytest
import timm
import torch
from common import OPTIONS, ROOT, SMALL_VIT, make_model, save_as_train_py
from families import SMALL
from processes import run_script
from timm.data import IMAGENET_DEFAULT_MEAN, resolve_data_config

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.export import push_moe
from timm_moe.model_config import model_input_size

EWA = "vit_tiny_ewa_moe"


def test_blocks_that_were_compiled_are_read(tmp_path):
    model, file = make_model(EWA), tmp_path / "a.pth"
    model.blocks[1] = torch.compile(model.blocks[1])
    save_as_train_py(file, model, EWA)
    loaded = load_source(file).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name.replace("_orig_mod.", "")], tensor)


def test_arguments_of_deits_trainer_state_the_side_of_an_image(tmp_path):
    file = tmp_path / "a.pth"
    args = argparse.Namespace(model="deit", input_size=32, nb_classes=5, opt="adamw")
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    torch.save({"model": model.state_dict(), "args": args}, file)
    loaded = load_source(file, ModelSpec("vit_tiny_patch16_224", 5, OPTIONS))
    assert loaded.pretrained_cfg["input_size"] == (3, 32, 32)


def test_the_users_mean_comes_before_one_that_is_no_number(tmp_path):
    file = save_as_train_py(tmp_path / "a.pth", make_model(EWA), EWA, mean="imagenet")
    with pytest.raises(ValueError, match=r"mean.*'imagenet'"):
        load_source(file)
    spec = ModelSpec(preprocessing=dict(mean=(0.1, 0.2, 0.3)))
    assert load_source(file, spec).pretrained_cfg["mean"] == (0.1, 0.2, 0.3)


def test_the_users_size_of_images_comes_before_the_files(tmp_path):
    file = tmp_path / "a.pth"
    model = timm.create_model(EWA, **{**SMALL_VIT, "img_size": 48})
    save_as_train_py(file, model, EWA, img_size=32)
    spec = ModelSpec(kwargs=dict(img_size=48), preprocessing=dict(img_size=48))
    assert load_source(file, spec).patch_embed.img_size == (48, 48)


def test_what_weights_do_not_show_is_told(tmp_path, caplog):
    caplog.set_level("INFO", "timm_moe")
    file = tmp_path / "a.pth"
    torch.save(make_model("vit_tiny_moe", top_k=2).state_dict(), file)
    load_source(file, ModelSpec("vit_tiny_moe", 5, {**OPTIONS, "expert_dropout": 0.1}))
    assert "how its routers choose" in caplog.text
    assert "top_k=1" in caplog.text
    caplog.clear()
    load_source(file, ModelSpec("vit_tiny_moe", 5, {**OPTIONS, "top_k": 2}))
    assert "how its routers choose" not in caplog.text
    save_as_train_py(file, make_model("vit_tiny_moe"), "vit_tiny_moe")
    load_source(file)
    assert "how its routers choose" not in caplog.text
    load_source(file, ModelSpec("vit_small_moe", 5, OPTIONS))
    assert "vit_tiny_moe; vit_small_moe is taken" in caplog.text
    torch.save(make_model("vit_tiny_patch16_224").state_dict(), file)
    load_source(file, ModelSpec(EWA, 5, OPTIONS))
    assert "holds a dense model" in caplog.text


def test_arguments_without_a_model_still_describe_it(tmp_path):
    file = tmp_path / "a.pth"
    model = make_model("vit_tiny_moe", top_k=2)
    args = argparse.Namespace(num_classes=5, model_kwargs={**OPTIONS, "top_k": 2})
    torch.save({"state_dict": model.state_dict(), "args": args}, file)
    assert load_source(file, ModelSpec("vit_tiny_moe")).blocks[1].mlp.router.top_k == 2


def test_arguments_of_train_py_may_be_a_dict(tmp_path):
    file = tmp_path / "a.pth"
    args = dict(model="vit_tiny_moe", num_classes=5, model_kwargs={**OPTIONS, "top_k": 2})
    model = make_model("vit_tiny_moe", top_k=2)
    torch.save({"state_dict": model.state_dict(), "args": args}, file)
    assert load_source(file).blocks[1].mlp.router.top_k == 2


def test_another_trainers_arguments_do_not_describe_the_model(tmp_path, caplog):
    """They have no place for the options of its routers, nor for its images."""
    model = make_model("vit_tiny_moe", top_k=2)
    args = argparse.Namespace(model="vit_tiny_moe", nb_classes=5, input_size=32, lr=1e-3)
    content = {"model": model.state_dict(), "epoch": 29, "args": args}
    told = []
    for file in (tmp_path / "a.pth", tmp_path / "b.pth"):
        torch.save(content, file)
        caplog.clear()
        loaded = load_source(file, ModelSpec("vit_tiny_moe", 5, OPTIONS))
        told.append([text.replace(str(file), "") for text in caplog.messages])
        content.pop("args", None)
    assert told[0] == told[1]
    assert [" does not say how " in text for text in told[0]] == [True, True]
    card = push_moe(
        tmp_path / "a.pth", "user/vit", dry_run=True, spec=ModelSpec(None, 5, OPTIONS)
    ).card
    assert "train.py" not in card
    assert loaded.blocks[1].mlp.router.top_k == 1


def test_a_models_name_without_a_tag_takes_that_of_the_file(tmp_path, caplog):
    """The tag names the weights, and so the preprocessing, with which training began."""
    name = "vit_small_ewa_moe"
    stated = dict(pretrained=True, model_kwargs=OPTIONS)
    file = save_as_train_py(tmp_path / "a.pth", make_model(name), f"{name}.dino", **stated)
    for spec in (None, ModelSpec(name)):
        assert load_source(file, spec).pretrained_cfg["mean"] == IMAGENET_DEFAULT_MEAN
        card = push_moe(file, "user/vit", dry_run=True, spec=spec).card
        assert "base_model: timm/vit_small_patch16_224.dino" in card
    assert " is taken." not in caplog.text
    other = load_source(file, ModelSpec(f"{name}.augreg_in1k"))
    assert other.pretrained_cfg["mean"] == (0.5,) * 3
    assert f"model is {name}.dino; {name}.augreg_in1k is taken." in caplog.text


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_base_patch16_clip_384_ewa_moe.laion2b_ft_in1k", OPTIONS),  # squashes images
        ("edgenext_xx_small_ewa_moe", SMALL["edgenext_xx_small"]),  # is tested at a larger size
    ],
)
def test_images_are_prepared_as_train_py_evaluates(tmp_path, name, options):
    """Its evaluation crops the centre at the size of the training, also by validate.py then."""
    model = timm.create_model(name, num_classes=5, **options)
    of_train_py = {**resolve_data_config({}, model=model), "crop_mode": "center"}
    of_train_py["input_size"] = model_input_size(model)
    file = save_as_train_py(tmp_path / "a.pth", model, name, model_kwargs=options)
    timm_moe.export_dense(file, tmp_path / "vit")
    exported = timm.create_model(f"local-dir:{tmp_path / 'vit'}")
    of_validate_py = resolve_data_config({}, model=exported, use_test_size=True)
    assert tuple(of_validate_py["input_size"]) == of_train_py["input_size"]
    for entry in ("interpolation", "crop_pct", "crop_mode"):
        assert of_validate_py[entry] == of_train_py[entry], entry
    spec = ModelSpec(preprocessing=dict(crop_mode="border"))
    assert load_source(file, spec).pretrained_cfg["crop_mode"] == "border"


#: A script with a model of its own, which starts another script in its place, as own_router.py.
OWN_MAIN = """
import runpy, sys
from timm.models import build_model_with_cfg, register_model
from timm.models.vision_transformer import VisionTransformer
from timm_moe.models.mixin import MoeMixin, note_dense_form
from timm_moe.models.variants import Variant, register_variants

class Deep(VisionTransformer):
    def __init__(self, deep=1, **kwargs):
        super().__init__(**kwargs)

class MoeDeep(MoeMixin, Deep):
    stock_class = Deep

@register_model
def deep_moe(pretrained=False, **kwargs):
    model = build_model_with_cfg(MoeDeep, "deep_moe", pretrained, **kwargs)
    note_dense_form(model, "deep", kwargs)
    return model

@register_model
def deep(pretrained=False, **kwargs):
    return build_model_with_cfg(Deep, "deep", pretrained, **kwargs)

def create(name, variant, pretrained, kwargs):
    return build_model_with_cfg(MoeDeep, name, pretrained, **kwargs)

register_variants(__name__, {"deep_moe_b": Variant("Deep.", "deep", {})}, create)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def output_of(code, folder):
    """Run a program that the script with models of its own starts; return what it prints."""
    (folder / "main.py").write_text(OWN_MAIN)
    found = f"import sys\nsys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    (folder / "other.py").write_text(found + code)
    done = run_script(folder / "main.py", "other.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADS = """
import timm
from common import OPTIONS, SMALL_VIT, save_as_train_py
from timm_moe.checkpoints.source import load_source
options = dict(deep=2, router="top_k")
for name in ("deep_moe", "deep_moe_b"):
    model = timm.create_model(name, **options, **SMALL_VIT)
    save_as_train_py("a.pth", model, name, model_kwargs={**options, **OPTIONS})
    load_source("a.pth")
    print(name)
"""


def test_a_script_that_runs_another_in_its_place_has_models_of_its_own(tmp_path):
    assert output_of(LOADS, tmp_path).split() == ["deep_moe", "deep_moe_b"]


PUBLISHES = """
import timm
from common import SMALL_VIT, save_as_train_py
from timm_moe_cli import main
model = timm.create_model("deep_moe", **SMALL_VIT)
save_as_train_py("a.pth", model, "deep_moe")
main(["export", "a.pth", "deep"])
main(["push", "deep", "user/deep", "--license", "mit", "--dry-run"])
"""


def test_the_export_of_a_scripts_own_model_names_no_module(tmp_path):
    told = output_of(PUBLISHES, tmp_path)
    assert "Checked: timm with this program loads it" in told
    assert "Loading it needs the program that registers it with timm:" in told
    assert "__main__" not in told
