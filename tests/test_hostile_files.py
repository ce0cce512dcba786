"""Files that would lead elsewhere: every command on them, watched by Python's own auditing.

A process that opens no socket, and writes, reads and makes nothing but what the command is about, can neither fetch
nor plant anything, whatever the file states.
"""

import argparse
import json
import os
import subprocess
import sys

import pytest
import timm
import torch
from conftest import SMALL_VIT
from PIL import Image
from timm.models import save_for_hf

pytest.importorskip("torchmetrics")

OPTIONS = {name: value for name, value in SMALL_VIT.items() if name != "num_classes"}

#: Runs a command after everything is imported; what it does to files and sockets is printed, one line an event.
WATCHED = """
import json, os, sys
import huggingface_hub, timm, torch
import timm_moe, timm_moe.cli, timm_moe.evaluation, timm_moe.routes
from timm_moe.cli import main
main(["info", "vit_tiny_moe"])  # so that nothing is imported below
work, events = os.getcwd(), []
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto")
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}
CODE = ("os.system", "os.exec", "subprocess.Popen", "os.fork", "os.posix_spawn", "os.startfile")
def watch(event, arguments):
    if event in NETWORK or event in CODE:
        events.append((event, str(arguments)[:200]))
        raise PermissionError(f"{event} in a command on a hostile file")
    if event in CHANGES:
        events.append((event, os.path.abspath(os.fsdecode(arguments[0]))))
    if event in ("os.listdir", "os.scandir", "glob.glob") and arguments[0] is not None:
        if not isinstance(arguments[0], int):
            events.append(("list", os.path.abspath(os.fsdecode(arguments[0]))))
    if event == "open" and not isinstance(arguments[0], int):
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        events.append(("write" if writes else "read", os.path.abspath(os.fsdecode(path))))
sys.addaudithook(watch)
status = main(sys.argv[1:])
print("EVENTS " + json.dumps([status, events]))
"""


def routed():
    return timm.create_model("vit_tiny_moe", **SMALL_VIT)


def save_checkpoint(file, **stated):
    args = {"model": "vit_tiny_moe", "num_classes": 5, "model_kwargs": OPTIONS, **stated}
    torch.save({"state_dict": routed().state_dict(), "args": argparse.Namespace(**args), "epoch": 1}, file)
    return file


def save_folder(folder, change):
    save_for_hf(routed(), str(folder), model_args=OPTIONS, safe_serialization=True)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kwargs(**more):
    return {"model_kwargs": {**OPTIONS, **more}}


def overlay(**more):
    return lambda config: config["pretrained_cfg"].update(more)


def args(**more):
    return lambda config: config["model_args"].update(more)


URL = "http://127.0.0.1:9/evil.pth"
#: What a hostile checkpoint states for train.py's arguments, and what is said of it; None where it is of no use.
CHECKPOINTS = {
    "download": (kwargs(pretrained=True, cache_dir="{elsewhere}", pretrained_cfg={"url": URL}), "pretrained"),
    "cache": (kwargs(cache_dir="{elsewhere}"), "cache_dir"),
    "config": (kwargs(pretrained_cfg={"url": URL, "file": "{secret}"}), "pretrained_cfg"),
    "overlay": (kwargs(pretrained_cfg_overlay={"file": "{secret}"}, pretrained=True), "pretrained"),
    "another checkpoint": (kwargs(checkpoint_path="{secret}"), "checkpoint_path"),
    "strictness": (kwargs(pretrained_strict=False), "pretrained_strict"),
    "features": (kwargs(features_only=True), "features_only"),
    "a class": (kwargs(block_fn="os.system"), "block_fn"),
    "a nested value": (kwargs(patch_size={"x": [1]}), "patch_size"),
    "a long text": (kwargs(norm_layer="x" * 9999), "norm_layer"),
    "no number": (kwargs(init_values=float("nan")), "init_values"),
    "repository": ({"model": "hf-hub:nobody/nothing"}, "--model hf-hub:"),
    "old prefix": ({"model": "hf_hub:nobody/nothing"}, "--model hf-hub:"),
    "folder": ({"model": "local-dir:{elsewhere}"}, "--model local-dir:"),
    "path": ({"model": "{elsewhere}/vit_tiny_moe"}, "--model"),
    "mistyped": ({"model": "vit_tiny_mo"}, "vit_tiny_moe"),
    "classes": ({"num_classes": {"x": 1}}, "num_classes"),
    "channels": ({"in_chans": "three"}, "in_chans"),
    "mean": ({"mean": [float("nan")] * 3}, "mean"),
    "crop": ({"crop_pct": -5.0}, "crop_pct"),
    "pretrained": ({"pretrained": True, "pretrained_path": "{secret}", "initial_checkpoint": "{secret}"}, None),
    "data": ({"data_dir": "{elsewhere}", "data": "/", "train_split": "..", "resume": "{secret}"}, None),
    "teacher": ({"kd_model_name": "hf-hub:nobody/nothing", "class_map": "{secret}"}, None),
}
#: The same of a folder's config.json.
FOLDERS = {
    "url": (overlay(url=URL, custom_load=True), None),
    "file": (overlay(file="{secret}", source=""), None),
    "repository": (overlay(hf_hub_id="nobody/nothing", source="hf-hub", hf_hub_filename="x.bin"), None),
    "weights": (overlay(state_dict={"x": 1}), None),
    "architecture": (lambda config: config.update(architecture="hf-hub:nobody/nothing"), "hf-hub:nobody/nothing"),
    "architecture as folder": (lambda config: config.update(architecture="local-dir:{elsewhere}"), "local-dir:"),
    "download": (args(pretrained_cfg={"url": URL}), "pretrained_cfg"),
    "cache": (args(cache_dir="{elsewhere}"), "cache_dir"),
    "another checkpoint": (args(checkpoint_path="{secret}"), "checkpoint_path"),
    "strictness": (args(pretrained_strict=False), "pretrained_strict"),
    "a nested value": (args(patch_size=[[8]]), "patch_size"),
}
COMMANDS = {
    "export": ["export", "{source}", "out"],
    "export --moe": ["export", "--moe", "{source}", "out"],
    "evaluate": ["evaluate", "{source}", "--data-dir", "images", "--json", "out"],
    "routes": ["routes", "{source}", "--data-dir", "images", "out"],
    "benefits": ["benefits", "--student", "{source}", "--teacher", "99", "--dense", "1", "--data-dir", "images"],
    "push": ["push", "{source}", "user/vit", "--dry-run"],
    "push --moe": ["push", "--moe", "{source}", "user/vit", "--dry-run"],
    "info": ["info", "{source}"],
}


