"""Study ``near`` on images of noise: do its trainings run, and all that follows them?

``python -m studies.smoke FOLDER`` trains the dense model and EWA at once on a GPU, with the options
of size ``paper`` but for three epochs, exports both and evaluates them. The runs are in FOLDER.
With ``--device cpu`` the models are tiny, and nothing is compiled into kernels.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from timm_moe.checkpoints.summary_csv import read_summary

from .catalogue import STUDIES
from .runs import Place, Run
from .scheduler import work_off
from .study import Size

STUDY = STUDIES["near"]
#: Training images of each of the 100 classes: of 20 batches, or of one.
PER_CLASS = {"cuda": 26, "cpu": 2}
SHORT = ("--epochs", "3", "--warmup-epochs", "1", "--val-interval", "1", "--log-interval", "5")
TINY = ("embed_dim=24", "depth=2", "num_heads=2")
#: The options of size ``paper`` that need a GPU, replaced.
ON_CPU = ("--torchcompile", "aot_eager", "--torchcompile-mode", "default")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.smoke", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for images and runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    runs = runs_of(args.device, args.folder)
    failed = work_off(runs, len(runs), lambda run: None)
    for run in runs:
        failed += check(run)
    if failed:
        sys.exit("\n".join(["Not done:", *failed]))


def runs_of(device: str, folder: Path) -> list[Run]:
    """Make the runs of one seed, with their images."""
    size = short(STUDY.sizes["paper"], device)
    write_noise(folder / "noise", PER_CLASS[device])
    place = Place.of(size, folder, folder / "noise", device)
    return [Run(STUDY, size, training, size.seeds.start, place) for training in size.trainings()]


def short(size: Size, device: str) -> Size:
    """Shorten the trainings of a size."""
    if device == "cuda":
        return replace(size, options=(*size.options, *SHORT))
    return replace(size, options=(*size.options, *SHORT, *ON_CPU), kwargs=(*size.kwargs, *TINY))


def write_noise(folder: Path, per_class: int) -> None:
    """Write images of noise in 100 classes, one of each for the test."""
    rng = np.random.default_rng(0)
    for split, number in (("train", per_class), ("test", 1)):
        for name in range(100):
            target = folder / split / f"{name:02}"
            target.mkdir(parents=True, exist_ok=True)
            for count in range(number):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(target / f"{count}.png")


def check(run: Run) -> list[str]:
    """Print the losses and the figures of a run; return what is wrong with them."""
    results = run.results()
    losses = [row["train_loss"] for row in read_summary(run.folder / "train", ("train_loss",))]
    print(f"{run.name}: losses {losses}, {results['arms']}", flush=True)
    if losses and all(map(math.isfinite, losses)):
        return []
    return [f"{run.name}: its losses are {losses}."]


if __name__ == "__main__":
    main()
