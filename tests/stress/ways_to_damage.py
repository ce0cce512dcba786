"""Damages to files and folders, for damage.py.

They are of their bytes, of their contents, or with code in them.
"""

import argparse
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgpack
import torch

#: Appears if code of a file is run.
MARKER = "it-ran"
#: A file beside a case's folder that no command has any business with.
SECRET = "secret.pth"


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


# --- damages of bytes


def cut(file: Path, rng: random.Random) -> None:
    size = file.stat().st_size
    os.truncate(file, rng.choice([0, 1, 8, rng.randrange(size), rng.randrange(size), size - 1]))


def flip(file: Path, rng: random.Random) -> None:
    """Change one to eight bytes.

    They are anywhere, or where the format says what it holds: its head and its tail.
    """
    content = bytearray(file.read_bytes())
    low, high = rng.choice(
        [(0, len(content)), (0, min(600, len(content))), (max(0, len(content) - 600), len(content))]
    )
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(low, high)] ^= rng.randrange(1, 256)
    file.write_bytes(content)


def overwrite(file: Path, rng: random.Random) -> None:
    """A stretch of zeros or noise, or one that is missing or there twice."""
    content = file.read_bytes()
    start = rng.randrange(len(content))
    length = rng.choice([1, 16, 512, 4096])
    between = rng.choice(
        [bytes(length), rng.randbytes(length), b"", content[start : start + length] * 2]
    )
    file.write_bytes(content[:start] + between + content[start + length :])


def nonsense(file: Path, rng: random.Random) -> None:
    """Another kind of file altogether."""
    size = file.stat().st_size
    png = b"\x89PNG\r\n\x1a\n" + rng.randbytes(99)
    file.write_bytes(
        rng.choice(
            [
                rng.randbytes(size),
                bytes(size),
                b"PK\x03\x04" + rng.randbytes(size),
                png,
                b"{}",
                b"[]",
            ]
        )
    )


def of_file(
    name: str, damage: Callable[[Path, random.Random], None]
) -> Callable[[Path, random.Random], None]:
    return lambda folder, rng: damage(folder / name, rng)


# --- damages of contents

#: Values that no field of a config or checkpoint expects.
HOSTILE = (
    None,
    True,
    -1,
    0,
    7,
    1.5,
    1e300,
    10**8,
    10**9,
    10**15,
    10**30,
    "",
    "x",
    "../../../etc/passwd",
    "/dev/zero",
    "\x00",
    "é" * 9,
    f"__import__('os').system('touch {MARKER}')",
    f"$(touch {MARKER})",
    "hf-hub:nobody/nothing",
    "local-dir:/dev",
    "%s" * 9,
    "x" * 99999,
    [],
    [0],
    [1, 2, 3],
    [10**9] * 3,
    [[]],
    {},
    {"x": {}},
    {"file": "evil.pth"},
)


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
        holder[
            rng.choice(
                ["checkpoint_path", "pretrained_cfg", "num_experts", "url", "file", "custom_load"]
            )
        ] = _hostile(rng)
    else:
        holder[key] = str(holder[key]) if action == "text" else _hostile(rng)


