"""Damaged and hostile inputs for every command that reads files; see docs/compatibility.md.

    python tests/stress/damage.py --number 1000 --seed 0

Each case takes a fresh copy of intact files, damages it, and runs the command in a process of its own, forked from this
one, which has imported everything. A table tells how they ended:

- refused: exit status 1 and one sentence;
- harmless: success, and the result is that of the intact files bit for bit;
- other: success with another result, where the format gives no means of telling (weights without checksum, a
  config.json that states another valid option);
- FAILED: anything else. The process died of a signal, ran into the time limit, took too much memory, ran code of the
  file, reached for the network or for paths that a file names, ended in a traceback, left files behind, changed what
  was there before, or gave another result where the damage can be told.
"""

import argparse
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import timm_moe
from timm_moe.analysis import evaluation, routes  # noqa: F401  (imported before the forks)
from timm_moe_cli import main

#: Seconds and bytes that a command may take on the tiny files, beyond what this process has before.
TIME_LIMIT, MEMORY_LIMIT = 20, 400 << 20
#: What no command may reach even where memory is claimed that is never touched.
ADDRESS_SPACE = 64 << 30

#: Appears if code of a file is run.
MARKER = "it-ran"
#: A file beside a case's folder that no command has any business with.
SECRET = "secret.pth"
#: Exit status of a process that reached for the network, that file, or wrote elsewhere.
TRESPASS = 99
VIT = dict(img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2)
VMOE = Path(__file__).parent.parent / "data/vmoe"


class Code:
    """Its pickle creates the marker when it is loaded."""

    CALLS = (
        (os.system, (f"touch {MARKER}",)),
        (exec, (f"open({MARKER!r}, 'w')",)),
        (eval, (f"open({MARKER!r}, 'w')",)),
        (open, (MARKER, "w")),
        (os.mkdir, (MARKER,)),
    )

    def __init__(self, call: tuple[Callable, tuple]):
        self.call = call

    def __reduce__(self):
        return self.call


@dataclass
class Case:
    """A command, what to do to its input first, and what in its result may differ though it succeeds.

    "": nothing, since the format has the means to tell; "all"; or "config": all but the weights, which stayed intact.
    """

    arguments: list[str]
    damage: Callable[[Path, random.Random], None]
    other: str = ""


# --- intact files


