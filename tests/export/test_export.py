"""Export: every source, stock timm as the judge, and nothing left behind when it fails."""

import argparse
import json
import os
import pickle
import resource
import signal

import numpy as np
import pytest
import timm
import torch
from common import SMALL_VIT
from PIL import Image
from processes import run_code
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import timm_moe
from timm_moe.checkpoints.source import ModelSpec
from timm_moe.export import export as export_module
from timm_moe.export import outputs as outputs_module
from timm_moe_cli import main

OPTIONS = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}
SPEC = ModelSpec("vit_tiny_ewa_moe", 5, OPTIONS)

STOCK = """
import sys, numpy, timm, torch
model = timm.create_model("local-dir:" + sys.argv[1], pretrained=True).eval()
assert "timm_moe" not in sys.modules
assert type(model) is timm.models.vision_transformer.VisionTransformer
numpy.save(sys.argv[3], model(torch.from_numpy(numpy.load(sys.argv[2]))).detach().numpy())
"""


def stock_outputs(folder, images, tmp_path):
    """Outputs of the exported model in a process without the plugin."""
    np.save(tmp_path / "in.npy", images.numpy())
    arguments = [str(folder), str(tmp_path / "in.npy"), str(tmp_path / "out.npy")]
    done = run_code(STOCK, *arguments, autoload="0")
    assert done.returncode == 0, done.stderr
    return torch.from_numpy(np.load(tmp_path / "out.npy"))


@pytest.fixture
def checkpoint(ewa_vit, tmp_path):
    """What train.py saves."""
    args = argparse.Namespace(
        model="vit_tiny_ewa_moe", num_classes=5, model_kwargs=OPTIONS, img_size=32, mean=[0.1, 0.2, 0.3], crop_pct=0.5
    )
    ema = {name: tensor / 2 for name, tensor in ewa_vit.state_dict().items()}
    state = {"epoch": 1, "arch": args.model, "args": args, "state_dict": ewa_vit.state_dict(), "state_dict_ema": ema}
    torch.save(state, tmp_path / "model_best.pth.tar")
    return tmp_path / "model_best.pth.tar"


def test_live_model(ewa_vit, images, tmp_path):
    ewa_vit.train().blocks[0].eval()
    export = timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert ewa_vit.training
    assert ewa_vit.blocks[1].mlp.training
    assert not ewa_vit.blocks[0].training
    assert sorted(path.name for path in export.path.iterdir()) == ["config.json", "model.safetensors"]
    assert export.architecture == "vit_tiny_patch16_224"
    assert export.largest_difference == 0
    assert export.parameters == sum(tensor.numel() for tensor in load_file(export.path / "model.safetensors").values())
    assert torch.equal(stock_outputs(export.path, images, tmp_path), ewa_vit.eval()(images))
    assert sorted(os.listdir(tmp_path)) == ["in.npy", "out.npy", "vit"]
    assert (tmp_path / "vit").stat().st_mode & 0o777 == 0o777 & ~_umask()
    assert all(file.stat().st_mode & 0o777 == 0o666 & ~_umask() for file in (tmp_path / "vit").iterdir())


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_train_py_checkpoint_with_its_preprocessing(checkpoint, ewa_vit, images, tmp_path):
    export = timm_moe.export_dense(checkpoint, tmp_path / "vit")
    assert torch.equal(stock_outputs(export.path, images, tmp_path), ewa_vit.eval()(images))
    config = json.loads((export.path / "config.json").read_text())
    assert config["architecture"] == "vit_tiny_patch16_224"
    assert config["num_classes"] == 5
    assert not set(config["model_args"]) & {"num_experts", "share_rate"}
    cfg = config["pretrained_cfg"]
    assert (cfg["mean"], cfg["crop_pct"], cfg["input_size"]) == ([0.1, 0.2, 0.3], 0.5, [3, 32, 32])
    assert not cfg.get("hf_hub_id")


