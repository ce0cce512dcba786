"""Compare share-rate schedules on scikit-learn's digits.

Usage: python examples/compare_schedules.py [SEEDS]

All runs of a seed get the same batches. The table has the test error of the exported model in
percent, mean and standard deviation over the seeds. In a clone, pip install ".[demo]" brings what
it needs.
"""

import sys
from statistics import mean, stdev

import timm
import torch

from timm_moe.analysis.demo import BATCH_SIZE, SMALL_VIT, Run, load_images, train

EPOCHS = 40
VARIANTS = {
    "no averaging": {"share_rate": 0},
    "linear": {"share_schedule": "linear"},
    "constant": {"share_schedule": "constant"},
    "early": {"share_schedule": "early"},
    "late": {"share_schedule": "late"},
}


def main(seeds: int = 5) -> None:
    torch.set_num_threads(1)
    train_set, test_set = load_images()
    steps = len(train_set[1]) // BATCH_SIZE
    errors: dict[str, list[float]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        runs = [Run("dense", timm.create_model("vit_tiny_patch16_224", **SMALL_VIT), EPOCHS, steps)]
        for name, options in VARIANTS.items():
            runs.append(
                Run(
                    name,
                    timm.create_model("vit_tiny_ewa_moe", **SMALL_VIT, **options),
                    EPOCHS,
                    steps,
                )
            )
        train(runs, train_set, test_set, seed)
        for run in runs:
            errors.setdefault(run.name, []).append(100 - run.accuracies[-1])
    for name, values in errors.items():
        print(f"{name:<14}{mean(values):6.2f} ± {stdev(values) if len(values) > 1 else 0:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
