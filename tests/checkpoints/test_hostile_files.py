"""Files that would lead elsewhere: every command on them, watched by Python's own auditing.

A process that opens no socket, and writes, reads and makes nothing but what the command is about,
can neither fetch nor plant anything, whatever the file states.
"""

import itertools
import json
import os
import tempfile

import pytest
import timm
import torch
from common import OPTIONS, SMALL_VIT, edit, save_as_train_py
from PIL import Image
from processes import run_code
from timm.models import save_for_hf

pytest.importorskip("torchmetrics")

#: Runs commands, each on its file, and prints what each did to files and sockets.
WATCHED = """
import json, os, sys
import huggingface_hub, matplotlib.figure, timm, torch
import timm_moe_cli, timm_moe.cli, timm_moe.analysis.evaluation, timm_moe.analysis.routes

NETWORK = {
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.bind",
    "socket.sendto",
}
PROCESSES = {"os.system", "os.exec", "subprocess.Popen", "os.fork", "os.posix_spawn"}
CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}
events = []

def watch(event, arguments):
    if event in NETWORK | PROCESSES:
        events.append((event, str(arguments)[:200]))
        raise PermissionError(f"{event} is forbidden")
    names = [os.fsdecode(name) for name in arguments if isinstance(name, (str, bytes, os.PathLike))]
    if event in CHANGES:
        descriptors = [number for number in arguments[1:] if isinstance(number, int)]
        folder = os.getcwd()
        # The last descriptor of these events is that of a folder.
        if event in ("os.remove", "os.rmdir", "os.mkdir") and descriptors[-1] >= 0:
            folder = os.readlink(f"/proc/self/fd/{descriptors[-1]}")
        # What a link points to is not changed.
        changed = names[1:] if event == "os.symlink" else names
        events.extend((event, os.path.abspath(os.path.join(folder, name))) for name in changed)
    elif event in ("os.listdir", "os.scandir", "open") and names:
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        events.append(("write" if writes else event, os.path.abspath(names[0])))

sys.addaudithook(watch)
for arguments in json.load(sys.stdin):
    events.clear()
    sys.stderr.flush()
    status = timm_moe_cli.main(arguments)
    sys.stderr.flush()
    print("RAN " + json.dumps([arguments, status, events]), flush=True)
    print("RAN", file=sys.stderr, flush=True)
"""


def routed():
    return timm.create_model("vit_tiny_moe", **SMALL_VIT)


def save_folder(folder, change):
    save_for_hf(routed(), str(folder), model_args=OPTIONS, safe_serialization=True)
    edit(folder, change)
    return folder


def kwargs(**more):
    return {"model_kwargs": {**OPTIONS, **more}}


def overlay(**more):
    return lambda config: config["pretrained_cfg"].update(more)


def args(**more):
    return lambda config: config["model_args"].update(more)


URL = "http://127.0.0.1:9/evil.pth"
IMAGES = ["--data-dir", "images", "-j", "0", "--device", "cpu"]
#: What a hostile checkpoint states for train.py's arguments, and what is said of it; None where it
#: is of no use.
CHECKPOINTS = {
    "download": (
        kwargs(pretrained=True, cache_dir="{elsewhere}", pretrained_cfg={"url": URL}),
        "pretrained",
    ),
    "cache": (kwargs(cache_dir="{elsewhere}"), "cache_dir"),
    "config": (kwargs(pretrained_cfg={"url": URL, "file": "{secret}"}), "pretrained_cfg"),
    "overlay": (kwargs(pretrained_cfg_overlay={"file": "{secret}"}, pretrained=True), "pretrained"),
    "another checkpoint": (kwargs(checkpoint_path="{secret}"), "checkpoint_path"),
    "strictness": (kwargs(pretrained_strict=False), "pretrained_strict"),
    "features": (kwargs(features_only=True), "features_only"),
    "a class": (kwargs(block_fn="os.system"), "block_fn"),
    "a nested value": (kwargs(patch_size={"x": [1]}), "patch_size"),
    "a long text": (kwargs(norm_layer="x" * 9999), "vit_tiny_moe cannot be created"),
    "no number": (kwargs(init_values=float("nan")), "init_values"),
    "repository": ({"model": "hf-hub:nobody/nothing"}, "--model hf-hub:"),
    "old prefix": ({"model": "hf_hub:nobody/nothing"}, "--model hf-hub:"),
    "folder": ({"model": "local-dir:{elsewhere}"}, "--model local-dir:"),
    "path": ({"model": "{elsewhere}/vit_tiny_moe"}, "--model"),
    "mistyped": ({"model": "vit_tiny_mo"}, "vit_tiny_moe"),
    "classes": ({"num_classes": {"x": 1}}, "num_classes"),
    "channels": ({"in_chans": "three"}, "vit_tiny_moe cannot be created"),
    "mean": ({"mean": [float("nan")] * 3}, "mean"),
    "crop": ({"crop_pct": -5.0}, "crop_pct"),
    "pretrained": (
        {"pretrained": True, "pretrained_path": "{secret}", "initial_checkpoint": "{secret}"},
        None,
    ),
    "data": (
        {"data_dir": "{elsewhere}", "data": "/", "train_split": "..", "resume": "{secret}"},
        None,
    ),
    "teacher": ({"kd_model_name": "hf-hub:nobody/nothing", "class_map": "{secret}"}, None),
}
#: The same of a folder's config.json.
FOLDERS = {
    "url": (overlay(url=URL, custom_load=True), None),
    "file": (overlay(file="{secret}", source=""), None),
    "repository": (
        overlay(hf_hub_id="nobody/nothing", source="hf-hub", hf_hub_filename="x.bin"),
        None,
    ),
    "weights": (overlay(state_dict={"x": 1}), None),
    "architecture": (
        lambda config: config.update(architecture="hf-hub:nobody/nothing"),
        "hf-hub:nobody/nothing",
    ),
    "architecture as folder": (
        lambda config: config.update(architecture="local-dir:{elsewhere}"),
        "local-dir:",
    ),
    "download": (args(pretrained_cfg={"url": URL}), "pretrained_cfg"),
    "cache": (args(cache_dir="{elsewhere}"), "cache_dir"),
    "another checkpoint": (args(checkpoint_path="{secret}"), "checkpoint_path"),
    "strictness": (args(pretrained_strict=False), "pretrained_strict"),
    "a nested value": (args(patch_size=[[8]]), "patch_size"),
}
COMMANDS = {
    "export": ["export", "{source}", "{out}"],
    "export --moe": ["export", "--moe", "{source}", "{out}"],
    "evaluate": ["evaluate", "{source}", "--json", "{out}", *IMAGES],
    "routes": ["routes", "{source}", "{out}", *IMAGES],
    "benefits": ["benefits", "--teacher", "{source}", "--student", "99", "--dense", "1", *IMAGES],
    "push": ["push", "{source}", "user/vit", "--dry-run"],
    "push --moe": ["push", "--moe", "{source}", "user/vit", "--dry-run"],
    "info": ["info", "{source}"],
}
CASES = {
    **{f"{kind} in a checkpoint": message for kind, (_, message) in CHECKPOINTS.items()},
    **{f"{kind} in a folder": message for kind, (_, message) in FOLDERS.items()},
}
#: Each case with one command, each command with several cases; the other pairs are tested in CI.
FIRST = list(zip(CASES, itertools.cycle(COMMANDS), strict=False))
PAIRS = [
    pytest.param(pair, marks=[] if pair in FIRST else pytest.mark.ci, id="-".join(pair))
    for pair in itertools.product(CASES, COMMANDS)
]


