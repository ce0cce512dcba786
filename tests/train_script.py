"""Run timm's own train.py and validate.py in new processes.

TIMM_SCRIPTS names their folder.
"""

import csv
import os
import re
import sys
from pathlib import Path

import pytest
from processes import run_new, run_script

from timm_moe.model_config import records_arguments

#: Absolute, as the scripts run in other folders. Empty if they are not there.
SCRIPTS = os.environ.get("TIMM_SCRIPTS", "") and str(Path(os.environ["TIMM_SCRIPTS"]).resolve())
#: Processes that load images: timm 1.0.28 loads none without one.
WORKERS = 0 if records_arguments() else 1
needs_scripts = pytest.mark.skipif(
    not SCRIPTS, reason="TIMM_SCRIPTS does not name a folder with timm's train.py and validate.py"
)


def script(name, folder, *arguments, launcher=(), autoload="1", **env):
    """Run a script in a folder and return what it printed; fail with its last words."""
    if launcher or env:  # libraries read these variables when they are imported
        command = [sys.executable, *launcher, str(Path(SCRIPTS, name)), *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TIMM_MOE_AUTOLOAD": autoload, **env}
        done = run_new(command, cwd=folder, env=env)
    else:
        done = run_script(Path(SCRIPTS, name), *arguments, cwd=folder, autoload=autoload)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def train(folder, images, *arguments, epochs=2, **env):
    """Run train.py; of an option that is there twice, the last one counts."""
    return script(
        "train.py",
        folder,
        *("--data-dir", images, "--val-split", "test", "--epochs", epochs, "--warmup-epochs", 0),
        *(
            "-b",
            12,
            "-j",
            WORKERS,
            "--device",
            "cpu",
            "--opt",
            "adamw",
            "--lr",
            "2e-3",
            "--log-interval",
            1,
        ),
        *arguments,
        **env,
    )


def validate(folder, images, *arguments, **env):
    """Run validate.py and return its top-1 accuracy as it is printed."""
    data = ("--data-dir", images, "--split", "test", "-b", 12, "-j", WORKERS, "--device", "cpu")
    return re.findall(
        r"\* Acc@1 ([\d.]+)", script("validate.py", folder, *data, *arguments, **env)
    )[-1]


def summary(folder):
    """The rows of summary.csv, one for each epoch."""
    with open(folder / "summary.csv") as file:
        return list(csv.DictReader(file))