def make_originals(folder: Path) -> None:
    """Everything that a command reads, tiny."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_ewa_moe", num_classes=3, **VIT)
    optimizer = torch.optim.AdamW(model.parameters())
    timm_moe.ExpertWeightAveraging(model, optimizer, total_updates=9)
    model.train()(torch.randn(4, 3, 16, 16)).square().mean().backward()
    optimizer.step()
    _save_checkpoint(folder / "last.pth.tar", model, "vit_tiny_ewa_moe", optimizer=optimizer.state_dict())
    _save_checkpoint(folder / "legacy.pth", model, "vit_tiny_ewa_moe", zipped=False)
    save_file(model.state_dict(), folder / "weights.safetensors")
    routed = timm.create_model("vit_tiny_moe", num_classes=3, **VIT)
    _save_checkpoint(folder / "routed.pth.tar", routed, "vit_tiny_moe")
    run(["export", "--moe", "routed.pth.tar", "folder"], folder)
    for file in VMOE.glob("vmoe_tiny.*"):
        shutil.copy(file, folder)
    noise = np.random.default_rng(0)
    for name in ("a", "b", "c"):
        (folder / "images/test" / name).mkdir(parents=True)
        for index in range(3):
            image = Image.fromarray(noise.integers(0, 255, (16, 16, 3), np.uint8))
            image.save(folder / f"images/test/{name}/{index}.{'png' if index else 'jpg'}")
    (folder / "classes.txt").write_text("a\nb\nc\n")


def _save_checkpoint(file: Path, model, name: str, zipped: bool = True, **more) -> None:
    args = argparse.Namespace(model=name, num_classes=3, model_kwargs=dict(VIT), mean=[0.5] * 3, epochs=3, opt="adamw")
    state = {"epoch": 1, "arch": name, "args": args, "state_dict": model.state_dict(), **more}
    torch.save(state, file, _use_new_zipfile_serialization=zipped)


# --- damages of bytes


def cut(file: Path, rng: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, rng.choice([0, 1, 8, rng.randrange(size), rng.randrange(size), size - 1]))


def flip(file: Path, rng: random.Random) -> None:
    """One to eight bytes, anywhere or where the format says what it holds: its head and its tail."""
    content = bytearray(file.read_bytes())
    low, high = rng.choice([(0, len(content)), (0, min(600, len(content))), (max(0, len(content) - 600), len(content))])
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(low, high)] ^= rng.randrange(1, 256)
    file.write_bytes(content)


def overwrite(file: Path, rng: random.Random) -> None:
    """A stretch of zeros or noise, or one that is missing or there twice."""
    content = file.read_bytes()
    start = rng.randrange(len(content))
    length = rng.choice([1, 16, 512, 4096])
    between = rng.choice([bytes(length), rng.randbytes(length), b"", content[start : start + length] * 2])
    file.write_bytes(content[:start] + between + content[start + length :])


def nonsense(file: Path, rng: random.Random) -> None:
    """Another kind of file altogether."""
    size = file.stat().st_size
    png = b"\x89PNG\r\n\x1a\n" + rng.randbytes(99)
    file.write_bytes(
        rng.choice([rng.randbytes(size), bytes(size), b"PK\x03\x04" + rng.randbytes(size), png, b"{}", b"[]"])
    )


def of_file(name: str, damage: Callable[[Path, random.Random], None]) -> Callable[[Path, random.Random], None]:
    return lambda folder, rng: damage(folder / name, rng)


# --- damages of contents

#: Values that no field of a config or checkpoint expects.
HOSTILE = (
    None, True, -1, 0, 7, 1.5, 1e300, 10**8, 10**9, 10**15, 10**30, "", "x", "../../../etc/passwd", "/dev/zero",
    "\x00", "é" * 9, f"__import__('os').system('touch {MARKER}')", f"$(touch {MARKER})", "hf-hub:nobody/nothing",
    "local-dir:/dev", "%s" * 9, "x" * 99999, [], [0], [1, 2, 3], [10**9] * 3, [[]], {}, {"x": {}}, {"file": "evil.pth"},
)  # fmt: skip


def _hostile(rng: random.Random):
    return rng.choice(HOSTILE)


def _change_somewhere(tree: dict, rng: random.Random) -> None:
    """Remove, retype or replace a value of a nested dictionary, or add one."""
    places = [(tree, key) for key in tree]
    places += [(child, key) for child in tree.values() if isinstance(child, dict) for key in child]
    holder, key = rng.choice(places)
    action = rng.choice(["remove", "replace", "replace", "replace", "add", "text"])
    if action == "remove":
        del holder[key]
    elif action == "add":
        holder[rng.choice(["checkpoint_path", "pretrained_cfg", "num_experts", "url", "file", "custom_load"])] = (
            _hostile(rng)
        )
    else:
        holder[key] = str(holder[key]) if action == "text" else _hostile(rng)


def hostile_config(folder: Path, rng: random.Random) -> None:
    file = folder / "folder/config.json"
    config = json.loads(file.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        _change_somewhere(config, rng)
    file.write_text(json.dumps(config))


def false_config(folder: Path, rng: random.Random) -> None:
    """A config.json that no longer is that of the weights, or states what preprocessing cannot be."""
    file = folder / "folder/config.json"
    config = json.loads(file.read_text())
    args = config["model_args"]
    rng.choice([
        lambda: (config.update(num_classes=8), args.update(num_classes=8)),
        lambda: (config.update(num_classes=2), args.update(num_classes=2)),
        lambda: args.update(pretrained_strict=False, num_classes=8),
        lambda: args.update(pretrained_strict=False, depth=5),
        lambda: args.update(img_size=24),
        lambda: args.update(depth=5),
        lambda: args.update(depth=3),
        lambda: args.update(patch_size=7),
        lambda: config["pretrained_cfg"].update(mean=[1e300] * 3),
        lambda: config["pretrained_cfg"].update(crop_mode=" "),
        lambda: config["pretrained_cfg"].update(mean=[float("nan")] * 3),
        lambda: config["pretrained_cfg"].update(std=[0, 0, 0]),
        lambda: config["pretrained_cfg"].update(std=[-1, 1, 1]),
        lambda: config["pretrained_cfg"].update(crop_pct=-5),
        lambda: config["pretrained_cfg"].update(crop_pct=float("inf")),
        lambda: config["pretrained_cfg"].update(input_size=[3, 999, 999]),
    ])()  # fmt: skip
    file.write_text(json.dumps(config))


def folder_for_file(name: str) -> Callable[[Path, random.Random], None]:
    """An output of which a file's name is taken by a folder."""

    def damage(folder: Path, rng: random.Random) -> None:
        shutil.copytree(folder / "folder", folder / "out")
        (folder / "out" / name).unlink()
        (folder / "out" / name).mkdir()

    return damage