def filled(value, places):
    """The value with its placeholders replaced, however deep they stand."""
    if isinstance(value, dict):
        return {name: filled(part, places) for name, part in value.items()}
    if isinstance(value, list):
        return [filled(part, places) for part in value]
    return value.format(**places) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    for label in range(5):
        (root / f"work/images/validation/class{label}").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / f"work/images/validation/class{label}/0.png")
    (root / "elsewhere/train/class9").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(root / "elsewhere/train/class9/0.png")
    torch.save(routed().state_dict(), root / "elsewhere/secret.pth")
    return root


@pytest.fixture(scope="module")
def places(root):
    return {"elsewhere": str(root / "elsewhere"), "secret": str(root / "elsewhere/secret.pth")}


@pytest.fixture(scope="module")
def runs(request, root, places):
    """Of each command on each file that is to be tested: exit status, errors and what it did."""
    work, torch_state = root / "work", torch.random.get_rng_state()
    sources = {}
    for kind, (stated, _) in CHECKPOINTS.items():
        file = save_as_train_py(
            work / f"{kind}.pth", routed(), "vit_tiny_moe", **filled(stated, places)
        )
        sources[f"{kind} in a checkpoint"] = file.name
    for kind, (change, _) in FOLDERS.items():
        file = save_folder(work / kind, change) / "config.json"
        file.write_text(json.dumps(filled(json.loads(file.read_text()), places)))
        sources[f"{kind} in a folder"] = kind
    torch.random.set_rng_state(torch_state)
    pairs = [
        item.callspec.params["pair"]
        for item in request.session.items
        if "runs" in item.fixturenames
    ]
    ran = [
        [
            argument.format(source=sources[case], out=f"out-{case}-{command}")
            for argument in COMMANDS[command]
        ]
        for case, command in pairs
    ]
    before = everything_in(root)
    done = run_code(
        WATCHED, cwd=work, input=json.dumps(ran), MPLCONFIGDIR=str(work / "out-matplotlib")
    )
    told = [
        line.removeprefix("RAN ") for line in done.stdout.splitlines() if line.startswith("RAN ")
    ]
    assert len(told) == len(ran), done.stderr[-3000:]
    assert everything_in(root) == before
    results = [json.loads(line)[1:] for line in told]
    return dict(zip(pairs, zip(results, done.stderr.split("RAN\n")[:-1], strict=True), strict=True))


def everything_in(root):
    """All files but the outputs, with their contents."""
    files = (
        file for file in root.rglob("*") if not str(file.relative_to(root)).startswith("work/out-")
    )
    return {str(file): file.read_bytes() if file.is_file() else None for file in files}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.first_case
def test_what_a_file_states_leads_nowhere(runs, root, places, pair):
    case, command = pair
    (status, events), err = runs[pair]
    temporary = os.path.realpath(tempfile.gettempdir())
    for event, path in events:
        assert not event.startswith(
            ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix")
        ), path
        assert not path.startswith(places["elsewhere"]), (event, path)
        assert path != "/", event
        if event not in ("open", "os.listdir", "os.scandir"):  # it changes something
            own = path.startswith((str(root / "work/out-"), str(root / "work/.out-"), "/dev/null"))
            passing = path.startswith(temporary) and not path.startswith(str(root))
            # A folder that is removed at once: can outputs be made here?
            is_trial = path == str(root / "work/.timm_moe.trial")
            assert own or passing or is_trial, (event, path)
    assert "Traceback" not in err
    assert status == (CASES[case] is not None), err
    if status:
        assert CASES[case].format(**places) in err.splitlines()[-1]
        assert not (root / f"work/out-{case}-{command}").exists()
