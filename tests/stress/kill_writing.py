"""Commands that are killed (SIGKILL) while they write; see docs/compatibility.md.

    python tests/stress/kill_writing.py --random 20 --seed 0

Every command that writes is run again and again: killed before its first operation on a file,
before its second, and so on until it gets through; then at random moments while an export of 20 MB
writes its weights. After each kill what stands under the output's name must be what was there
before, or whole, or, where a folder is overwritten, a folder without the file that makes sense of
the others: config.json, which every loader asks for, or routes.json. Then the same command must get
through, and leave nothing of what was left behind in the output or beside it. Two exports that
write to one folder at once must leave one of them whole.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import timm
import torch
from damage import IMAGES, IMPORT, VMOE, make_originals, run

import timm_moe
from timm_moe_cli import main

#: Audit events of Python that change files; the first argument is the path.
WRITES = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "os.truncate",
    "os.link",
    "shutil.copymode",
)

COMMANDS = {
    "export": ["export", "last.pth.tar", "out"],
    "export --overwrite": ["export", "last.pth.tar", "out", "--overwrite"],
    "export --moe --overwrite": ["export", "--moe", "routed.pth.tar", "out", "--overwrite"],
    "export to missing parents": ["export", "last.pth.tar", "out/a/b"],
    "push --dry-run": ["push", "last.pth.tar", "user/name", "--dry-run"],
    "import-vmoe": IMPORT,
    "import-vmoe --overwrite": [*IMPORT, "--overwrite"],
    "evaluate --json --overwrite": [
        "evaluate",
        "routed.pth.tar",
        *IMAGES,
        "--json",
        "out.json",
        "--overwrite",
    ],
    "routes --overwrite": ["routes", "folder", "out", *IMAGES, "--overwrite"],
}


def prepare(folder: Path, operation: int | None = None) -> None:
    """A process that dies.

    Stated are its temporary folder, and the operation that changes a file before which it dies.
    """
    tempfile.tempdir = str(folder / "temporary")
    if operation is not None:
        kill_at(operation)


def kill_at(operation: int) -> None:
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event not in WRITES or (
            event == "open"
            and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR))
        ):
            return
        if str(args[0]).startswith("/dev/"):
            return
        count += 1
        if count > operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def hidden(folder: Path) -> list[Path]:
    """What a command leaves in and beside its output where it was killed."""
    found = (path for path in folder.rglob("*") if not path.is_relative_to(folder / "temporary"))
    return [path for path in found if "timm_moe" in path.name or path.name.startswith(".")]


def contents(folder: Path) -> dict[str, bytes]:
    """What stands under the output's name, by file."""
    files = [
        file
        for output in folder.glob("out*")
        for file in [output, *sorted(output.rglob("*"))]
        if file.is_file()
    ]
    left = hidden(folder)
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if not any(file.is_relative_to(path) for path in left)
    }


