"""EWA and its rivals, trained from scratch (EWA, table 2)."""

from ..deploy import Export, LatestAverage
from ..study import Arm, Images, Size, Study, Training

#: As in the paper's recipe, "Vision Transformer for Small-Size Datasets" (arXiv 2112.13492), where it is stated.
AUGMENTATION = ("--smoothing", "0.1", "--mixup", "1.0", "--cutmix", "1.0", "--mixup-prob", "0.5", "--reprob", "0.25")
OPTIMIZER = ("--opt", "adamw", "--weight-decay", "0.05", "--drop-path", "0.1", "--sched-on-updates", "-b", "128")

DENSE = Training("dense", "dense", options=("--model-ema", "--model-ema-decay", "0.998", "--checkpoint-hist", "100"))


def ewa(name: str, *kwargs: str) -> Training:
    return Training(name, "ewa", kwargs)


NEVER = ewa("never-averaged", "share_rate=0")

STUDY = Study(
    name="scratch",
    title="EWA from scratch",
    question="Does a network trained as averaged experts beat the same trained alone, and EWA's plainest rivals?",
    source="EWA (arXiv 2308.06093), table 2",
    arms=(
        Arm("dense", DENSE, paper=73.93),
        Arm("dense, weight EMA", DENSE, Export(("--use-ema",))),
        Arm("dense, LAWA of the last 3 checkpoints", DENSE, LatestAverage(3)),
        Arm("dense, Switch EMA", Training("switch-ema", "dense", callback="switch_ema")),
        Arm(
            "dense, learning rate / 4 in the converted networks",
            Training("lr-over-4", "dense", callback="lr_over_experts"),
        ),
        Arm("EWA, linear", ewa("ewa-linear"), paper=75.20),
        Arm("EWA, constant", ewa("ewa-constant", "share_schedule=constant")),
        Arm("EWA, late", ewa("ewa-late", "share_schedule=late")),
        Arm("experts never averaged, their mean", NEVER),
    ),
    sizes={
        "small": Size(
            images=Images(train=(0, 125)),
            models={"dense": "vit_tiny_patch16_224", "ewa": "vit_tiny_ewa_moe"},
            kwargs=("img_size=32", "patch_size=8", "embed_dim=96", "depth=6", "num_heads=3"),
            options=(
                *("--img-size", "32", "--crop-pct", "1.0", "--mean", "0.5071", "0.4865", "0.4409"),
                *("--std", "0.2673", "0.2564", "0.2762", "--scale", "0.5", "1.0", "--color-jitter", "0"),
                *("--aa", "rand-m6-mstd0.5-inc1", "--epochs", "60", "--warmup-epochs", "5", "--lr", "1e-3"),
                *(*OPTIMIZER, *AUGMENTATION, "--checkpoint-hist", "1", "--val-interval", "5"),
            ),
            seeds=5,
        ),
        "paper": Size(
            images=Images(),
            models={"dense": "vit_xtiny", "ewa": "vit_xtiny_ewa_moe"},
            kwargs=(),
            options=(
                *("--aa", "original", "--epochs", "100", "--warmup-epochs", "10", "--lr", "3e-3"),
                *(*OPTIMIZER, *AUGMENTATION, "--checkpoint-hist", "1", "--amp", "--amp-dtype", "bfloat16"),
            ),
            seeds=5,
        ),
    },
)