def test_ema_weights_on_request(checkpoint, ewa_vit, tmp_path):
    plain = timm_moe.export_dense(checkpoint, tmp_path / "plain")
    ema = timm_moe.export_dense(checkpoint, tmp_path / "ema", use_ema=True)
    plain, ema = (load_file(export.path / "model.safetensors") for export in (plain, ema))
    assert torch.equal(ema["patch_embed.proj.weight"], plain["patch_embed.proj.weight"] / 2)


def test_safetensors_file_and_local_dir(ewa_vit, images, tmp_path):
    save_file(ewa_vit.state_dict(), tmp_path / "moe.safetensors")
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    sources = {"file": (tmp_path / "moe.safetensors", SPEC), "folder": (tmp_path / "moe", None)}
    sources["name"] = f"local-dir:{tmp_path}/moe", None
    for name, (source, spec) in sources.items():
        export = timm_moe.export_dense(source, tmp_path / name, spec=spec)
        stock = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
        assert torch.equal(stock(images), ewa_vit.eval()(images))


def test_a_model_converted_in_memory(dense_vit, images, tmp_path):
    model = timm_moe.convert_to_moe(dense_vit)
    export = timm_moe.export_dense(model, tmp_path / "vit", model_args=OPTIONS)
    assert torch.equal(stock_outputs(export.path, images, tmp_path), dense_vit(images))


def test_wrapped_and_compiled_models(ewa_vit, tmp_path):
    compiled = torch.compile(ewa_vit, backend="eager")
    assert timm_moe.export_dense(compiled, tmp_path / "vit").largest_difference == 0


def test_low_precision_and_other_inputs(tmp_path):
    model = timm.create_model("vit_tiny_ewa_moe", **{**SMALL_VIT, "in_chans": 1, "img_size": 40, "global_pool": "avg"})
    timm_moe.export_dense(model.bfloat16(), tmp_path / "vit")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [1, 40, 40]
    assert load_file(tmp_path / "vit/model.safetensors")["head.weight"].dtype == torch.bfloat16


def test_a_model_changed_after_its_creation(ewa_vit, tmp_path):
    ewa_vit.reset_classifier(7)
    ewa_vit.set_input_size(48)
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert (config["num_classes"], config["pretrained_cfg"]["input_size"]) == (7, [3, 48, 48])


def test_parameters_keep_their_types(ewa_vit, tmp_path):
    ewa_vit.bfloat16().head.float()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert ewa_vit.head.weight.dtype == torch.float32
    assert ewa_vit.blocks[1].mlp.fc1.weight.dtype == torch.bfloat16