def hostile_args(file: Path, rng: random.Random) -> None:
    """Fields of a checkpoint, those of train.py's arguments among them."""
    checkpoint = torch.load(file, weights_only=False)
    content = {**checkpoint, "args": vars(checkpoint["args"])}
    target = rng.choice([content, content["args"], content["args"], {"model_kwargs": content["args"]["model_kwargs"]}])
    _change_somewhere(target, rng)
    if isinstance(content.get("args"), dict):
        content["args"] = argparse.Namespace(**{str(key): value for key, value in content["args"].items()})
    torch.save(content, file)


def hostile_tensors(file: Path, rng: random.Random) -> None:
    """Weights that are not those of the model: other shapes, types, names, missing, not dense."""
    checkpoint = torch.load(file, weights_only=False)
    weights = checkpoint["state_dict"]
    name = rng.choice(list(weights))
    tensor = weights[name]
    replacement = rng.choice([
        None, 3, tensor[:1], tensor.flatten(), tensor.new_zeros(0), tensor.new_zeros(()), torch.zeros(1).expand(10**12),
        tensor.to_sparse(), torch.empty(tensor.shape, device="meta"), tensor.bool(), tensor.to(torch.complex64),
        torch.full_like(tensor, float("nan")), [tensor], tensor.unsqueeze(0), {"x": tensor},
    ])  # fmt: skip
    if replacement is None:
        del weights[name]
    else:
        weights[rng.choice([name, name, name, f"{name}x"])] = replacement
    torch.save(checkpoint, file)


def reaching_args(name: str) -> Callable[[Path, random.Random], None]:
    """Arguments of train.py with which timm would make requests, or read and write other paths."""

    def damage(folder: Path, rng: random.Random) -> None:
        checkpoint = torch.load(folder / name, weights_only=False)
        args = checkpoint["args"]
        secret = str(folder.parent / SECRET)
        cfgs = (
            {"url": "http://127.0.0.1:9/weights.pth"}, {"url": f"file://{secret}"}, {"file": secret},
            {"hf_hub_id": "nobody/nothing"}, {"url": f"file://{secret}", "custom_load": True},
        )  # fmt: skip
        kwargs = rng.choice([
            *({"pretrained": True, "cache_dir": str(folder.parent / "planted"), "pretrained_cfg": cfg} for cfg in cfgs),
            *({"pretrained": True, "pretrained_cfg_overlay": cfg} for cfg in cfgs),
            {"checkpoint_path": secret}, {"pretrained": True}, {"cache_dir": str(folder.parent / "planted")},
        ])  # fmt: skip
        rng.choice([
            lambda: args.model_kwargs.update(kwargs),
            lambda: args.model_kwargs.update(kwargs),
            lambda: setattr(args, "model", rng.choice(["hf-hub:nobody/nothing", f"local-dir:{folder.parent}"])),
            lambda: vars(args).update(data_dir="/", train_split="usr", initial_checkpoint=secret),
        ])()  # fmt: skip
        torch.save(checkpoint, folder / name)

    return damage