def filled(value, **names):
    """The value with its placeholders replaced, however deep they stand."""
    if isinstance(value, dict):
        return {name: filled(part, **names) for name, part in value.items()}
    if isinstance(value, list):
        return [filled(part, **names) for part in value]
    return value.format(**names) if isinstance(value, str) else value


@pytest.fixture
def work(tmp_path):
    for label in range(5):
        (tmp_path / f"work/images/validation/class{label}").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / f"work/images/validation/class{label}/0.png")
    (tmp_path / "elsewhere/train/class9").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "elsewhere/train/class9/0.png")
    torch.save(routed().state_dict(), tmp_path / "elsewhere/secret.pth")
    return tmp_path / "work"


def run_watched(work, command, source):
    """The command's exit status, its last line of errors, and what it did."""
    here = [argument.format(source=source) for argument in COMMANDS[command]]
    here += ["-j", "0", "--device", "cpu"] if "--data-dir" in here else []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(work.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", WATCHED, *here], cwd=work, env=env, capture_output=True, text=True)
    told = [line for line in done.stdout.splitlines() if line.startswith("EVENTS ")]
    assert told, done.stderr[-3000:]
    status, events = json.loads(told[-1].removeprefix("EVENTS "))
    return status, done.stderr, events


def assert_harmless(work, events):
    """No sockets, no code; written is `out` and what lies in the system's temporary folder, all else is left alone."""
    temporary = os.path.realpath(os.environ.get("TMPDIR", "/tmp"))
    for event, path in events:
        assert event in ("read", "write", "list") or event.startswith("os."), (event, path)
        assert event not in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.startfile"), (event, path)
        assert not path.startswith(str(work.parent / "elsewhere")), (event, path)
        if event != "read" and event != "list":
            ours = path.startswith((str(work / "out"), str(work / ".out"), "/dev/"))
            passing = path.startswith(temporary) and not path.startswith(str(work.parent))
            assert ours or passing, (event, path)
        assert event != "list" or path != "/", (event, path)
    assert sorted(name for name in os.listdir(work.parent) if not name.startswith("font")) == ["elsewhere", "work"]
    assert sorted(os.listdir(work.parent / "elsewhere")) == ["secret.pth", "train"]


#: Every kind of file is tried on every command in one run of the whole; here the commands take turns.
def cases(kinds):
    commands = list(COMMANDS)
    return [(kind, commands[(index + offset) % len(commands)]) for index, kind in enumerate(kinds) for offset in (0, 3)]


def check(work, command, source, message):
    names = {"elsewhere": str(work.parent / "elsewhere"), "secret": str(work.parent / "elsewhere/secret.pth")}
    status, err, events = run_watched(work, command, source)
    assert_harmless(work, events)
    assert "Traceback" not in err
    if message is None:
        assert status == 0, err
    else:
        assert status == 1
        assert message.format(**names) in err.splitlines()[-1]
        assert not (work / "out").exists()


@pytest.mark.parametrize(("kind", "command"), cases(CHECKPOINTS))
def test_what_a_checkpoint_states_leads_nowhere(work, kind, command):
    stated, message = CHECKPOINTS[kind]
    names = {"elsewhere": str(work.parent / "elsewhere"), "secret": str(work.parent / "elsewhere/secret.pth")}
    save_checkpoint(work / "last.pth.tar", **filled(stated, **names))
    check(work, command, "last.pth.tar", message)


@pytest.mark.parametrize(("kind", "command"), cases(FOLDERS))
def test_what_a_folder_states_leads_nowhere(work, kind, command):
    change, message = FOLDERS[kind]
    names = {"elsewhere": str(work.parent / "elsewhere"), "secret": str(work.parent / "elsewhere/secret.pth")}
    folder = save_folder(work / "folder", change)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(filled(config, **names)))
    check(work, command, "folder", message)