def test_small_outputs_are_compared_in_their_own_size(ewa_vit, tmp_path, monkeypatch):
    torch.nn.init.trunc_normal_(ewa_vit.head.weight, std=1e-4)
    outputs = outputs_module.outputs
    off = {True: 1.0, False: 1.01}
    monkeypatch.setattr(
        outputs_module, "outputs", lambda model, images: outputs(model, images) * off[bool(timm_moe.moe_layers(model))]
    )
    with pytest.raises(ValueError, match="outputs differ from the source's"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")


def test_dynamic_image_size_keeps_the_size_of_the_config(tmp_path):
    model = timm.create_model("vit_tiny_ewa_moe", dynamic_img_size=True, **SMALL_VIT)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 64, 64)}
    timm_moe.export_dense(model, tmp_path / "vit")
    config = json.loads((tmp_path / "vit/config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 64, 64]


def test_eval_mode_partition_is_for_analysis_and_exports_the_mean(tmp_path):
    model = timm.create_model("vit_tiny_ewa_moe", eval_mode="partition", **SMALL_VIT)
    assert timm_moe.export_dense(model, tmp_path / "vit").largest_difference == 0
    assert model.blocks[1].mlp.eval_mode == "partition"


# --- bad input


DAMAGED_FOLDERS = {
    "weights cut": lambda folder: os.truncate(folder / "model.safetensors", 1000),
    "weights empty": lambda folder: os.truncate(folder / "model.safetensors", 0),
    "weights garbage": lambda folder: (folder / "model.safetensors").write_bytes(b"garbage" * 99),
    "weights missing": lambda folder: (folder / "model.safetensors").unlink(),
    "config garbage": lambda folder: (folder / "config.json").write_text("{"),
    "config a list": lambda folder: (folder / "config.json").write_text("[]"),
    "no architecture": lambda folder: _edit(folder, lambda config: config.pop("architecture")),
    "architecture a number": lambda folder: _edit(folder, lambda config: config.update(architecture=3)),
    "unknown architecture": lambda folder: _edit(folder, lambda config: config.update(architecture="vit_nonsense")),
    "model_args a string": lambda folder: _edit(folder, lambda config: config.update(model_args="x")),
    "hostile model_args": lambda folder: _edit(folder, lambda config: config["model_args"].update(num_heads=7)),
}


def _edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("damage", DAMAGED_FOLDERS)
def test_damaged_folders(ewa_vit, tmp_path, damage):
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    DAMAGED_FOLDERS[damage](tmp_path / "moe")
    with pytest.raises(ValueError, match=r"local-dir:.*moe cannot be created from its config.json and weights: \S+"):
        timm_moe.export_dense(tmp_path / "moe", tmp_path / "vit")
    assert os.listdir(tmp_path) == ["moe"]


@pytest.mark.parametrize(
    "damage",
    [
        {"args": argparse.Namespace(model=3)},
        {"args": argparse.Namespace(model="vit_tiny_ewa_moe", model_kwargs=1.5)},
        {"state_dict": {1: torch.zeros(1)}},
        {"mean": [0.5, 0.5]},
    ],
)
def test_damaged_checkpoints(checkpoint, tmp_path, damage):
    content = torch.load(checkpoint, weights_only=False)
    if "mean" in damage:
        content["args"].mean = damage["mean"]
    else:
        content.update(damage)
    torch.save(content, checkpoint)
    with pytest.raises(
        ValueError, match=r"does not say which model|no state dict of tensors|arguments of train.py .* damaged"
    ):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")


def test_a_full_folder_is_replaced_only_when_asked(ewa_vit, tmp_path):
    (tmp_path / "vit").mkdir()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")  # an empty one is used
    (tmp_path / "vit/notes.txt").write_text("mine")
    before = (tmp_path / "vit/model.safetensors").read_bytes()
    ewa_vit.head.bias.data += 1
    with pytest.raises(FileExistsError, match="is not empty; pass --overwrite"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert (tmp_path / "vit/model.safetensors").read_bytes() == before
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", overwrite=True)
    assert (tmp_path / "vit/model.safetensors").read_bytes() != before
    assert (tmp_path / "vit/notes.txt").read_text() == "mine"


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
        ("a.pth", b"", "is damaged or not a checkpoint"),
        ("a.pth", b"not a checkpoint at all", "is damaged or not a checkpoint"),
        ("a.pth", b"\x89PNG\r\n\x1a\n" + bytes(99), "is damaged or not a checkpoint"),
        ("a.safetensors", b"not safetensors either", "is damaged or not a checkpoint"),
        ("a.safetensors", {"state_dict": {}}, "was written by torch.save and is no safetensors file: rename it"),
        ("summary.csv", b"epoch,train_loss,eval_loss\n0,4.4,4.3\n", "is damaged or not a checkpoint"),
        ("a.pth", {"state_dict": Code()}, r"runs code when it is read \(.*system\), which is refused"),
        ("a.pth", pickle.dumps(Code()), "runs code when it is read|is damaged or not a checkpoint"),
        ("a.pth", [1, 2], "holds a list, not a checkpoint"),
        ("a.pth", {"state_dict": 3}, "has no state dict of tensors"),
        (
            "a.pth",
            {"state_dict": {"x": torch.zeros(1)}},
            "does not say which model it belongs to: name it with --model",
        ),
    ],
)
def test_bad_files(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    file = _write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
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
    with pytest.raises(ValueError, match="is damaged or not a checkpoint"):
        timm_moe.export_dense(file, tmp_path / "vit", spec=SPEC)


def test_weights_that_do_not_match_their_checksum(checkpoint, ewa_vit, tmp_path):
    """torch.load does not look at the checksums of a checkpoint."""
    content, weights = bytearray(checkpoint.read_bytes()), ewa_vit.head.weight.detach().numpy().tobytes()
    content[content.index(weights) + 10] ^= 1
    checkpoint.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged: .*data/\d+ in it does not match its checksum"):
        timm_moe.export_dense(checkpoint, tmp_path / "vit")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"state_dict": ewa_vit.state_dict()}, checkpoint)
    finally:
        torch.serialization.set_crc32_options(True)
    timm_moe.export_dense(checkpoint, tmp_path / "vit", spec=SPEC)


