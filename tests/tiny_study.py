"""A study that trains in seconds, on images of 8 pixels."""

from pathlib import Path

import pytest
from train_script import SCRIPTS

pytest.importorskip("scipy")

from studies import images
from studies.runs import Place, Run
from studies.study import Images, Size, Study, Training

DENSE = Training("dense", "dense")
EWA = Training("ewa", "ewa", ("share_rate=0.3",))


def small_study(*arms, **more):
    options = [
        "--img-size",
        "8",
        "--epochs",
        "3",
        "--warmup-epochs",
        "0",
        "--opt",
        "adamw",
        "--lr",
        "1e-3",
        "-b",
        "8",
    ]
    kwargs = ("img_size=8", "patch_size=4", "embed_dim=16", "depth=2", "num_heads=2")
    models = {"dense": "vit_tiny_patch16_224", "ewa": "vit_tiny_ewa_moe"}
    size = Size(
        "tiny",
        arms,
        {"images": Images(of=2, train=(0, 8))},
        models,
        kwargs,
        tuple(options),
        range(1),
    )
    return Study("tiny", "Tiny", "Does it run?", "nothing", {"small": size}, **more)


def make_runs(study, folder, seeds=1):
    size, root = study.sizes["small"], folder / "runs"
    root.mkdir(exist_ok=True)
    parts = {
        name: images.link(part, folder / "all", root / name) for name, part in size.images.items()
    }
    place = Place(Path(SCRIPTS), root, parts)
    return [
        Run(study, size, training, seed, place)
        for seed in range(seeds)
        for training in size.trainings()
    ]
