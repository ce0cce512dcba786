"""timm's own train.py, killed (SIGKILL) again and again until it has finished.

See CONTRIBUTING.md, "Killed runs".

    TIMM_SCRIPTS=FOLDER python tests/stress/kill_training.py --kills 20 --seed 0

Half of the kills come at random moments, in the start of the process too, half while train.py
writes a checkpoint. After each, every checkpoint in the folder is read: one that a kill cut must be
refused by ``timm-moe export`` in one sentence, all others hold as many updates as their epochs.
Training goes on from last.pth.tar, or, where the kill fell between train.py's removal of the old
last.pth.tar and its renaming of the new one, from the newest file that is whole.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image

import timm_moe
from timm_moe.checkpoints.source import load_source
from timm_moe.console import describe

MODEL, CLASSES, BATCH, PER_CLASS = "vit_xtiny_ewa_moe", 3, 12, 16
UPDATES_PER_EPOCH = CLASSES * PER_CLASS // BATCH


def make_images(folder: Path) -> None:
    noise = np.random.default_rng(0)
    for split, number in (("train", PER_CLASS), ("test", 4)):
        for label in range(CLASSES):
            (folder / split / str(label)).mkdir(parents=True)
            for index in range(number):
                image = Image.fromarray(noise.integers(0, 255, (32, 32, 3), np.uint8))
                image.save(folder / split / str(label) / f"{index}.png")


def start(folder: Path, epochs: int, resume: Path | None) -> subprocess.Popen:
    command = [
        *(
            sys.executable,
            Path(os.environ["TIMM_SCRIPTS"], "train.py").resolve(),
            "--model",
            MODEL,
            "--num-classes",
            CLASSES,
        ),
        *(
            "--data-dir",
            "images",
            "--val-split",
            "test",
            "--epochs",
            epochs,
            "--warmup-epochs",
            0,
            "--log-interval",
            1,
        ),
        *(
            "-b",
            BATCH,
            "-j",
            0,
            "--device",
            "cpu",
            "--opt",
            "adamw",
            "--lr",
            1e-3,
            "--experiment",
            "run",
        ),
        *("--checkpoint-hist", 2, *(["--resume", resume] if resume else [])),
    ]
    log = open(folder / "log", "w")  # noqa: SIM115  (the process holds it)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        list(map(str, command)), cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
    )


def wait_until(process: subprocess.Popen, condition) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.002)


def kill_somewhen(process: subprocess.Popen, folder: Path, rng: random.Random) -> str:
    """Kill the process and its workers; returns at what moment, or "" if it had ended."""
    begin, file = time.time(), folder / "output/train/run/tmp.pth.tar"

    def writing() -> bool:  # what an earlier kill left behind does not count
        try:
            return file.stat().st_mtime > begin
        except FileNotFoundError:
            return False

    if rng.random() < 0.5:
        for _ in range(rng.randrange(3)):  # of the process's writes, not the first
            wait_until(process, writing)
            wait_until(process, lambda: not writing())
        wait_until(process, writing)
        time.sleep(rng.uniform(0, 0.25))
    else:
        lines = rng.randrange(-1, 4 * UPDATES_PER_EPOCH)  # -1: before the first update
        wait_until(
            process, lambda: (folder / "log").read_text(errors="replace").count("Train: ") >= lines
        )
        time.sleep(rng.uniform(0, 6 if lines == -1 else 0.4))
    if process.poll() is not None:
        return ""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return "writing" if writing() else "between writes"


def check_files(folder: Path) -> tuple[list[tuple[int, Path]], list[Path]]:
    """Return (updates, file) of the whole checkpoints, and the files that are cut.

    The checkpoint with the most updates is the last.
    """
    whole, cut = [], []
    for file in folder.glob("output/train/run/*.pth.tar"):
        try:
            load_source(file)
        except ValueError as error:
            if "is damaged" not in describe(error):
                raise
            cut.append(file)
            continue
        with torch.serialization.safe_globals([argparse.Namespace]):
            checkpoint = torch.load(file, weights_only=True)
        updates = checkpoint["optimizer"]["param_groups"][0].get("ewa_updates")
        assert updates == (checkpoint["epoch"] + 1) * UPDATES_PER_EPOCH, (
            file,
            updates,
            checkpoint["epoch"],
        )
        whole.append((updates, file))
    return sorted(whole, key=lambda pair: (pair[0], pair[1].name == "last.pth.tar")), cut


def export_is_refused(file: Path) -> None:
    program = "import sys; from timm_moe_cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "export", str(file), "out"]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    assert re.search(r"timm-moe: error: .*is damaged", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert not (file.parent / "out").exists()


def run(kills: int, seed: int, epochs: int) -> Counter:
    rng, found = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_images(folder / "images")
        resume, expected = None, 0
        while True:
            process = start(folder, epochs, resume)
            moment = kill_somewhen(process, folder, rng) if found["killed"] < kills else ""
            if not moment:
                process.wait()
            log = (folder / "log").read_text(errors="replace")
            if "EWA: averaging" in log and expected:
                assert f"continuing after update {expected}." in log, log[:3000]
                found["resumed with its share rate"] += 1
            if not moment:
                assert process.returncode == 0, log[-3000:]
                break
            found["killed"] += 1
            found[f"killed {moment}"] += 1
            whole, cut = check_files(folder)
            # Nothing but the file being written.
            assert {file.name for file in cut} <= {"tmp.pth.tar"}, cut
            found["a file was cut"] += len(cut)
            for file in cut:
                export_is_refused(file)
                found["cut file refused by export"] += 1
            assert not whole or whole[-1][0] >= expected, "updates were lost"
            if whole and not (folder / "output/train/run/last.pth.tar").exists():
                found["last.pth.tar missing, another file whole"] += 1
            if whole:
                expected, resume = whole[-1]
            print(
                f"kill {found['killed']}: {moment}, {expected} updates are safe",
                file=sys.stderr,
                flush=True,
            )
        (updates, file), cut = check_files(folder)[0][-1], check_files(folder)[1]
        assert not cut
        assert updates == epochs * UPDATES_PER_EPOCH
        timm_moe.export_dense(file, folder / "exported")
        found["updates at the end"] = updates
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=40, help="(default: %(default)s)")
    args = parser.parse_args()
    for what, count in run(args.kills, args.seed, args.epochs).items():
        print(f"{what}: {count}")
    print(f"timm_moe {timm_moe.__version__}, timm {timm.__version__}, torch {torch.__version__}")