def test_sizes_that_the_file_cannot_hold(checkpoint, ewa_vit, tmp_path):
    """Said before timm makes room for them."""
    content = torch.load(checkpoint, weights_only=False)
    for change in ({"num_classes": 10**15}, {"model_kwargs": {**OPTIONS, "depth": 10**9}}):
        args = argparse.Namespace(**{**vars(content["args"]), **change})
        torch.save({**content, "args": args}, tmp_path / "a.pth")
        with pytest.raises(ValueError, match=r"states (num_classes=1e\+15|depth=1e\+09), too much for weights of"):
            timm_moe.export_dense(tmp_path / "a.pth", tmp_path / "vit")
    save_for_hf(ewa_vit, str(tmp_path / "moe"), model_args=OPTIONS, safe_serialization=True)
    _edit(tmp_path / "moe", lambda config: config["model_args"].update(img_size=[32, 10**12]))
    with pytest.raises(ValueError, match=r"config.json states img_size=1e\+12, too much for weights of"):
        timm_moe.export_dense(tmp_path / "moe", tmp_path / "vit")


def test_a_new_model_never_stands_beside_another_ones_config(ewa_vit, tmp_path, monkeypatch):
    """Wherever an overwriting export is interrupted."""
    target, seen = tmp_path / "vit", []
    timm_moe.export_dense(ewa_vit, target)
    old = {file.name: file.read_bytes() for file in target.iterdir()}
    ewa_vit.head.bias.data += 1
    replace = os.replace

    def look_and_replace(source, destination):
        found = [file for file in target.iterdir() if not file.name.startswith(".")]
        seen.append({file.name: file.read_bytes() == old[file.name] for file in found})
        replace(source, destination)

    monkeypatch.setattr(os, "replace", look_and_replace)
    timm_moe.export_dense(ewa_vit, target, overwrite=True)
    assert seen == [{"model.safetensors": True}, {"model.safetensors": False}]


