"""Damaged and hostile inputs for every command that reads files; see docs/compatibility.md.

    python tests/stress/damage.py --number 1000 --seed 0

Each case takes a fresh copy of intact files, damages it, and runs the command in a process of its
own, forked from this one, which has imported everything. A table tells how they ended:

- refused: exit status 1 and one sentence;
- harmless: success, and the result is that of the intact files bit for bit;
- other: success with another result, where the format gives no means of telling (weights without
  checksum, a config.json that states another valid option);
- stopped: by the limits on time and memory, which a file may ask for in any amount, as with
  torch.load;
- FAILED: anything else. The process died of a signal of its own, ran code of the file, reached for
  the network or for paths that a file names, ended in a traceback, left files behind, changed what
  was there before, or gave another result where the damage can be told.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from ways_to_damage import (
    MARKER,
    SECRET,
    claiming_index,
    code,
    code_in_folder,
    cut,
    damaged_classes,
    damaged_image,
    damaged_images_folder,
    false_config,
    flip,
    folder_for_file,
    hostile_args,
    hostile_config,
    hostile_tensors,
    lying_header,
    nonsense,
    of_file,
    overwrite,
    reaching_args,
)

import timm_moe
from timm_moe.analysis import evaluation, routes  # noqa: F401  (imported before the forks)
from timm_moe_cli import main

#: Seconds, and bytes of address space, after which a command is stopped.
TIME_LIMIT, ADDRESS_SPACE = 20, 16 << 30

#: Exit status of a process that reached for the network or the secret file, or wrote elsewhere.
TRESPASS = 99
VIT = dict(img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2)
VMOE = Path(__file__).parent.parent / "data/vmoe"


@dataclass
class Case:
    """A command, and what to do to its input first.

    ``other`` says what in its result may differ though it succeeds.

    "": nothing, since the format has the means to tell; "all"; or "config": all but the weights,
    which stayed intact.
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
    _save_checkpoint(
        folder / "last.pth.tar", model, "vit_tiny_ewa_moe", optimizer=optimizer.state_dict()
    )
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
    args = argparse.Namespace(
        model=name, num_classes=3, model_kwargs=dict(VIT), mean=[0.5] * 3, epochs=3, opt="adamw"
    )
    state = {"epoch": 1, "arch": name, "args": args, "state_dict": model.state_dict(), **more}
    torch.save(state, file, _use_new_zipfile_serialization=zipped)


# --- cases

EXPORT = ["export", "last.pth.tar", "out"]
SAFETENSORS = [
    *(
        "export",
        "weights.safetensors",
        "out",
        "--model",
        "vit_tiny_ewa_moe",
        "--num-classes",
        "3",
        "--model-kwargs",
    ),
    *(f"{name}={value}" for name, value in VIT.items()),
]
FOLDER = ["export", "--moe", "folder", "out"]
IMPORT = ["import-vmoe", "vmoe_tiny", "out"]
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
        (
            "hostile config",
            Case(["export", "folder", "out", "--method", "sum"], hostile_config, other="config"),
        ),
        ("lying header", Case(FOLDER, lying_header("folder/model.safetensors"))),
        *[
            ("false config", Case(arguments, false_config))
            for arguments in (FOLDER, EVALUATE_FOLDER, ROUTES)
        ],
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
        (
            "class map",
            Case([*EVALUATE, "--class-map", "classes.txt"], damaged_classes, other="all"),
        ),
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
}


# --- running a case


@dataclass
class Ending:
    """How a command ended: wait status, -1 if it was stopped, and what it said."""

    status: int
    stdout: str
    stderr: str


