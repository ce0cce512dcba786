"""The command line: what it prints, and one sentence instead of a traceback."""

import os
import re
import runpy
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
import timm
import torch
from common import ROOT, SMALL_VIT, SMALL_VIT_KWARGS, make_model, write_images
from safetensors.torch import save_file
from torch import nn

import timm_moe
from timm_moe.analysis.info import activation_bytes, byte_text, model_info
from timm_moe.convert.expert_layers import parameters
from timm_moe_cli import main, parser


def test_all_public_names_are_there():
    """Names that are imported at first use are listed too."""
    for name in timm_moe.__all__:
        getattr(timm_moe, name)
    assert "export_dense" in dir(timm_moe)  # so that a shell completes it


def test_list(capsys):
    assert main(["list"]) == 0
    names = capsys.readouterr().out.split()
    assert {
        "vit_tiny_ewa_moe",
        "vit_small_ewa_moe",
        "vit_base_ewa_moe",
        "vit_large_ewa_moe",
        "vit_xtiny_ewa_moe",
        "vit_tiny_moe",
        "vmoe_s32",
        "vmoe_h14",
    } <= set(names)
    assert "vit_small_patch16_224" not in names
    main(["list", "*small*", "--pretrained"])
    assert "vit_small_ewa_moe.augreg_in21k_ft_in1k" in capsys.readouterr().out.split()


def test_info(capsys):
    assert main(["info", "vit_small_ewa_moe"]) == 0
    out = capsys.readouterr().out
    assert "parameters, exported   22,050,664" in out  # ViT-S/16
    assert "parameters, activated  22,050,664 per token" in out
    assert "parameters, training   43,318,888" in out  # 6 layers x 3 more experts of 2DH + H + D
    assert "4 in each of 6 layers, the model has 12 blocks" in out
    assert "blocks.1.mlp, blocks.3.mlp" in out
    assert "GMACs" in out


def test_info_of_a_dense_model_and_its_expert_form_side_by_side(capsys):
    assert main(["info", "vit_small_patch16_224", "vit_small_ewa_moe"]) == 0
    out = capsys.readouterr().out
    lines = [re.split(r"  +", line.strip()) for line in out.splitlines()]
    assert lines[0] == ["vit_small_patch16_224", "vit_small_ewa_moe"]
    cells = {line[0]: line[1:] for line in lines[1:]}
    assert cells["parameters, training"] == ["22,050,664", "43,318,888"]
    assert cells["parameters, exported"] == ["-", "22,050,664"]
    assert cells["experts"][0] == "none"
    assert cells["weights, training"] == cells["gradients"] == ["88 MB", "173 MB"]
    assert cells["AdamW's moments"] == ["176 MB", "347 MB"]
    assert cells["train.py's checkpoint"] == ["265 MB", "520 MB"]
    assert cells["exported file"] == ["88 MB", "88 MB"]
    assert cells["evaluation"] == 2 * ["9.198 GFLOPs per image (4.599 GMACs)"]
    assert max(map(len, out.splitlines())) < 120


