"""EWA as near its paper as minutes of one GPU reach: ViT-XT on all of CIFAR-100 with the paper's augmentation.

Only the epochs are fewer: 10 in place of 100. The paper tunes the share rate for each model. So one seed of three rates
comes first, on two cores: with patches of 8 pixels in place of 4, and in float32. The best one and 0.3 go on.
"""

from ..study import Arm, Study, Training
from .settings import AUGMENTATION, OPTIMIZER, paper

OPTIONS = (
    *("--aa", "original", "--epochs", "10", "--warmup-epochs", "1", "--lr", "3e-3"),
    *(*OPTIMIZER, *AUGMENTATION, "--checkpoint-hist", "1"),
)


def ewa(rate: float) -> Arm:
    return Arm(f"EWA, share rate {rate}", Training(f"ewa-{rate}", "ewa", (f"share_rate={rate}",)), paper="75.20")


STUDY = Study(
    name="nearest",
    title="EWA near the paper",
    question="Does EWA beat dense training of the paper's model, with its images and augmentation, in a tenth of its "
    "epochs? On two cores, which share rate is best? (One seed, to choose what is repeated.)",
    source="EWA (arXiv 2308.06093), table 2, ViT-XT on CIFAR-100",
    sizes={
        "small": paper(
            (ewa(0.3), ewa(0.1), ewa(0.5)),
            range(400, 401),
            setting="cifar100-nearest",
            kwargs=("patch_size=8",),
            options=OPTIONS,
        ),
        "paper": paper(
            (Arm("dense", Training("dense", "dense"), paper="73.93"), ewa(0.3)),
            range(401, 404),
            setting="cifar100-nearest-paper",
            options=(*OPTIONS, "--amp", "--amp-dtype", "bfloat16"),
        ),
    },
)
