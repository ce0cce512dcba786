"""Sources that cannot be exported: one sentence, and nothing is written."""

import argparse
import os
import pickle

import pytest
import torch
from common import OPTIONS, SPEC, edit
from safetensors.torch import save_file
from timm.models import save_for_hf

import timm_moe
from timm_moe.checkpoints.model_spec import ModelSpec

DAMAGED_FOLDERS = {
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "weights garbage": lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 99),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "config garbage": lambda folder: (folder / "config.json").write_text("{"),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "no architecture": lambda folder: edit(folder, lambda config: config.pop("architecture")),
    "architecture a number": lambda folder: edit(
        folder, lambda config: config.update(architecture=3)
    ),
    "unknown architecture": lambda folder: edit(
        folder, lambda config: config.update(architecture="vit_nonsense")
    ),
    "model_args a string": lambda folder: edit(
        folder, lambda config: config.update(model_args="x")
    ),
    "hostile model_args": lambda folder: edit(
        folder, lambda config: config["model_args"].update(num_heads=7)
    ),
}


@pytest.mark.parametrize("damage", DAMAGED_FOLDERS)
def test_damaged_folders(ewa_vit, tmp_path, damage):
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    DAMAGED_FOLDERS[damage](tmp_path / "moe")
    with pytest.raises(ValueError, match=r"local-dir:.*moe cannot be created .*: \S"):
        timm_moe.export_dense(tmp_path / "moe", tmp_path / "vit")
    assert os.listdir(tmp_path) == ["moe"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"args": argparse.Namespace(model=3)}, "which model .*--model"),
        (
            {"args": argparse.Namespace(model="vit_tiny_ewa_moe", model_kwargs=1.5)},
            "arguments in .*damaged",
        ),
        ({"state_dict": {1: torch.zeros(1)}}, "no state dict .*1 is of type Tensor"),
        ({"mean": [0.5, 0.5]}, r"trainer's arguments .*mean .*channel"),
    ],
)
def test_damaged_checkpoints(checkpoint, tmp_path, damage, message):
    content = torch.load(checkpoint, weights_only=False)
    if "mean" in damage:
        content["args"].mean = damage["mean"]
    else:
        content.update(damage)
    torch.save(content, checkpoint)
    with pytest.raises(ValueError, match=message):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")


def flip(file, tensor):
    """Flip a bit of a tensor in a file."""
    content = bytearray(file.read_bytes())
    content[content.index(tensor.numpy().tobytes()) + 10] ^= 1
    file.write_bytes(content)


class Code:
    def __reduce__(self):
        return os.system, ("touch it_ran",)