def hostile_config(folder: Path, rng: random.Random) -> None:
    file = folder / "folder/config.json"
    config = json.loads(file.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        _change_somewhere(config, rng)
    file.write_text(json.dumps(config))


def false_config(folder: Path, rng: random.Random) -> None:
    """Change a config.json so that it no longer is that of the weights.

    It may also state what preprocessing cannot be.
    """
    file = folder / "folder/config.json"
    config = json.loads(file.read_text())
    args = config["model_args"]
    rng.choice(
        [
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
        ]
    )()
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
    target = rng.choice(
        [
            content,
            content["args"],
            content["args"],
            {"model_kwargs": content["args"]["model_kwargs"]},
        ]
    )
    _change_somewhere(target, rng)
    if isinstance(content.get("args"), dict):
        content["args"] = argparse.Namespace(
            **{str(key): value for key, value in content["args"].items()}
        )
    torch.save(content, file)


def hostile_tensors(file: Path, rng: random.Random) -> None:
    """Weights that are not those of the model: other shapes, types, names, missing, not dense."""
    checkpoint = torch.load(file, weights_only=False)
    weights = checkpoint["state_dict"]
    name = rng.choice(list(weights))
    tensor = weights[name]
    replacement = rng.choice(
        [
            None,
            3,
            tensor[:1],
            tensor.flatten(),
            tensor.new_zeros(0),
            tensor.new_zeros(()),
            torch.zeros(1).expand(10**12),
            tensor.to_sparse(),
            torch.empty(tensor.shape, device="meta"),
            tensor.bool(),
            tensor.to(torch.complex64),
            torch.full_like(tensor, float("nan")),
            [tensor],
            tensor.unsqueeze(0),
            {"x": tensor},
        ]
    )
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
            {"url": "http://127.0.0.1:9/weights.pth"},
            {"url": f"file://{secret}"},
            {"file": secret},
            {"hf_hub_id": "nobody/nothing"},
            {"url": f"file://{secret}", "custom_load": True},
        )
        kwargs = rng.choice(
            [
                *(
                    {
                        "pretrained": True,
                        "cache_dir": str(folder.parent / "planted"),
                        "pretrained_cfg": cfg,
                    }
                    for cfg in cfgs
                ),
                *({"pretrained": True, "pretrained_cfg_overlay": cfg} for cfg in cfgs),
                {"checkpoint_path": secret},
                {"pretrained": True},
                {"cache_dir": str(folder.parent / "planted")},
            ]
        )
        rng.choice(
            [
                lambda: args.model_kwargs.update(kwargs),
                lambda: args.model_kwargs.update(kwargs),
                lambda: setattr(
                    args,
                    "model",
                    rng.choice(["hf-hub:nobody/nothing", f"local-dir:{folder.parent}"]),
                ),
                lambda: vars(args).update(
                    data_dir="/", train_split="usr", initial_checkpoint=secret
                ),
            ]
        )()
        torch.save(checkpoint, folder / name)

    return damage


def code(name: str) -> Callable[[Path, random.Random], None]:
    """A pickle that runs code, under any name."""

    def write(folder: Path, rng: random.Random) -> None:
        payload = Code(rng.choice(Code.CALLS))
        where = rng.choice(["all", "state_dict", "args", "tensor", "key"])
        content = (
            payload if where == "all" else torch.load(folder / "last.pth.tar", weights_only=False)
        )
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
    name = rng.choice(
        ["model.safetensors", "pytorch_model.bin", "model.pth", "any.pth", "any.bin", "x.pth.tar"]
    )
    code(f"folder/{name}")(folder, rng)