def test_another_number_of_experts_and_another_placement(ewa_vit, tmp_path):
    torch.save({"state_dict": ewa_vit.state_dict()}, tmp_path / "a.pth")
    for kwargs, message in [
        ({"num_experts": 8}, "has 4 experts in blocks.1.mlp.fc1.weight, the model has 8"),
        ({"moe_layers": "1"}, r"has 4 experts in blocks.3.mlp.fc1.weight, where the model has none: .* moe_layers"),
        ({"moe_layers": "1,2,3"}, "has experts, but none in blocks.2.mlp.fc1.weight, where the model has some"),
    ]:
        with pytest.raises(ValueError, match=message):
            timm_moe.export_dense(
                tmp_path / "a.pth", tmp_path / "vit", spec=ModelSpec("vit_tiny_ewa_moe", 5, {**OPTIONS, **kwargs})
            )
    assert not (tmp_path / "vit").exists()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(ewa_vit, tmp_path, bad):
    ewa_vit.blocks[1].mlp.fc1.weight.data[2, 0, 0] = bad
    with pytest.raises(ValueError, match=r"blocks.1.mlp.fc1.weight holds NaN or Inf; pass --allow-nonfinite"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert not (tmp_path / "vit").exists()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", allow_nonfinite=True)
    assert not load_file(tmp_path / "vit/model.safetensors")["blocks.1.mlp.fc1.weight"].isfinite().all()


@pytest.mark.parametrize("write", [timm_moe.export_dense, export_module.export_moe])
def test_outputs_that_are_not_finite(ewa_vit, tmp_path, write):
    torch.nn.init.constant_(ewa_vit.blocks[0].mlp.fc2.bias, 3e38)  # a number, which the next addition exceeds
    torch.nn.init.constant_(ewa_vit.blocks[2].mlp.fc2.bias, 3e38)
    with pytest.raises(ValueError, match="weights are finite, but its outputs on random images hold NaN or Inf"):
        write(ewa_vit, tmp_path / "vit")
    assert not (tmp_path / "vit").exists()
    write(ewa_vit, tmp_path / "vit", allow_nonfinite=True)


def test_no_nan_in_config_json(ewa_vit, tmp_path):
    with pytest.raises(ValueError, match=r"An argument of the model cannot be written to config.json: .*JSON"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit", model_args={"init_values": float("nan")})
    assert not (tmp_path / "vit").exists()


@pytest.mark.parametrize(
    ("source", "target", "error", "message"),
    [
        (
            "user/name",
            "vit",
            FileNotFoundError,
            "is neither a file nor a folder; a repository on the Hub is written hf-hub:",
        ),
        (None, "hf-hub:user/name", ValueError, "the output must be a local folder"),
        (None, "file/name", NotADirectoryError, "file is a file, so file/name cannot be made in it"),
        (None, "file", FileExistsError, "is a file; the output must be a folder"),
        ("folder", "vit", FileNotFoundError, "has no config.json"),
    ],
)
def test_names_that_do_not_fit(ewa_vit, tmp_path, monkeypatch, source, target, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=message):
        timm_moe.export_dense(source or ewa_vit, target)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_dense_model_is_written_as_it_is(dense_vit, images, tmp_path):
    # older versions of timm do not note down how a model was created
    export = timm_moe.export_dense(dense_vit, tmp_path / "vit", model_args=SMALL_VIT)
    assert export.exact
    loaded = timm.create_model(f"local-dir:{export.path}", pretrained=True).eval()
    torch.testing.assert_close(loaded(images), dense_vit(images), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no expert layers"):
        timm_moe.export_dense(dense_vit, tmp_path / "other", "svd")


def test_missing_ema(ewa_vit, tmp_path):
    torch.save({"state_dict": ewa_vit.state_dict()}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match="has no EMA weights"):
        timm_moe.export_dense(tmp_path / "a.pth", tmp_path / "vit", spec=SPEC, use_ema=True)


def test_arguments_that_stock_timm_would_need_are_asked_for(ewa_vit, tmp_path):
    ewa_vit.dense_args = {"num_classes": 5}
    with pytest.raises(ValueError, match=r"Stock timm cannot load the exported weights.*model_args"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


def test_outputs_that_differ_stop_the_export(ewa_vit, tmp_path):
    ewa_vit.head.register_forward_hook(lambda module, args, output: output + 1)  # not in the weights
    with pytest.raises(ValueError, match=r"outputs differ from the source's by 1"):
        timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(ewa_vit, tmp_path):
    """The process may write no file beyond 64 KiB, as if the disk ended there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(OSError, match="could not be written"):
            timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert os.listdir(tmp_path) == []


def test_the_expert_model_itself(tmp_path, images, capsys):
    """A folder that timm's scripts take as a teacher."""
    model = timm.create_model("widenet_b", mlp_ratio=2, official_compat=True, **SMALL_VIT).eval()
    kwargs = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"} | {"mlp_ratio": 2}
    args = argparse.Namespace(model="widenet_b", num_classes=5, model_kwargs=kwargs | {"official_compat": True})
    torch.save({"state_dict": model.state_dict(), "args": args}, tmp_path / "last.pth.tar")
    assert main(["export", "--moe", str(tmp_path / "last.pth.tar"), str(tmp_path / "teacher")]) == 0
    assert "timm with this package loads it bit for bit" in capsys.readouterr().out
    assert main(["export", "--moe", str(tmp_path / "teacher"), str(tmp_path / "again")]) == 0
    for folder in ("teacher", "again"):
        loaded = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)


def test_options_that_have_no_place(dense_vit, tmp_path, capsys):
    torch.save({"state_dict": {}, "args": argparse.Namespace(model="local-dir:gone")}, tmp_path / "a.pth.tar")
    assert main(["export", str(tmp_path / "a.pth.tar"), str(tmp_path / "vit"), "--model", "local-dir:gone"]) == 1
    assert "There is no folder gone." in capsys.readouterr().err
    assert main(["export", "--moe", str(tmp_path / "a.pth.tar"), str(tmp_path / "vit"), "--method", "svd"]) == 1
    assert "so --method and --svd-ratio have no place beside it" in capsys.readouterr().err


# --- names of the classes

NAMES = ["ant", "bee", "cat", "dog", "emu"]


def _names_in(folder):
    config = json.loads((folder / "config.json").read_text())
    assert not {"label_names", "label_descriptions"} & config["pretrained_cfg"].keys()
    return config.get("label_names"), config.get("label_descriptions")


def test_names_of_classes_go_along(ewa_vit, tmp_path):
    told = {"ant": "an insect"}
    export_module.export_moe(ewa_vit, tmp_path / "moe", OPTIONS, label_names=NAMES, label_descriptions=told)
    timm_moe.export_dense(tmp_path / "moe", tmp_path / "vit")
    timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
    for name in ("moe", "vit", "again"):
        assert _names_in(tmp_path / name) == (NAMES, told)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True)
    assert timm_moe.to_dense(loaded).pretrained_cfg["label_names"] == NAMES
    timm_moe.export_dense(loaded, tmp_path / "renamed", label_names=tuple(NAMES[::-1]))
    assert _names_in(tmp_path / "renamed") == (NAMES[::-1], None)
    timm_moe.export_dense(ewa_vit, tmp_path / "unnamed")
    assert _names_in(tmp_path / "unnamed") == (None, None)


def test_names_that_are_not_those_of_the_model(ewa_vit, tmp_path, caplog):
    for names, descriptions, message in (
        (NAMES[:4], None, "There are 4 names of classes, but the model has 5 classes"),
        ("ants!", None, "There are 1 names"),
        ([*NAMES[:4], 3], None, "The name of a class must be a text, got 3"),
        ([*NAMES[:4], ""], None, "The name of a class must be a text, got ''"),
        (NAMES, {"cow": "a mammal"}, "label_descriptions must hold texts by names of classes, got 'cow'"),
        (None, {"ant": "an insect"}, "state those too"),
    ):
        with pytest.raises(ValueError, match=message):
            timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=names, label_descriptions=descriptions)
    assert not (tmp_path / "vit").exists()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=NAMES)
    finetuned = timm.create_model(f"local-dir:{tmp_path / 'vit'}", num_classes=3)
    timm_moe.export_dense(finetuned, tmp_path / "other", model_args=OPTIONS)
    assert "left out: There are 5 names of classes, but the model has 3" in caplog.text
    assert _names_in(tmp_path / "other") == (None, None)


