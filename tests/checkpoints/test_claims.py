"""Claims of a strange file.

It states values without end, or elements that it does not hold.
"""

import argparse
import time
import zipfile
from collections import OrderedDict
from functools import cache

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, SPEC, save_as_train_py
from timm.models import save_for_hf

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.source import load_source
from timm_moe.console import shown
from timm_moe.export.push import push_dense, push_moe
from timm_moe_cli import main

#: Each doubles a value 26 times: a few hundred bytes in the file, gigabytes as text.
NESTS = {
    "list": lambda value: [value, value],
    "tuple": lambda value: (value, value),
    "dict": lambda value: {"a": value, "b": value},
    "OrderedDict": lambda value: OrderedDict(a=value, b=value),
    "Namespace": lambda value: argparse.Namespace(a=value, b=value),
}


def nest(kind="list"):
    value = "value"
    for _ in range(26):
        value = NESTS[kind](value)
    return value


@pytest.fixture
def quickly():
    """Fail a test that computes for long.

    The text of one nest takes 20 seconds, a test without it one.
    """
    begin = time.process_time()
    yield
    assert time.process_time() - begin < 8


@cache
def vit():
    return timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)


# --- values without end

READ = (
    "model",
    "num_classes",
    "in_chans",
    "gp",
    "model_kwargs",
    "input_size",
    "img_size",
    "mean",
    "std",
    "crop_pct",
)
PUBLISHED = (
    "dataset",
    "initial_checkpoint",
    "pretrained_path",
    "pretrained",
    "eval_metric",
    "lr",
    "opt",
    "model_ema",
)
DEPENDENT = (
    "amp",
    "amp_dtype",
    "kd_model_name",
    "distill_loss_weight",
    "interpolation",
    "crop_mode",
)


@pytest.mark.parametrize("kind", NESTS)
@pytest.mark.parametrize("name", [*READ, *PUBLISHED, *DEPENDENT])
@pytest.mark.first_case
def test_a_nested_argument(quickly, tmp_path, name, kind):
    file = save_as_train_py(tmp_path / "a.pth", vit(), **{name: nest(kind)})
    spec = SPEC if name in ("model", "model_kwargs", "num_classes") else None
    try:
        text = push_dense(file, "user/vit", dry_run=True, spec=spec).card
    except ValueError as error:
        text = str(error)
    assert len(text) < 5000


@pytest.mark.parametrize("kind", NESTS)
@pytest.mark.first_case
def test_nests_in_other_places(quickly, tmp_path, kind):
    content = {
        **torch.load(save_as_train_py(tmp_path / "a.pth", vit()), weights_only=False),
        "metric": 1.0,
    }
    changes = [
        {"args": nest(kind)},
        {
            "epoch": nest(kind),
            "args": argparse.Namespace(**vars(content["args"]), eval_metric="top1"),
        },
        {
            "metric": nest(kind),
            "args": argparse.Namespace(**vars(content["args"]), eval_metric="top1"),
        },
        {
            "args": argparse.Namespace(
                **{**vars(content["args"]), "model_kwargs": {**OPTIONS, "patch_size": nest(kind)}}
            )
        },
        {
            "args": argparse.Namespace(
                **{**vars(content["args"]), "model_kwargs": {"x": nest(kind)}}
            )
        },
        {"state_dict": nest(kind)},
        {"state_dict": {"head.weight": nest(kind)}},
    ]
    (tmp_path / "summary.csv").write_text("epoch,eval_top1\n1,1.0\n")
    for change in changes:
        torch.save({**content, **change}, tmp_path / "a.pth")
        for function in (push_dense, push_moe):
            try:
                text = function(tmp_path / "a.pth", "user/vit", dry_run=True).card
            except ValueError as error:
                text = str(error)
            assert len(text) < 5000


def test_commands_on_a_nest(quickly, tmp_path, capsys):
    stated = dict(model_kwargs={"patch_size": nest()}, mean=nest(), dataset=nest())
    file = save_as_train_py(tmp_path / "a.pth", vit(), **stated)
    for command in (
        ["info", file],
        ["export", file, tmp_path / "out"],
        ["push", file, "user/vit", "--dry-run"],
    ):
        assert main(list(map(str, command))) == 1
        assert len(capsys.readouterr().err) < 500


@pytest.mark.parametrize("kind", NESTS)
def test_any_value_is_shown_in_a_few_words(quickly, kind):
    for value in (
        nest(kind),
        [nest(kind)] * 10**5,
        {"a" * 10**6: "b" * 10**6},
        ["x" * 10**6] * 10**6,
    ):
        assert 0 < len(shown(value)) < 200
    assert 0 < len(shown(10**5000)) < 200
    assert shown([0.5, 0.25]) == "[0.5, 0.25]"
    assert shown("a word") == "'a word'"


# --- sizes


def test_a_tensor_may_repeat_one_number(ewa_vit, tmp_path):
    """By a stride of 0, as torch.expand makes it."""
    file = save_as_train_py(tmp_path / "a.pth", ewa_vit)
    content = torch.load(file, weights_only=False)
    content["state_dict"]["head.bias"] = torch.ones(1).expand(5)
    torch.save(content, file)
    assert load_source(file).head.bias.tolist() == [1] * 5


def test_a_record_may_claim_more_than_the_file(quickly, tmp_path):
    """torch.save never compresses, and torch.load maps the bytes of a record as they are."""
    file = save_as_train_py(tmp_path / "a.pth", vit())
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            if name.endswith("data.pkl"):
                archive.writestr(name, content + bytes(10**7), zipfile.ZIP_DEFLATED)
            else:
                archive.writestr(name, content)
    with pytest.raises(ValueError, match=r"a\.pth is damaged or not"):
        load_source(file)


def test_experts_of_a_dense_checkpoint_are_the_users_choice(dense_vit, tmp_path):
    file = save_as_train_py(
        tmp_path / "a.pth", dense_vit, model_kwargs={**OPTIONS, "num_experts": 16}
    )
    assert timm_moe.moe_layers(load_source(file))["blocks.1.mlp"].num_experts == 16
    file = save_as_train_py(tmp_path / "a.pth", dense_vit)
    model = load_source(file, ModelSpec("vit_tiny_ewa_moe", 5, {**OPTIONS, "num_experts": 100}))
    assert timm_moe.moe_layers(model)["blocks.1.mlp"].num_experts == 100


def test_a_config_of_endless_brackets(quickly, ewa_vit, tmp_path):
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    (tmp_path / "moe/config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="cannot be created"):
        load_source(tmp_path / "moe")
