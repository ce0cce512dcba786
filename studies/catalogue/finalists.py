"""The second round of the search: what leads after the first, on seeds of its own."""

from ..study import Arm, Study
from .search import (
    ANNEALED,
    DENSE,
    DENSE_DROPOUT,
    DENSE_HALF,
    FUSED,
    IMAGES,
    LINEAR,
    LINEAR_DROPOUT,
    LONG,
    WHOLE_IMAGES,
)
from .settings import SMALL_OPTIONS, small

STUDY = Study(
    name="finalists",
    title="When and how to merge: the finalists",
    question="The five ways of merging that lead after the search, on three new seeds of the same classes: "
    "which of them gains most over dense training?",
    source="ours",
    sizes={
        "small": small(
            (
                Arm("dense", DENSE),
                Arm("dense, dropout 0.1", DENSE_DROPOUT),
                Arm("dense, initial weights / 2 in the converted networks", DENSE_HALF),
                Arm("linear", LINEAR),
                Arm("linear, dropout 0.1", LINEAR_DROPOUT),
                Arm("rate 0.01, begin alike, parts of whole images", WHOLE_IMAGES),
                Arm("annealed", ANNEALED),
                Arm("fused, 0.75 of a common expert", FUSED),
            ),
            range(101, 104),
            setting="cifar100-search",
            images={"images": IMAGES},
            options=(*SMALL_OPTIONS, *LONG),
        )
    },
    pairs=(
        ("linear", "dense, initial weights / 2 in the converted networks"),
        ("linear, dropout 0.1", "dense, dropout 0.1"),
    ),
)