def test_names_by_number(ewa_vit, tmp_path):
    ewa_vit.pretrained_cfg = {**ewa_vit.pretrained_cfg, "label_names": {str(n): name for n, name in enumerate(NAMES)}}
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert _names_in(tmp_path / "vit")[0] == NAMES


def test_a_checkpoint_names_no_classes(ewa_vit, tmp_path):
    """Those of the folder that training began from may be others."""
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=NAMES)
    student = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True)
    args = argparse.Namespace(model=f"local-dir:{tmp_path / 'vit'}", num_classes=5)
    torch.save({"state_dict": student.state_dict(), "args": args}, tmp_path / "last.pth.tar")
    spec = ModelSpec(f"local-dir:{tmp_path / 'vit'}")  # no file may lead there by itself
    timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "student", spec=spec)
    assert _names_in(tmp_path / "student") == (None, None)


def test_names_from_the_training_images(checkpoint, tmp_path, capsys):
    for split, names in (("train", ["x10", "x9", "a", "b", "c"]), ("validation", ["a", "b"])):
        for name in names:
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "images" / split / name / "1.png")
    (tmp_path / "classes.txt").write_text("c\nb\na\nx9\nx10\n")
    command = ["export", str(checkpoint), "--data-dir", str(tmp_path / "images")]
    assert main([*command, str(tmp_path / "vit")]) == 0
    assert _names_in(tmp_path / "vit")[0] == ["a", "b", "c", "x9", "x10"]  # as train.py numbers them
    assert main([*command, str(tmp_path / "mapped"), "--class-map", str(tmp_path / "classes.txt")]) == 0
    assert _names_in(tmp_path / "mapped")[0] == ["c", "b", "a", "x9", "x10"]
    assert main([*command, "--moe", str(tmp_path / "moe")]) == 0
    assert _names_in(tmp_path / "moe")[0] == ["a", "b", "c", "x9", "x10"]
    capsys.readouterr()
    for options, message in (
        (["--split", "validation"], "There are 2 names of classes, but the model has 5 classes"),
        (["--split", "none"], "has no split 'none'"),
    ):
        for moe in ([], ["--moe"]):
            assert main([*command, str(tmp_path / "wrong"), *options, *moe]) == 1
            assert message in capsys.readouterr().err
    assert main(["export", str(checkpoint), str(tmp_path / "wrong"), "--class-map", "classes.txt"]) == 1
    assert "--class-map numbers the folders of --data-dir" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


