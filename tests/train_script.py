"""timm's own train.py and validate.py in new processes, where TIMM_SCRIPTS names a folder that holds them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import run_script

SCRIPTS = os.environ.get("TIMM_SCRIPTS", "")
needs_scripts = pytest.mark.skipif(
    not SCRIPTS, reason="TIMM_SCRIPTS does not name a folder with timm's train.py and validate.py"
)


def image_folder(folder, images_per_class):
    """An ImageFolder of three classes that differ in color, with noise."""
    random = np.random.default_rng(0)
    for split, number in images_per_class.items():
        for label in range(3):
            (folder / split / f"class{label}").mkdir(parents=True)
            for index in range(number):
                pixels = random.integers(0, 130, (32, 32, 3))
                pixels[..., label] += 60
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / f"class{label}/{index}.png")
    return folder


def script(name, folder, *arguments, launcher=(), autoload="1", **env):
    if launcher or env:  # which libraries read as they are imported
        command = [sys.executable, *launcher, str(Path(SCRIPTS, name)), *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TIMM_MOE_AUTOLOAD": autoload, **env}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    else:
        done = run_script(Path(SCRIPTS, name), *arguments, cwd=folder, autoload=autoload)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def train(folder, images, *arguments, epochs=2, **env):
    return script(
        "train.py", folder,
        *("--data-dir", images, "--val-split", "test", "--epochs", epochs, "--warmup-epochs", 0),
        *("-b", 12, "-j", 1, "--device", "cpu", "--opt", "adamw", "--lr", "2e-3", "--log-interval", 1),
        *arguments, **env,  # the last of an option counts
    )  # fmt: skip


def summary(folder):
    with open(folder / "summary.csv") as file:
        return list(csv.DictReader(file))