def lying_header(name: str) -> Callable[[Path, random.Random], None]:
    """A safetensors header that claims what is not so."""

    def damage(folder: Path, rng: random.Random) -> None:
        content = (folder / name).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        tensor = header[rng.choice([key for key in header if key != "__metadata__"])]
        kind = rng.choice(
            ["length", "shape", "offsets", "dtype", "type", "shrink", "nested", "many"]
        )
        if kind == "shape":
            tensor["shape"] = rng.choice(
                [[10**15], [2**63], [2**32, 2**32], [-1], [0], [], [1.5], "x", tensor["shape"] * 9]
            )
        elif kind == "offsets":
            begin, end = tensor["data_offsets"]
            tensor["data_offsets"] = rng.choice(
                [
                    [0, 10**15],
                    [end, begin],
                    [begin + 1, end + 1],
                    [-1, end],
                    [2**64, 2**64 + 1],
                    [begin],
                    None,
                    [0, end],
                    [0, len(data) + 1],
                ]
            )
        elif kind == "dtype":
            tensor["dtype"] = rng.choice(["F64", "I8", "BOOL", "F8_E4M3", "x", 3, None])
        elif kind == "type":
            header[rng.choice(list(header))] = _hostile(rng)
        elif kind == "nested":
            header["__metadata__"] = {"x": rng.choice([{}, [], 1, None])}
        elif kind == "many":
            header |= {
                f"x{n}": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}
                for n in range(999)
            }
        text = json.dumps(header).encode()
        if kind == "nested" and rng.random() < 0.5:
            text = b'{"x":' * 50000 + b"{}" + b"}" * 50000
        size = len(text)
        if kind == "length":
            size = rng.choice(
                [0, 1, 7, size - 1, size + 1, 10**8 - 1, 10**8 + 1, 10**15, 2**63, 2**64 - 1]
            )
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
        shape = rng.choice(
            [[10**15], [2**62, 4], [-1], [], [1.5], "x", [0], [*shape, 10**12], shape * 50]
        )
        dtype = rng.choice([dtype, "float64", "load", "__name__", "Tensor", "int8", "", 3])
        bounds = (
            [msgpack.packb([0, size, None]) for size in shape] if isinstance(shape, list) else []
        )
        slices = rng.choice([slices, [msgpack.packb(bounds)] * len(shards), []])
        holder[path[-1]] = msgpack.ExtType(
            8, msgpack.packb([msgpack.packb([shape, dtype, *rest]), slices, shards])
        )
    elif kind == "many":
        rows = 20_000
        info = msgpack.packb([[1, 1, rows], "float32"])
        first = rng.choice([0, 1])  # the first and second are the same, or there is one too few
        slices = [
            msgpack.packb(
                [msgpack.packb([*bounds, None]) for bounds in ((0, 1), (0, 1), (row, row + 1))]
            )
            for row in (first, *range(1, rows))
        ]
        holder[path[-1]] = msgpack.ExtType(8, msgpack.packb([info, slices, [0] * rows]))
    elif kind == "leaf":
        holder[path[-1]] = rng.choice(
            [None, 3, b"", msgpack.ExtType(8, b""), msgpack.ExtType(9, b"x"), [], "x", {}]
        )
    elif kind == "tree":
        index["index"] = rng.choice([{}, [], None, 3, {1: {2: 3}}, {b"x": {}}])
    elif kind == "names":
        holder[rng.choice(["x", "", "../x", "params/x", 3, "x" * 9999])] = holder[path[-1]]
    packed = msgpack.packb(index)
    if kind == "deep":
        packed = (
            b"\x82\xabshard_count\x03\xa5index"
            + b"\x81\xa1x" * rng.choice([500, 1000, 9999])
            + b"\x80"
        )
    elif kind == "bomb":
        packed = rng.choice(
            [
                b"\xdd\xff\xff\xff\xff",
                b"\xdf\xff\xff\xff\xff",
                b"\xc6\xff\xff\xff\xff",
                b"\xc9\xff\xff\xff\xff\x08",
            ]
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
            lambda file, rng: file.write_text(
                rng.choice(["a\n", "a\na\na\n", "x\ny\nz\n", "../a\n"])
            ),
        ]
    )(folder / "classes.txt", rng)


def damaged_images_folder(folder: Path, rng: random.Random) -> None:
    test = folder / "images/test"
    rng.choice(
        [
            lambda: shutil.rmtree(test / "a"),
            lambda: shutil.rmtree(test),
            lambda: (test / "d").mkdir(),
            lambda: (test / "d").mkdir() or shutil.copy(test / "a/0.jpg", test / "d"),
            lambda: os.symlink("/dev/zero", test / "a/zero.png"),
            lambda: os.symlink("nowhere", test / "a/gone.png"),
            lambda: os.symlink("..", test / "a/loop"),
            lambda: (test / "a/folder.png").mkdir(),
        ]
    )()