# --- what config.json says of the weights


def test_the_licence_is_that_of_weights_that_training_began_from(checkpoint, ewa_vit, tmp_path):
    assert ewa_vit.pretrained_cfg["license"] == "apache-2.0"  # of weights that it never held
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained = True
    torch.save(content, tmp_path / "finetuned.pth.tar")
    content["args"].initial_checkpoint = "/home/somebody/mine.pth"
    torch.save(content, tmp_path / "mine.pth.tar")
    for source, license in (
        (ewa_vit, None),
        (checkpoint, None),
        (tmp_path / "mine.pth.tar", None),
        (tmp_path / "finetuned.pth.tar", "apache-2.0"),
    ):
        timm_moe.export_dense(source, tmp_path / "vit", overwrite=True)
        export_module.export_moe(source, tmp_path / "moe", OPTIONS, overwrite=True)
        timm_moe.export_dense(tmp_path / "moe", tmp_path / "again", overwrite=True)
        for name in ("vit", "moe", "again"):
            config = json.loads((tmp_path / name / "config.json").read_text())
            assert config["pretrained_cfg"].get("license") == license
            assert "somebody" not in json.dumps(config)


def test_a_damaged_history(ewa_vit, tmp_path):
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    for entry in (
        3, {"nonsense": 1}, {"file": 3}, {"options": {"a": []}}, {"epoch": "1"}, {"metrics": {"top1": "high"}},
        {"metrics": {"top1": float("nan")}}, {"metrics": {"[x](http://)": 1.0}}, {"base": "a\n---"}, {"experts": {}},
    ):  # fmt: skip
        _edit(tmp_path / "vit", lambda config, entry=entry: config.update(timm_moe=entry))
        refused = "it holds NaN" if "NaN" in json.dumps(entry) else r"The entry timm_moe in .*config.json is damaged"
        with pytest.raises(ValueError, match=refused):
            timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
    assert not (tmp_path / "again").exists()
