"""When and how to merge experts: a search on held-out training images.

Each candidate has one seed.

The study ``confirmation`` repeats the leaders. Few images are seen 100 times, so that
regularization has something to gain; in the other studies a network has not learned its training
images after 30 epochs.
"""

from timm_moe.analysis.paired import TOO_FEW

from ..deploy import Export
from ..study import Arm, Finding, Images, Study, Training, compare
from .settings import SMALL_OPTIONS, small

#: The first twenty classes; the others stay untouched for the confirmation.
IMAGES = Images(classes=(0, 20), train=(0, 200), held_out=(200, 500))
LONG = ("--epochs", "100", "--warmup-epochs", "10")
EMA = ("--model-ema",)


def candidate(
    name: str, *kwargs: str, options: tuple[str, ...] = (), callback: str = ""
) -> Training:
    return Training(name, "ewa", kwargs, options, callback=callback)


DROPOUT = "proj_drop_rate=0.1"
#: The networks that EWA would convert start as small as a mean of four independent ones.
HALF = "begin_divided=every-2/2"

DENSE = Training("dense", "dense", options=EMA)
DENSE_DROPOUT = Training("dense-dropout", "dense", (DROPOUT,))
DENSE_HALF = Training("dense-begin", "dense", callback=HALF)
LINEAR = candidate("linear", options=EMA)
LINEAR_DROPOUT = candidate("linear-dropout", DROPOUT)

SAME = "expert_init=same"
#: At a constant rate of 0.3 the experts stay within 1 % of their mean, so other changes have little
#: effect. At this rate they are more than 10 % away from it.
APART = (SAME, "share_schedule=constant", "share_rate=0.01")

ANNEALED = candidate("annealed", callback="annealed")
FUSED = candidate("common", "router=fused", "common_share=0.75")

FINDINGS = (
    Finding(
        "All arms are above dense training: either they gain by regularization, as dropout does "
        "(+1.65 points), or this seed of dense training is a low one.",
        compare(("dense, dropout 0.1",), TOO_FEW, ("dense",)),
    ),
    Finding(
        "Linear gains +1.80 points, with dropout +2.32. Dense training gains +1.93 if the "
        "converted networks begin with half their weights.",
        compare(
            (
                "linear",
                "linear, dropout 0.1",
                "dense, initial weights / 2 in the converted networks",
            ),
            TOO_FEW,
            ("dense",),
        ),
    ),
)

STUDY = Study(
    name="search",
    title="When and how to merge: the search",
    question=(
        "Which ways of merging are worth a second look? One seed of each, on held-out training "
        "images of 20 classes."
    ),
    source="ours",
    sizes={
        "small": small(
            (
                Arm("dense", DENSE),
                Arm("dense, weight EMA", DENSE, Export(("--use-ema",))),
                Arm("dense, dropout 0.1", DENSE_DROPOUT),
                Arm("dense, initial weights / 2 in the converted networks", DENSE_HALF),
                Arm("linear", LINEAR),
                Arm("linear, weight EMA", LINEAR, Export(("--use-ema",))),
                Arm("linear, dropout 0.1", LINEAR_DROPOUT),
                Arm(
                    "constant, begin alike",
                    candidate("constant-same", SAME, "share_schedule=constant"),
                ),
                Arm("rate 0.01, begin alike", candidate("apart", *APART)),
                Arm(
                    "rate 0.01, begin alike, by depth",
                    candidate("by-depth", *APART, callback="rate_by_depth"),
                ),
                Arm(
                    "rate 0.01, begin alike, parts of whole images",
                    candidate("whole-images", *APART, callback="whole_images"),
                ),
                Arm(
                    "rate 0.01, begin alike, learning rate of the experts x 4",
                    candidate("fast-experts", *APART, callback="lr_divided=every-2/0.25"),
                ),
                Arm(
                    "rate 0.01, begin alike, every block",
                    candidate("every-1", *APART, "moe_layers=every-1"),
                ),
                Arm("late, begin alike", candidate("late-same", SAME, "share_schedule=late")),
                Arm("never, begin alike", candidate("never-same", SAME, "share_rate=0")),
                Arm("cyclic, begin alike", candidate("cyclic", SAME, callback="cyclic")),
                Arm("annealed", ANNEALED),
                Arm("last tenth, begin alike", candidate("last", SAME, callback="last")),
                Arm("fused, 0.75 of a common expert", FUSED),
            ),
            range(100, 101),
            setting="cifar100-search",
            images={"images": IMAGES},
            options=(*SMALL_OPTIONS, *LONG),
            findings=FINDINGS,
        )
    },
    pairs=(
        ("linear", "dense, initial weights / 2 in the converted networks"),
        ("linear", "dense, dropout 0.1"),
        ("linear, dropout 0.1", "dense, dropout 0.1"),
    ),
)
