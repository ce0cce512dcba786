"""Checkpoints of train.py and other trainers: EMA weights, and what lies beside the tensors."""

import argparse
import collections
import datetime
import decimal
import os
import pathlib
import random
import re
import types

import numpy as np
import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, SPEC
from safetensors.torch import save
from torch import nn
from torch.optim.swa_utils import AveragedModel

from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.checkpoints.reading import read_checkpoint
from timm_moe.checkpoints.source import load_source


def vit():
    return timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)


def load(path, use_ema):
    return load_source(path, SPEC, use_ema=use_ema).state_dict()


def test_averaged_weights_alone_are_found(tmp_path):
    """The count of torch's AveragedModel is no weight."""
    ema = vit()
    torch.save(AveragedModel(ema).state_dict(), tmp_path / "a.pth")
    loaded = load(tmp_path / "a.pth", False)
    assert loaded.keys() == ema.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in ema.state_dict().items())


def test_ema_weights_of_train_py_alone_are_known(tmp_path):
    trained, ema, file = vit(), vit(), tmp_path / "a.pth"
    torch.save({"state_dict": trained.state_dict(), "state_dict_ema": ema.state_dict()}, file)
    for use_ema, model in ((True, ema), (False, trained)):
        loaded = load(file, use_ema)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    torch.save({"model": trained.state_dict(), "model_ema": ema.state_dict()}, file)
    with pytest.raises(ValueError, match=r"has no state_dict_ema, .*file of their own"):
        load(file, use_ema=True)


HARMLESS = {
    "numpy scalar": np.float64(0.75),
    "numpy integer": np.int64(3),
    "numpy bool": np.bool_(True),
    "numpy array": np.arange(3.0),
    "numpy words": np.array(["a", "b"]),
    "numpy objects": np.array([{"a": 1}], dtype=object),
    "numpy type": np.dtype("float32"),
    "numpy date": np.datetime64("2026-01-01"),
    "random states": [np.random.get_state(), random.getstate(), torch.get_rng_state()],
    "path": pathlib.Path("runs/1"),
    "foreign path": pathlib.PureWindowsPath("runs\\1"),
    "dates": [
        datetime.datetime.now(datetime.timezone.utc),
        datetime.date.today(),
        datetime.timedelta(3),
        datetime.time(1),
    ],
    "torch": [torch.Size([1]), torch.float32, torch.device("cpu")],
    "namespaces": [argparse.Namespace(a=argparse.Namespace(b=1)), types.SimpleNamespace(a=1)],
    "collections": [
        collections.defaultdict(list, a=[1]),
        collections.OrderedDict(a=1),
        {1, 2},
        collections.Counter("a"),
    ],
}


@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.first_case
def test_harmless_objects_are_read(kind, tmp_path):
    args = argparse.Namespace(
        model="vit_tiny_ewa_moe", num_classes=5, model_kwargs=OPTIONS, extra=HARMLESS[kind]
    )
    file = tmp_path / "a.pth.tar"
    torch.save({"state_dict": vit().state_dict(), "args": args, "more": HARMLESS[kind]}, file)
    assert isinstance(load_source(file), nn.Module)


def test_numbers_and_paths_stay_what_they_say(tmp_path):
    held = [
        np.float64(0.1),
        np.float32(0.5),
        np.int16(-3),
        np.bool_(True),
        pathlib.Path("a/b"),
        datetime.date(2026, 1, 2),
    ]
    torch.save({"held": held, "big endian": np.array(258, ">i4")[()]}, tmp_path / "a.pth")
    read = read_checkpoint(tmp_path / "a.pth")
    assert read == {
        "held": [0.1, 0.5, -3, True, "a/b", datetime.date(2026, 1, 2)],
        "big endian": 258,
    }
    assert {type(value) for value in read["held"]} == {float, int, bool, str, datetime.date}


class Shell:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize("bad", [Shell(), decimal.Decimal(1), np.array([Shell()], dtype=object)])
def test_the_rest_is_refused_with_the_remedy(bad, tmp_path):
    torch.save({"state_dict": vit().state_dict(), "more": bad}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"runs code .*torch\.save\(model\.state_dict\(\), file\)"):
        read_checkpoint(tmp_path / "a.pth")


def test_a_tensor_in_the_place_of_weights_by_name_is_refused(tmp_path):
    torch.save({"state_dict": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="'state_dict' is of type Tensor: write the weights"):
        load_source(tmp_path / "a.pth", ModelSpec("vit_tiny_ewa_moe"))


def test_a_file_of_ema_weights_alone(tmp_path):
    file = tmp_path / "a.pth"
    model = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT)
    args = argparse.Namespace(model="vit_tiny_ewa_moe", num_classes=5, model_kwargs=OPTIONS)
    torch.save({"state_dict_ema": model.state_dict(), "args": args}, file)
    loaded = load_source(file, use_ema=True)
    assert torch.equal(loaded.cls_token, model.cls_token)
    with pytest.raises(ValueError, match="EMA weights alone: --use-ema"):
        load_source(file)


def test_weights_that_fit_are_not_replaced_by_those_of_a_wrapper(tmp_path):
    file = tmp_path / "a.pth"
    weights = timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT).state_dict()
    for prefix, told in (("model.", "Unexpected key"), ("module.", "holds weights twice")):
        others = {f"{prefix}{name}": tensor + 1 for name, tensor in weights.items()}
        torch.save({**weights, **others}, file)
        with pytest.raises(ValueError, match=told):
            load_source(file, SPEC)


def test_a_pickled_module_is_refused_by_advice_and_three_names(tmp_path):
    torch.save(vit(), tmp_path / "a.pth")
    with pytest.raises(ValueError, match="runs code") as raised:
        read_checkpoint(tmp_path / "a.pth")
    advice, _, names = str(raised.value).partition(" The file names ")
    assert advice.endswith("torch.save(model.state_dict(), file).")
    listed, _, more = names.partition(" and ")
    assert listed.split(", ") == sorted(listed.split(", "))
    assert len(listed.split(", ")) == 3
    assert re.fullmatch(r"\d+ more\.", more)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "run git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "is a web page"),
        (save({"a": torch.ones(2)}), r"rename .*\.safetensors"),
        (b"\x80\x02}q", "damaged or not"),
    ],
)
def test_what_is_no_checkpoint_is_told(content, told, tmp_path):
    (tmp_path / "a.pth").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_checkpoint(tmp_path / "a.pth")