def test_the_cost_of_a_tiny_model_is_in_millions(capsys):
    options = ["--model-kwargs", "img_size=32", "patch_size=8", "embed_dim=32", "depth=2"]
    assert main(["info", "vit_tiny_ewa_moe", *options, "num_heads=2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"evaluation +1\.\d+ MFLOPs per image \(0\.\d+ MMACs\)", out)
    assert "weights, training      361 kB" in out


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_tiny_ewa_moe", "vit_tiny_moe"])
@pytest.mark.first_case
def test_sizes_are_those_of_a_training(name, tmp_path, capsys):
    """As torch allocates and writes them, after a step of AdamW."""
    model = timm.create_model(name, **SMALL_VIT)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(8, 3, 32, 32)
    (model(images).sum() + timm_moe.auxiliary_loss(model)).backward()
    optimizer.step()
    file = tmp_path / "last.pth.tar"
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    info = model_info(name, **SMALL_VIT)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    assert sum(each.nbytes for each in held) == pytest.approx(16 * info.total, rel=0.01)
    assert file.stat().st_size == pytest.approx(12 * info.total, rel=0.2)  # names weigh here
    one, two = (activation_bytes(model, batch) for batch in (8, 16))
    assert 1.8 * one < two < 2.2 * one
    assert (
        main(
            [
                "info",
                name,
                "--batch",
                "8",
                "--num-classes",
                "5",
                "--model-kwargs",
                *SMALL_VIT_KWARGS,
            ]
        )
        == 0
    )
    assert f"activations            {byte_text(one)[0]}" in capsys.readouterr().out


def test_activations_of_linear_layers_by_hand(monkeypatch):
    """Of two linear layers and a GELU the inputs are kept, each once."""
    monkeypatch.setattr("timm_moe.analysis.info.model_input_size", lambda model: (3, 4, 4))
    model = nn.Sequential(nn.Flatten(1), nn.Linear(48, 10), nn.GELU(), nn.Linear(10, 5))
    assert activation_bytes(model, 6) == 4 * 6 * (48 + 10 + 10)


def test_info_takes_options(capsys):
    assert (
        main(
            [
                "info",
                "vit_small_ewa_moe",
                "--num-classes",
                "10",
                "--model-kwargs",
                "num_experts=8",
                "moe_layers=last-2",
            ]
        )
        == 0
    )
    assert "8 in each of 2 layers" in capsys.readouterr().out


def test_info_of_shared_experts(capsys):
    assert main(["info", "widenet_b"]) == 0
    out = capsys.readouterr().out
    assert "4 in one layer, the model has 12 blocks, a token takes 2" in out
    assert main(["info", "ones_b"]) == 0
    assert "experts                none" in capsys.readouterr().out


def test_info_of_routed_experts(capsys):
    assert main(["info", "vmoe_b16"]) == 0
    out = capsys.readouterr().out
    assert "32 in each of 2 layers, the model has 12 blocks, a token takes 2" in out
    assert "parameters, training   379,407,592" in out
    # ViT-B/16 and, in 2 layers, 1 more expert of 2DH + H + D and a router of 32 x 768
    assert (
        f"parameters, activated  {86_567_656 + 2 * (2 * 768 * 3072 + 3072 + 768 + 32 * 768):,} per "
        "token" in out
    )
    assert "parameters, exported" not in out
    macs = 2 * 197 * (2 * 768 * 3072 + 32 * 768) / 1e9  # of these on top of ViT-B/16's
    main(["info", "vit_base_ewa_moe"])
    both = out + capsys.readouterr().out
    routed, dense = (float(number) for number in re.findall(r"\(([\d.]+) GMACs", both))
    assert routed - dense == pytest.approx(macs, abs=0.002)


def export_of(model, name, folder, *options):
    """Return the arguments that export a model's weights, which do not say what they are of."""
    save_file(model.state_dict(), folder / "moe.safetensors")
    stated = ["--model", name, "--num-classes", "5", "--model-kwargs", *SMALL_VIT_KWARGS]
    return ["export", str(folder / "moe.safetensors"), str(folder / "vit"), *options, *stated]


def test_export_of_routed_experts_says_that_it_is_another_model(tmp_path, capsys):
    model = timm.create_model("vit_tiny_moe", **SMALL_VIT)
    assert main(export_of(model, "vit_tiny_moe", tmp_path)) == 0
    out = capsys.readouterr().out
    assert "equal the outputs of the dense network made of the experts." in out
    assert (
        "It is not the model that was trained: validate it, or train it further, before you use it."
        in out
    )


def test_export(ewa_vit, tmp_path, capsys):
    assert main(export_of(ewa_vit, "vit_tiny_ewa_moe", tmp_path)) == 0
    out = capsys.readouterr().out
    assert "Exported vit_tiny_patch16_224 with" in out
    checked = "Checked: stock timm loads it, and its outputs on random images equal the source"
    assert checked in out
    assert (tmp_path / "vit/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["info", "vit_small_ewa_moe", "--model-kwargs", "moe_layers=odd"],
            "moe_layers must be 'every-n'",
        ),
        (
            ["info", "vmoe_b16", "--model-kwargs", "num_expert=8"],
            "'num_expert'; did you mean num_experts?",
        ),
        (
            ["info", "vit_small_ewa_moe", "--model-kwargs", "act_layer=nonsense"],
            "KeyError 'nonsense'",
        ),
        (["info", "no_such_model"], "Unknown model (no_such_model)"),
        (["info", "vit_small_patch16_224", "--batch", "0"], "--batch must"),
        (["list", "small"], "matches 'small'"),
        (["export", "missing.pth", "out"], "missing.pth is neither"),
        (["export", "missing.pth", "out", "--method", "best"], "method must be one of average"),
        pytest.param(["demo", "--epochs", "0"], "epochs must", marks=pytest.mark.ci),
    ],
)
def test_errors_are_one_sentence(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("timm-moe: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert os.listdir(tmp_path) == []


def test_debug_tells_where_an_error_arose(capsys):
    assert main(["--debug", "list", "small"]) == 1
    *trace, told = capsys.readouterr().err.splitlines()
    assert trace[:1] == ["Traceback (most recent call last):"]
    assert trace[-1].startswith("ValueError: No model of timm_moe matches 'small'")
    assert told.startswith("timm-moe: error: No model of timm_moe matches 'small'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "vit_small_ewa_moe", "--model-kwargs", "foo"],
        ["export", "only-one"],
        [],
    ],
)
def test_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "timm-moe" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate", "moe", "--data-dir", "images", "--json", ""], "--json"),
        (["evaluate", "moe", "--data-dir", "images", "--ood-split", "test"], "--ood-split"),
        (["evaluate", "a.pth", "--data-dir", "images", "--json", "a.pth", "--overwrite"], "a.pth"),
        (
            ["evaluate", "moe", "--data-dir", "images", "--json", "moe/config.json", "--overwrite"],
            "belongs to moe",
        ),
        (["routes", "moe", "out", "--data-dir", "images", "--threshold", "nan"], "--threshold"),
        (["routes", "moe", "out", "--data-dir", "images", "--threshold", "25"], "--threshold"),
        (["routes", "moe", "", "--data-dir", "images"], "empty"),
        (["report", "moe", "", "--data-dir", "images"], "empty"),
        (["evaluate", "moe", "--data-dir", "images", "--json", "-"], "--json"),
        (["info", "vit_tiny_moe", "--model", "vmoe_s32"], "--model"),
        (["export", "a.pth", ""], "empty"),
        (["export", "moe", "moe", "--overwrite"], "belongs to moe"),
    ],
)
def test_no_option_is_dropped_and_nothing_that_is_read_is_replaced(
    tmp_path, monkeypatch, capsys, arguments, named
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images/validation/a").mkdir(parents=True)
    (tmp_path / "moe").mkdir()
    for file in ("a.pth", "moe/config.json"):
        (tmp_path / file).write_text("what is read")
    assert main(arguments) == 1
    assert named in capsys.readouterr().err.splitlines()[-1]
    assert (
        (tmp_path / "a.pth").read_text()
        == (tmp_path / "moe/config.json").read_text()
        == "what is read"
    )


def test_shots_are_not_tested_on(tmp_path, capsys):
    write_images(tmp_path, {"train": 2})
    data = ["--data-dir", str(tmp_path)]
    (tmp_path / "same").symlink_to(tmp_path / "train")
    for split in ("train", "./train", "same"):
        assert main(["fewshot", "a.pth", *data, "--split", split]) == 1
        assert "--split and --train-split are one folder" in capsys.readouterr().err


def test_a_list_that_is_stated_twice_is_one_list():
    command = ["fewshot", "a", "--data-dir", "x", "--data-dir", "y"]
    args = parser().parse_args([*command, "--model-kwargs", "a=1", "--model-kwargs", "b=2"])
    assert (args.data_dir, args.model_kwargs) == (["x", "y"], ["a=1", "b=2"])
    assert parser().parse_args(command[:4]).model_kwargs == []


def test_sizes_of_a_folder_that_is_called_as_a_model(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    timm_moe.export_dense(make_model("vit_tiny_ewa_moe"), "vit_tiny_patch16_224")
    assert main(["info", "vit_tiny_patch16_224"]) == 0
    assert "5,717,416" in capsys.readouterr().out
    assert "vit_tiny_patch16_224 is the registered model here; the folder is ./vit" in caplog.text
    assert main(["info", "./vit_tiny_patch16_224", "vit_tiny_patch16_224"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.split() == ["./vit_tiny_patch16_224", "vit_tiny_patch16_224"]


def test_sizes_of_a_file_that_is_called_as_a_model(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.chdir(tmp_path)
    model = timm.create_model("vit_tiny_ewa_moe", num_classes=5)
    save_file(model.state_dict(), "vit_tiny_ewa_moe.safetensors")
    options = ["--model", "vit_tiny_ewa_moe", "--num-classes", "5"]
    assert main(["info", "vit_tiny_ewa_moe.safetensors", *options]) == 0
    assert f"{parameters(model):,}" in capsys.readouterr().out
    assert "registered model" not in caplog.text


def test_the_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"timm_moe {timm_moe.__version__}\n"


def test_the_installed_command_and_its_help():
    command = shutil.which("timm-moe", path=os.path.dirname(sys.executable))
    assert command, "timm-moe is not installed beside this Python"
    done = subprocess.run([command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert {"demo", "export", "list", "info"} <= set(done.stdout.split())


def test_the_package_is_the_command_too(monkeypatch, capsys):
    """``python -m timm_moe`` is for where the command is not on the PATH."""
    monkeypatch.setattr(sys, "argv", ["timm_moe", "export", "nothing.pth", "out"])
    with pytest.raises(SystemExit) as done:
        runpy.run_module("timm_moe", run_name="__main__")
    assert done.value.code == 1
    assert "nothing.pth is neither a file nor a folder" in capsys.readouterr().err


@pytest.mark.ci
def test_closed_streams_are_no_error():
    code = "import sys, timm_moe_cli; sys.exit(timm_moe_cli.main(['info', 'vit_xtiny_moe']))"
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("vit_xtiny_moe\n")


def test_an_interrupt_amid_imports_is_no_traceback(monkeypatch, capsys):
    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "timm_moe.cli", Interrupted("timm_moe.cli"))
    assert main(["list"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_demo_needs_a_folder(tmp_path, capsys):
    pytest.importorskip("sklearn")
    (tmp_path / "demo").touch()
    assert main(["demo", "--output", str(tmp_path / "demo")]) == 1
    assert "demo is a file; the output must be a folder." in capsys.readouterr().err


@pytest.mark.ci
def test_demo(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert main(["demo", "--output", str(tmp_path / "demo"), "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "Epoch 2 of 2: dense " in out  # progress without a terminal
    assert "500 of 500 predictions are the same, largest difference of an output 0" in out
    assert "parameters after export            136,138       136,138" in out
    assert (tmp_path / "demo/training.png").stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "demo/exported").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