def code(name: str) -> Callable[[Path, random.Random], None]:
    """A pickle that runs code, under any name."""

    def write(folder: Path, rng: random.Random) -> None:
        payload = Code(rng.choice(Code.CALLS))
        where = rng.choice(["all", "state_dict", "args", "tensor", "key"])
        content = payload if where == "all" else torch.load(folder / "last.pth.tar", weights_only=False)
        if where in ("state_dict", "args"):
            content[where] = payload
        elif where == "tensor":
            content["state_dict"]["head.bias"] = payload
        elif where == "key":
            content[payload] = 0
        if rng.random() < 0.3:
            (folder / name).write_bytes(pickle.dumps(content, rng.choice([0, 2, 4])))
        else:
            torch.save(content, folder / name, _use_new_zipfile_serialization=rng.random() < 0.5)

    return write


def code_in_folder(folder: Path, rng: random.Random) -> None:
    for file in (folder / "folder").glob("*.safetensors"):
        file.unlink()
    name = rng.choice(["model.safetensors", "pytorch_model.bin", "model.pth", "any.pth", "any.bin", "x.pth.tar"])
    code(f"folder/{name}")(folder, rng)


def lying_header(name: str) -> Callable[[Path, random.Random], None]:
    """A safetensors header that claims what is not so."""

    def damage(folder: Path, rng: random.Random) -> None:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        tensor = header[rng.choice([key for key in header if key != "__metadata__"])]
        kind = rng.choice(["length", "shape", "offsets", "dtype", "type", "shrink", "nested", "many"])
        if kind == "shape":
            tensor["shape"] = rng.choice(
                [[10**15], [2**63], [2**32, 2**32], [-1], [0], [], [1.5], "x", tensor["shape"] * 9]
            )
        elif kind == "offsets":
            begin, end = tensor["data_offsets"]
            tensor["data_offsets"] = rng.choice([
                [0, 10**15], [end, begin], [begin + 1, end + 1], [-1, end], [2**64, 2**64 + 1], [begin], None, [0, end],
                [0, len(data) + 1],
            ])  # fmt: skip
        elif kind == "dtype":
            tensor["dtype"] = rng.choice(["F64", "I8", "BOOL", "F8_E4M3", "x", 3, None])
        elif kind == "type":
            header[rng.choice(list(header))] = _hostile(rng)
        elif kind == "nested":
            header["__metadata__"] = {"x": rng.choice([{}, [], 1, None])}
        elif kind == "many":
            header |= {f"x{n}": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]} for n in range(999)}
        text = json.dumps(header).encode()
        if kind == "nested" and rng.random() < 0.5:
            text = b'{"x":' * 50000 + b"{}" + b"}" * 50000
        size = len(text)
        if kind == "length":
            size = rng.choice([0, 1, 7, size - 1, size + 1, 10**8 - 1, 10**8 + 1, 10**15, 2**63, 2**64 - 1])
        elif kind == "shrink":
            data = data[: rng.randrange(len(data))]
        (folder / name).write_bytes(struct.pack("<Q", size) + text + data)

    return damage