def judge(found: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> str:
    if found == before:
        return "as before"
    if found == after:
        return "whole"
    known = all(content in (before.get(name), after.get(name)) for name, content in found.items())
    for last in ("out/config.json", "out/routes.json"):
        if last in after and last not in found and known:
            return f"no {Path(last).name}"
    return "FAILED"


def kill_everywhere(name: str, originals: Path, folder: Path) -> Counter:
    """Kill a command before each of its operations on files; returns what was found after each."""
    arguments = COMMANDS[name]
    with tempfile.TemporaryDirectory() as temporary:
        prepared = Path(temporary, "prepared")
        shutil.copytree(originals, prepared)
        if "--overwrite" in arguments:  # the results of other weights
            sources = ("last.pth.tar", "routed.pth.tar", "folder", "vmoe_tiny")
            assert (
                run(
                    [f"other/{word}" if word in sources else word for word in arguments], prepared
                ).status
                == 0
            )
            if (prepared / "out").is_dir():
                (prepared / "out/notes.txt").write_text("mine")
        return _kill_everywhere(arguments, prepared, folder)


def _kill_everywhere(arguments: list[str], prepared: Path, folder: Path) -> Counter:
    found: Counter = Counter()

    def begin() -> dict[str, bytes]:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(prepared, folder)
        (folder / "temporary").mkdir()
        return contents(folder)

    begin()
    assert run(arguments, folder, lambda: prepare(folder)).status == 0
    after = contents(folder)
    for operation in range(10**6):
        before = begin()
        ending = run(arguments, folder, lambda operation=operation: prepare(folder, operation))
        if ending.status == 0:
            return found
        assert os.WIFSIGNALED(ending.status), ending.stderr
        outcome = judge(contents(folder), before, after)
        left = bool(hidden(folder))
        done = outcome == "whole" and arguments[0] != "push"
        again = run(
            [*arguments, *(["--overwrite"] if done else [])], folder, lambda: prepare(folder)
        )
        if again.status or contents(folder) != after or hidden(folder):
            outcome = "FAILED"
        found[outcome] += 1
        found["left behind"] += left
    return found


def make_all_originals(folder: Path) -> None:
    folder.mkdir()
    make_originals(folder)
    (folder / "other").mkdir()
    for source in ("last.pth.tar", "routed.pth.tar"):
        checkpoint = torch.load(folder / source, weights_only=False)
        checkpoint["state_dict"]["head.bias"] += 1
        checkpoint["args"].mean = [0.25] * 3
        torch.save(checkpoint, folder / "other" / source)
    run(["export", "--moe", "other/routed.pth.tar", "other/folder"], folder)
    for file in VMOE.glob("vmoe_tiny_bf16.*"):
        shutil.copy(file, folder / "other" / file.name.replace("_bf16", ""))


def kill_at_random(number: int, seed: int, folder: Path) -> Counter:
    """Kill an export over an older one while it writes 20 MB of weights, and shortly after."""
    rng, found = random.Random(seed), Counter()
    folder.mkdir()
    model = timm.create_model("vit_tiny_ewa_moe", num_classes=3)
    source, command = folder / "weights.pth", ["export", "weights.pth", "out", "--overwrite"]
    args = argparse.Namespace(model="vit_tiny_ewa_moe", num_classes=3)
    versions = []
    for _ in range(2):
        model.head.bias.data += 1
        torch.save({"args": args, "state_dict": model.state_dict()}, source)
        assert run(command, folder).status == 0
        versions.append(contents(folder))
    before, after = versions
    for _ in range(number):
        for name, content in before.items():
            (folder / name).write_bytes(content)
        child = start(command, folder)
        while (
            not list(folder.glob(".out.timm_moe.partial/*"))
            and os.waitpid(child, os.WNOHANG)[0] == 0
        ):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1) if rng.random() < 0.5 else rng.uniform(0, 3))
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):  # it had ended
            pass
        sizes = [
            file.stat().st_size
            for file in folder.glob(".out.timm_moe.partial/*/*")
            if file.name != "config.json"
        ]
        found[judge(contents(folder), before, after)] += 1
        found["weights cut in what was left behind"] += any(
            size < len(after["out/model.safetensors"]) for size in sizes
        )
    assert run(command, folder).status == 0
    assert contents(folder) == after
    assert not hidden(folder)
    return found


def start(arguments: list[str], folder: Path) -> int:
    """A command in a forked process, silent."""
    child = os.fork()
    if child == 0:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        os._exit(main(arguments))
    return child


def race(number: int, originals: Path, folder: Path, *options: str) -> Counter:
    """Export two checkpoints to one folder at once.

    The folder must hold one of them, which its command did not refuse.
    """
    sources, found = ("last.pth.tar", "other/last.pth.tar"), Counter()
    shutil.copytree(originals, folder)
    alone = []
    for source in sources:
        assert run(["export", source, "out", "--overwrite"], folder).status == 0
        alone.append(contents(folder))
    for _ in range(number):
        if not options:
            shutil.rmtree(folder / "out")
        children = [start(["export", source, "out", *options], folder) for source in sources]
        statuses = [os.waitpid(child, 0)[1] for child in children]
        result = contents(folder)
        wrote = [expected for expected, status in zip(alone, statuses, strict=True) if status == 0]
        outcome = "one of them whole" if result in wrote and not hidden(folder) else "FAILED"
        found[outcome] += 1
        found["the other refused"] += len(wrote) == 1
    return found


def run_all(number: int, seed: int, only: str = "") -> dict[str, Counter]:
    torch.set_num_threads(1)
    found: dict[str, Counter] = defaultdict(Counter)
    with tempfile.TemporaryDirectory() as temporary:
        originals = Path(temporary, "originals")
        make_all_originals(originals)
        for name in COMMANDS:
            if only in name:
                found[name] = kill_everywhere(name, originals, Path(temporary, "case"))
        for name, options in (
            ("export, two at once", []),
            ("export --overwrite, two at once", ["--overwrite"]),
        ):
            if only in name:
                found[name] = race(max(number, 3), originals, Path(temporary, name), *options)
        if number:
            found["export --overwrite of 20 MB, at random"] = kill_at_random(
                number, seed, Path(temporary, "large")
            )
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--random", type=int, default=20, help="kills at random moments (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", default="", help="part of the name of a command")
    args = parser.parse_args()
    found = run_all(args.random, args.seed, args.only)
    for name, counts in found.items():
        print(
            f"{name}: "
            + ", ".join(f"{outcome} {count}" for outcome, count in counts.items() if count)
        )
    print(f"timm_moe {timm_moe.__version__}, timm {timm.__version__}, torch {torch.__version__}")
    sys.exit(any(counts["FAILED"] for counts in found.values()))