def _write(path, content):
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pth", b"", "is empty"),
        ("a.pth", b"not a checkpoint at all", "damaged or not"),
        ("a.pth", b"\x89PNG\r\n\x1a\n" + bytes(99), "damaged or not"),
        ("a.safetensors", b"not safetensors either", "damaged or not"),
        ("a.safetensors", {"state_dict": {}}, r"torch\.save .*\.pth"),
        ("summary.csv", b"epoch,train_loss,eval_loss\n0,4.4,4.3\n", "damaged or not"),
        ("a.pth", {"state_dict": Code()}, r"runs code .* names \w+\.system\.$"),
        ("a.pth", pickle.dumps(Code()), "runs code|damaged or not"),
        ("a.pth", [1, 2], "holds a list"),
        ("a.pth", {"state_dict": 3}, "no state dict .*'state_dict' is of type int"),
        ("a.pth", {"state_dict": {"x": torch.zeros(1)}}, "which model .*--model"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    file = _write(tmp_path / name, content)
    with pytest.raises(ValueError, match=f"{name} .*({message})"):
        timm_moe.export_dense(file, tmp_path / "vit")
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("kept", [0.0001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_truncated_files(checkpoint, ewa_vit, tmp_path, kind, kept):
    file = tmp_path / f"cut.{kind}"
    if kind == "safetensors":
        save_file(ewa_vit.state_dict(), file)
    else:
        file.write_bytes(checkpoint.read_bytes())
    os.truncate(file, int(file.stat().st_size * kept))
    with pytest.raises(ValueError, match=rf"cut\.{kind} .*damaged or not"):
        timm_moe.export_dense(file, tmp_path / "vit", spec=SPEC)


def test_weights_that_do_not_match_their_checksum(checkpoint, ewa_vit, tmp_path):
    """torch.load does not look at the checksums of a checkpoint."""
    flip(checkpoint, ewa_vit.head.weight.detach())
    with pytest.raises(ValueError, match=r"model_best\.pth\.tar is damaged: head\.weight"):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": ewa_vit.state_dict()}, checkpoint)
    finally:
        torch.serialization.set_crc32_options(True)
    timm_moe.export_dense(checkpoint, tmp_path / "vit", spec=SPEC)


def test_what_the_export_does_not_need_may_be_damaged(checkpoint, tmp_path):
    """An optimizer's state is not read at all."""
    content = torch.load(checkpoint, weights_only=False)
    torch.save(
        {**content, "optimizer": {"state": {0: {"exp_avg": torch.full((1000,), 0.7)}}}}, checkpoint
    )
    expected = timm_moe.export_dense(checkpoint, tmp_path / "before").path / "model.safetensors"
    flip(checkpoint, torch.full((1000,), 0.7))
    exported = timm_moe.export_dense(checkpoint, tmp_path / "after").path / "model.safetensors"
    assert exported.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("tail", [b"PK\5\6", b"more", bytes(100)])
def test_what_follows_a_checkpoint_does_not_switch_the_checksums_off(
    checkpoint, ewa_vit, tmp_path, tail
):
    """torch.load knows an archive by its first bytes, Python's zipfile by its last."""
    flip(checkpoint, ewa_vit.head.weight.detach())
    checkpoint.write_bytes(checkpoint.read_bytes() + tail)
    with pytest.raises(ValueError, match=r"model_best\.pth\.tar is damaged"):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")


def test_damaged_arguments_of_a_checkpoint(checkpoint, tmp_path):
    """The pickle beside the tensors is verified too."""
    checkpoint.write_bytes(checkpoint.read_bytes().replace(b"crop_pct", b"crop_pcs"))
    with pytest.raises(ValueError, match=r"model_best\.pth\.tar is damaged"):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.complex64])
@pytest.mark.parametrize("kind", ["checkpoint", "folder"])
def test_weights_of_another_kind(checkpoint, ewa_vit, tmp_path, kind, dtype):
    weights = {**ewa_vit.state_dict(), "norm.weight": ewa_vit.norm.weight.detach().to(dtype)}
    source = tmp_path / "moe"
    if kind == "checkpoint":
        source = checkpoint
        torch.save(
            {**torch.load(checkpoint, weights_only=False), "state_dict": weights}, checkpoint
        )
    else:
        save_for_hf(ewa_vit, str(source), model_args=OPTIONS, safe_serialization=False)
        torch.save(weights, source / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"norm\.weight as torch\."):
        timm_moe.export_dense(source, tmp_path / "vit")


def test_another_number_of_experts_and_another_placement(ewa_vit, tmp_path):
    torch.save({"state_dict": ewa_vit.state_dict()}, tmp_path / "a.pth")
    for kwargs, message in [
        ({"num_experts": 8}, r"4 experts in blocks\.1\.mlp\.fc1\.weight, .*8"),
        ({"moe_layers": "1"}, r"size mismatch for blocks\.3\.mlp\.fc1\.weight"),
        ({"moe_layers": "1,2,3"}, r"none in blocks\.2\.mlp\.fc1\.weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            timm_moe.export_dense(
                tmp_path / "a.pth",
                tmp_path / "vit",
                spec=ModelSpec("vit_tiny_ewa_moe", 5, {**OPTIONS, **kwargs}),
            )
    assert not (tmp_path / "vit").exists()