def run(arguments: list[str], folder: Path, prepare: Callable[[], None] = lambda: None) -> Ending:
    """Run a command in a forked process, which calls ``prepare`` first."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_in_child(arguments, folder, prepare)
    status = _wait(child, begin + TIME_LIMIT)
    stdout, stderr = (
        (folder / f".{name}").read_text(errors="replace") for name in ("stdout", "stderr")
    )
    for name in ("stdout", "stderr"):
        (folder / f".{name}").unlink()
    return Ending(status, stdout, stderr)


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
    """End this process where it does what it must not.

    That is to make a request, to write outside the folder, or to read what a file only names.
    """
    allowed = (str(folder), "/dev/")

    def hook(event: str, args: tuple) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            _trespass(event, args[1:] if event == "socket.connect" else args)
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir"):
            return
        paths = [
            os.path.abspath(os.fsdecode(path))
            for path in args[:2]
            if isinstance(path, (str, bytes))
        ]
        writes = event in ("os.mkdir", "os.rename", "os.remove") or (
            event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        )
        for path in paths[:1] if event == "open" else paths:
            if (
                path.endswith(SECRET)
                or path in ("/", "/usr")
                or (writes and not path.startswith(allowed))
            ):
                _trespass(event, paths)

    sys.addaudithook(hook)


def _trespass(event: str, args) -> None:
    sys.stderr.write(f"{event} {args}\n")
    sys.stderr.flush()
    os._exit(TRESPASS)


def _wait(child: int, deadline: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.005)


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
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, (tuple, list)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(same, a, b))
    return a == b


def differing(a, b, name: str = "result") -> list[str]:
    """Names of what differs in two results."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [key for key in {**a, **b} if not same(a.get(key), b.get(key))]
        return [path for key in keys for path in differing(a.get(key), b.get(key), str(key))]
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        return [
            path
            for x, y in zip(a, b, strict=True)
            for path in differing(x, y, name)
            if not same(x, y)
        ]
    told = [
        f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else str(x)[:40]
        for x in (a, b)
    ]
    return [f"{name}: {told[0]} -> {told[1]}" if told[0] != told[1] else f"{name}: other values"]


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything in a folder, with size and time of the last change of the files."""
    found = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    found |= {path: None for path in folder.rglob("*") if path.is_dir()}
    return {
        str(path.relative_to(folder)): (stat.st_size, stat.st_mtime_ns) if stat else (0, 0)
        for path, stat in found.items()
    }


def judge(
    case: Case, ending: Ending, before: dict[str, tuple[int, int]], folder: Path, expected
) -> tuple[str, str]:
    """(outcome, why)."""
    after = state_of(folder)
    left = {name for name in before | after if before.get(name) != after.get(name)}
    if (folder / MARKER).exists():
        return "FAILED", "code was run"
    if ending.status == -1:
        return "stopped", ""
    if os.WIFSIGNALED(ending.status):
        return "FAILED", f"signal {os.WTERMSIG(ending.status)}"
    if os.WEXITSTATUS(ending.status) == TRESPASS:
        return "FAILED", f"trespassed: {ending.stderr.splitlines()[-1]}"
    if os.WEXITSTATUS(ending.status):
        errors = [
            line for line in ending.stderr.splitlines() if line.startswith("timm-moe: error: ")
        ]
        if (
            os.WEXITSTATUS(ending.status) != 1
            or len(errors) != 1
            or "Traceback" in ending.stderr + ending.stdout
        ):
            return "FAILED", "not one sentence"
        return (
            ("FAILED", f"left or changed {', '.join(sorted(left))}")
            if left
            else ("refused", errors[0])
        )
    if same(result_of(folder), expected):
        return "harmless", ""
    changes = differing(expected, result_of(folder))
    told = not case.other or (
        case.other == "config" and not same(result_of(folder)[0], expected[0])
    )
    return ("FAILED" if told else "other"), f"success with another result: {'; '.join(changes[:3])}"


def run_cases(
    number: int, seed: int, only: str = ""
) -> tuple[dict[tuple[str, str], Counter], list[str]]:
    """Run so many cases, spread evenly.

    Returns:
        The outcomes by input and damage, and the failures.
    """
    torch.set_num_threads(1)
    flat = [
        (kind, name, case) for kind, cases in CASES.items() for name, case in cases if only in kind
    ]
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


COLUMNS = ("refused", "harmless", "other", "stopped", "FAILED")


def table(outcomes: dict[tuple[str, str], Counter]) -> str:
    lines = [
        "| input | damage | cases | " + " | ".join(COLUMNS) + " |",
        "|---|---|---:|" + "---:|" * len(COLUMNS),
    ]
    total: Counter = Counter()
    for (kind, name), counts in outcomes.items():
        total.update(counts)
        lines.append(_row(kind, name, counts))
    return "\n".join([*lines, _row("all", "", total)])


def _row(kind: str, name: str, counts: Counter) -> str:
    return (
        f"| {kind} | {name} | {counts.total()} | "
        + " | ".join(str(counts[column]) for column in COLUMNS)
        + " |"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=1000, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="part of the name of an input")
    args = parser.parse_args()
    outcomes, failures = run_cases(args.number, args.seed, args.only)
    print(table(outcomes))
    print(f"timm_moe {timm_moe.__version__}, timm {timm.__version__}, torch {torch.__version__}")
    print(*failures, sep="\n")
    sys.exit(bool(failures))
