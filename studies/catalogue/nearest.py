"""EWA as near its paper as two cores reach: ViT-XT on all of CIFAR-100 with the paper's augmentation.

Patches of 8 pixels in place of 4 and 20 epochs in place of 100 fit the budget of 20 hours of one core: an epoch takes
4 minutes, and there are at most 12 trainings. It is computed in float32: bfloat16 took 1.8 and 2.5 times as long on
CPUs that have units for it (AMD with AVX-512, Intel with AMX, torch 2.14).

The paper tunes the share rate for each model. So one seed of three rates comes first; the best one and 0.3 go on.
"""

from ..study import Arm, Study, Training
from .settings import AUGMENTATION, OPTIMIZER, paper

OPTIONS = (
    *("--aa", "original", "--epochs", "20", "--warmup-epochs", "2", "--lr", "3e-3"),
    *(*OPTIMIZER, *AUGMENTATION, "--checkpoint-hist", "1"),
)


def ewa(rate: float) -> Arm:
    return Arm(f"EWA, share rate {rate}", Training(f"ewa-{rate}", "ewa", (f"share_rate={rate}",)), paper="75.20")


STUDY = Study(
    name="nearest-rates",
    title="EWA near the paper: the share rate",
    question="Which share rate is best for ViT-XT/8 on all of CIFAR-100? One seed, to choose what is repeated.",
    source="EWA (arXiv 2308.06093), table 2, ViT-XT on CIFAR-100",
    sizes={
        "small": paper(
            (ewa(0.3), ewa(0.1), ewa(0.5)),
            range(400, 401),
            setting="cifar100-nearest",
            kwargs=("patch_size=8",),
            options=OPTIONS,
        )
    },
)