def claiming_index(folder: Path, rng: random.Random) -> None:
    """An index of a V-MoE checkpoint, whole msgpack, that claims what is not so."""
    file = folder / "vmoe_tiny.index"
    index = msgpack.unpackb(file.read_bytes(), strict_map_key=False)
    kind = rng.choice(["shards", "shape", "leaf", "tree", "deep", "names", "bomb", "many"])
    path = ["index", *rng.choice([["cls"], ["head", "bias"], ["Encoder", "encoder_norm", "scale"]])]
    holder = index
    for part in path[:-1]:
        holder = holder[part]
    if kind == "shards":
        index["shard_count"] = rng.choice([0, -1, 1, 4, 3.0, 10**9, 2**63, "3", None, [3], True])
    elif kind == "shape":
        info, slices, shards = msgpack.unpackb(holder[path[-1]].data)
        shape, dtype, *rest = msgpack.unpackb(info)
        shape = rng.choice([[10**15], [2**62, 4], [-1], [], [1.5], "x", [0], [*shape, 10**12], shape * 50])
        dtype = rng.choice([dtype, "float64", "load", "__name__", "Tensor", "int8", "", 3])
        bounds = [msgpack.packb([0, size, None]) for size in shape] if isinstance(shape, list) else []
        slices = rng.choice([slices, [msgpack.packb(bounds)] * len(shards), []])
        holder[path[-1]] = msgpack.ExtType(8, msgpack.packb([msgpack.packb([shape, dtype, *rest]), slices, shards]))
    elif kind == "many":
        rows = 20_000
        info = msgpack.packb([[1, 1, rows], "float32"])
        first = rng.choice([0, 1])  # the first and second are the same, or there is one too few
        slices = [msgpack.packb([msgpack.packb([*bounds, None]) for bounds in ((0, 1), (0, 1), (row, row + 1))])
                  for row in (first, *range(1, rows))]  # fmt: skip
        holder[path[-1]] = msgpack.ExtType(8, msgpack.packb([info, slices, [0] * rows]))
    elif kind == "leaf":
        holder[path[-1]] = rng.choice([None, 3, b"", msgpack.ExtType(8, b""), msgpack.ExtType(9, b"x"), [], "x", {}])
    elif kind == "tree":
        index["index"] = rng.choice([{}, [], None, 3, {1: {2: 3}}, {b"x": {}}])
    elif kind == "names":
        holder[rng.choice(["x", "", "../x", "params/x", 3, "x" * 9999])] = holder[path[-1]]
    packed = msgpack.packb(index)
    if kind == "deep":
        packed = b"\x82\xabshard_count\x03\xa5index" + b"\x81\xa1x" * rng.choice([500, 1000, 9999]) + b"\x80"
    elif kind == "bomb":
        packed = rng.choice(
            [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x08"]
        )
    file.write_bytes(packed)


def damaged_image(folder: Path, rng: random.Random) -> None:
    files = sorted((folder / "images/test").rglob("*.*"))
    rng.choice([cut, cut, flip, nonsense])(rng.choice(files), rng)


def damaged_classes(folder: Path, rng: random.Random) -> None:
    rng.choice(
        [
            cut,
            flip,
            nonsense,
            lambda file, rng: file.write_text(rng.choice(["a\n", "a\na\na\n", "x\ny\nz\n", "../a\n"])),
        ]
    )(folder / "classes.txt", rng)


def damaged_images_folder(folder: Path, rng: random.Random) -> None:
    test = folder / "images/test"
    rng.choice([
        lambda: shutil.rmtree(test / "a"),
        lambda: shutil.rmtree(test),
        lambda: (test / "d").mkdir(),
        lambda: (test / "d").mkdir() or shutil.copy(test / "a/0.jpg", test / "d"),
        lambda: os.symlink("/dev/zero", test / "a/zero.png"),
        lambda: os.symlink("nowhere", test / "a/gone.png"),
        lambda: os.symlink("..", test / "a/loop"),
        lambda: (test / "a/folder.png").mkdir(),
    ])()  # fmt: skip


# --- cases

EXPORT = ["export", "last.pth.tar", "out"]
SAFETENSORS = [
    *("export", "weights.safetensors", "out", "--model", "vit_tiny_ewa_moe", "--num-classes", "3", "--model-kwargs"),
    *(f"{name}={value}" for name, value in VIT.items()),
]
FOLDER = ["export", "--moe", "folder", "out"]
IMPORT = ["import-vmoe", "vmoe_tiny", "out.safetensors"]
IMAGES = ["--data-dir", "images", "--split", "test", "-j", "0", "-b", "4"]
EVALUATE = ["evaluate", "routed.pth.tar", *IMAGES, "--json", "out.json"]
ROUTES = ["routes", "folder", "out", *IMAGES]
EVALUATE_FOLDER = ["evaluate", "folder", *IMAGES, "--json", "out.json"]
#: Every command that reads train.py's checkpoints, by the file.
REACHING = (
    ("last.pth.tar", EXPORT),
    ("last.pth.tar", ["export", "--moe", "last.pth.tar", "out"]),
    ("last.pth.tar", ["push", "last.pth.tar", "user/name", "--dry-run"]),
    ("routed.pth.tar", EVALUATE),
    ("routed.pth.tar", ["routes", "routed.pth.tar", "out", *IMAGES]),
)
SHARDS = ("vmoe_tiny.data-00000-of-00003", "vmoe_tiny.data-00002-of-00003")

BYTES = {"cut": cut, "bytes flipped": flip, "stretch lost": overwrite, "another kind": nonsense}


def _byte_cases(arguments: list[str], file: str, blind: bool) -> list[tuple[str, Case]]:
    """Damages of a file's bytes; in a blind format some cannot be told from other contents."""
    return [
        (
            name,
            Case(
                arguments,
                of_file(file, damage),
                other="all" if blind and name in ("bytes flipped", "stretch lost") else "",
            ),
        )
        for name, damage in BYTES.items()
    ]


CASES: dict[str, list[tuple[str, Case]]] = {
    "train.py checkpoint": [
        *_byte_cases(EXPORT, "last.pth.tar", blind=False),
        ("hostile fields", Case(EXPORT, of_file("last.pth.tar", hostile_args))),
        ("hostile tensors", Case(EXPORT, of_file("last.pth.tar", hostile_tensors))),
        ("code", Case(EXPORT, code("last.pth.tar"))),
        *[("reaching out", Case(arguments, reaching_args(name))) for name, arguments in REACHING],
        *[
            ("folder for a file", Case([*EXPORT, "--overwrite"], folder_for_file(name)))
            for name in ("model.safetensors", "config.json")
        ],
    ],
    "old .pth (no zip)": [
        *_byte_cases(["export", "legacy.pth", "out"], "legacy.pth", blind=True),
        ("code", Case(["export", "legacy.pth", "out"], code("legacy.pth"))),
    ],
    "safetensors": [
        *_byte_cases(SAFETENSORS, "weights.safetensors", blind=True),
        ("lying header", Case(SAFETENSORS, lying_header("weights.safetensors"))),
        ("code", Case(SAFETENSORS, code("weights.safetensors"))),
    ],
    "folder": [
        *_byte_cases(FOLDER, "folder/config.json", blind=True),
        *_byte_cases(FOLDER, "folder/model.safetensors", blind=True),
        ("hostile config", Case(FOLDER, hostile_config, other="config")),
        ("hostile config", Case(["export", "folder", "out", "--method", "sum"], hostile_config, other="config")),
        ("lying header", Case(FOLDER, lying_header("folder/model.safetensors"))),
        *[("false config", Case(arguments, false_config)) for arguments in (FOLDER, EVALUATE_FOLDER, ROUTES)],
        ("code", Case(FOLDER, code_in_folder)),
    ],
    "V-MoE checkpoint": [
        *_byte_cases(IMPORT, "vmoe_tiny.index", blind=False),
        *[case for shard in SHARDS for case in _byte_cases(IMPORT, shard, blind=True)],
        ("lying index", Case(IMPORT, claiming_index)),
    ],
    "evaluate": [
        ("cut image", Case(EVALUATE, damaged_image, other="all")),
        ("folder of images", Case(EVALUATE, damaged_images_folder, other="all")),
        ("class map", Case([*EVALUATE, "--class-map", "classes.txt"], damaged_classes, other="all")),
        ("code", Case([*EVALUATE, "--class-map", "classes.pkl"], code("classes.pkl"))),
        ("hostile fields", Case(EVALUATE, of_file("routed.pth.tar", hostile_args))),
        *_byte_cases(EVALUATE, "routed.pth.tar", blind=False),
    ],
    "routes": [
        ("cut image", Case(ROUTES, damaged_image, other="all")),
        ("folder of images", Case(ROUTES, damaged_images_folder, other="all")),
        ("hostile config", Case(ROUTES, hostile_config, other="config")),
        *_byte_cases(ROUTES, "folder/model.safetensors", blind=True),
    ],
}  # fmt: skip


# --- running a case


@dataclass
class Ending:
    """How a command ended: wait status, what it said, seconds, and bytes at its peak beyond those at its start."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    memory: int


def run(arguments: list[str], folder: Path, prepare: Callable[[], None] = lambda: None) -> Ending:
    """Run a command in a forked process, which calls ``prepare`` first."""
    begin, resident = time.monotonic(), _resident()
    child = os.fork()
    if child == 0:
        _run_in_child(arguments, folder, prepare)
    status, usage = _wait(child, begin + TIME_LIMIT)
    stdout, stderr = ((folder / f".{name}").read_text(errors="replace") for name in ("stdout", "stderr"))
    for name in ("stdout", "stderr"):
        (folder / f".{name}").unlink()
    return Ending(status, stdout, stderr, time.monotonic() - begin, (usage.ru_maxrss << 10) - resident)


def _run_in_child(arguments: list[str], folder: Path, prepare: Callable[[], None]) -> None:
    status = 70
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
        tempfile.tempdir = str(folder)
        _guard(folder)
        prepare()
        status = main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _guard(folder: Path) -> None:
    """End this process where it makes a request, writes outside the folder, or reads what a file only names."""
    allowed = (str(folder), "/dev/")

    def hook(event: str, args: tuple) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            _trespass(event, args[1:] if event == "socket.connect" else args)
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir"):
            return
        paths = [os.path.abspath(os.fsdecode(path)) for path in args[:2] if isinstance(path, (str, bytes))]
        writes = event in ("os.mkdir", "os.rename", "os.remove") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        for path in paths[:1] if event == "open" else paths:
            if path.endswith(SECRET) or path in ("/", "/usr") or (writes and not path.startswith(allowed)):
                _trespass(event, paths)

    sys.addaudithook(hook)


def _trespass(event: str, args) -> None:
    sys.stderr.write(f"{event} {args}\n")
    sys.stderr.flush()
    os._exit(TRESPASS)


def _wait(child: int, deadline: float):
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return -1, usage
        time.sleep(0.005)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def result_of(folder: Path):
    """What a command wrote, comparable; None if it wrote nothing."""
    if (folder / "out.safetensors").exists():
        return _tensors(folder / "out.safetensors"), None
    if (folder / "out/model.safetensors").exists():
        config = json.loads((folder / "out/config.json").read_text())
        config.pop("timm_moe", None)  # what a file tells of its own training, for the model card
        return _tensors(folder / "out/model.safetensors"), config
    for file in (folder / "out.json", folder / "out/routes.json"):
        if file.exists():
            return {}, json.loads(file.read_text())
    return None


def _tensors(file: Path):
    with safe_open(file, "pt") as opened:
        return load_file(file), opened.metadata()


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def differing(a, b, name: str = "result") -> list[str]:
    """Names of what differs in two results."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if not same(a.get(key), b.get(key))]
        return [path for key in keys for path in differing(a.get(key), b.get(key), str(key))]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return [path for x, y in zip(a, b, strict=True) for path in differing(x, y, name) if not same(x, y)]
    told = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(x)[:40] for x in (a, b)]
    return [f"{name}: {told[0]} -> {told[1]}" if told[0] != told[1] else f"{name}: other values"]


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with size and time of the last change of the files."""
    found = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    found |= {path: None for path in folder.rglob("*") if path.is_dir()}
    return {str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)
            for path, stat in found.items()}  # fmt: skip


def judge(case: Case, ending: Ending, before: dict[str, tuple[int, int]], folder: Path, expected) -> tuple[str, str]:
    """(outcome, why)."""
    after = state_of(folder)
    left = {name for name in before | after if before.get(name) != after.get(name)}
    if (folder / MARKER).exists():
        return "FAILED", "code was run"
    if ending.status == -1:
        return "FAILED", "time limit"
    if os.WIFSIGNALED(ending.status):
        return "FAILED", f"signal {os.WTERMSIG(ending.status)}"
    if os.WEXITSTATUS(ending.status) == TRESPASS:
        return "FAILED", f"trespassed: {ending.stderr.splitlines()[-1]}"
    if ending.memory > MEMORY_LIMIT:
        return "FAILED", f"took {ending.memory >> 20} MiB"
    if os.WEXITSTATUS(ending.status):
        errors = [line for line in ending.stderr.splitlines() if line.startswith("timm-moe: error: ")]
        if os.WEXITSTATUS(ending.status) != 1 or len(errors) != 1 or "Traceback" in ending.stderr + ending.stdout:
            return "FAILED", "not one sentence"
        return ("FAILED", f"left or changed {', '.join(sorted(left))}") if left else ("refused", errors[0])
    if same(result_of(folder), expected):
        return "harmless", ""
    changes = differing(expected, result_of(folder))
    told = not case.other or (case.other == "config" and not same(result_of(folder)[0], expected[0]))
    return ("FAILED" if told else "other"), f"success with another result: {'; '.join(changes[:3])}"


def run_cases(number: int, seed: int, only: str = "") -> tuple[dict[tuple[str, str], Counter], list[str]]:
    """Run so many cases, spread evenly; returns the outcomes by input and damage, and the failures."""
    torch.set_num_threads(1)
    flat = [(kind, name, case) for kind, cases in CASES.items() for name, case in cases if only in kind]
    outcomes: dict[tuple[str, str], Counter] = defaultdict(Counter)
    failures, sentences, told = [], {}, time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        originals, folder = Path(temporary, "originals"), Path(temporary, "case")
        originals.mkdir()
        make_originals(originals)
        shutil.copy(originals / "legacy.pth", Path(temporary, SECRET))
        expected = {}
        for index in range(number):
            kind, name, case = flat[index % len(flat)]
            key = tuple(case.arguments)
            if key not in expected:
                shutil.copytree(originals, folder)
                ending = run(case.arguments, folder)
                assert ending.status == 0 or "classes.pkl" in key, ending.stderr
                expected[key] = result_of(folder)
                shutil.rmtree(folder)
            shutil.copytree(originals, folder)
            case.damage(folder, random.Random(f"{seed} {index}"))
            before = state_of(folder)
            ending = run(case.arguments, folder)
            outcome, why = judge(case, ending, before, folder, expected[key])
            outcomes[kind, name][outcome] += 1
            if outcome == "FAILED":
                failures.append(f"{index}: {kind}, {name}: {why}\n{ending.stderr[-1500:]}")
            elif outcome in ("refused", "other"):
                sentences.setdefault(why[:60] + name, f"{index} {kind}, {name}: {why}")
            shutil.rmtree(folder)
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{index + 1} of {number} ...", file=sys.stderr)
    if os.environ.get("SHOW_SENTENCES"):
        print("\n".join(sentences.values()))
    return outcomes, failures


COLUMNS = ("refused", "harmless", "other", "FAILED")


def table(outcomes: dict[tuple[str, str], Counter]) -> str:
    lines = ["| input | damage | cases | " + " | ".join(COLUMNS) + " |", "|---|---|---:|" + "---:|" * len(COLUMNS)]
    total: Counter = Counter()
    for (kind, name), counts in outcomes.items():
        total.update(counts)
        lines.append(_row(kind, name, counts))
    return "\n".join([*lines, _row("all", "", total)])


def _row(kind: str, name: str, counts: Counter) -> str:
    return f"| {kind} | {name} | {counts.total()} | " + " | ".join(str(counts[column]) for column in COLUMNS) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=1000, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="part of the name of an input")
    args = parser.parse_args()
    outcomes, failures = run_cases(args.number, args.seed, args.only)
    print(table(outcomes))
    print(f"timm_moe {timm_moe.__version__}, timm {timm.__version__}, torch {torch.__version__}")
    print(*failures, sep="\n")
    sys.exit(bool(failures))
