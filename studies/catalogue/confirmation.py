"""The leaders of the search, on classes and seeds that it never saw, beside what may explain the gain."""

from ..study import Arm, Images, Study, Training
from .search import ANNEALED, DENSE, DENSE_DROPOUT, DENSE_HALF, DROPOUT, FUSED, HALF, LINEAR, LINEAR_DROPOUT, LONG
from .settings import SMALL_OPTIONS, small

IMAGES = Images(classes=(20, 40), train=(0, 200), held_out=(200, 500))

READING = (
    "Of the four ways of merging, linear alone is better than dense training, by 0.68 points; the search saw 1.80. Its "
    "interval begins just above zero. With seven intervals, chance alone leaves zero out of one in three studies of "
    "ten. Dropout alone is better than dense training by as narrow a margin, and linear is not told apart from it, "
    "nor from dense training that begins with half the weights in the same networks. On top of linear, dropout is not "
    "seen to gain. Dense training with both, half the initial weights and dropout, leads: it is 1.15 points above "
    "dense training, and better than linear with dropout. It is not told apart from linear without it. The annealed "
    "schedule and the common expert are not told apart from dense training. So nothing here asks for experts: no "
    "schedule is recommended over dense training, and none gets a name."
)

STUDY = Study(
    name="confirmation",
    title="When and how to merge: the confirmation",
    question="Do the leaders of the search beat dense training on 20 other classes and 5 other seeds, and do they gain "
    "more than initial weights of half the size, or dropout?",
    source="ours",
    sizes={
        "small": small(
            (
                Arm("dense", DENSE),
                Arm("dense, dropout 0.1", DENSE_DROPOUT),
                Arm("dense, initial weights / 2 in the converted networks", DENSE_HALF),
                Arm(
                    "dense, initial weights / 2, dropout 0.1",
                    Training("dense-begin-dropout", "dense", (DROPOUT,), callback=HALF),
                ),
                Arm("linear", LINEAR),
                Arm("linear, dropout 0.1", LINEAR_DROPOUT),
                Arm("annealed", ANNEALED),
                Arm("fused, 0.75 of a common expert", FUSED),
            ),
            range(200, 205),
            setting="cifar100-confirmation",
            images={"images": IMAGES},
            options=(*SMALL_OPTIONS, *LONG),
        )
    },
    pairs=(
        ("linear", "dense, initial weights / 2 in the converted networks"),
        ("linear", "dense, dropout 0.1"),
        ("linear, dropout 0.1", "linear"),
        ("linear, dropout 0.1", "dense, dropout 0.1"),
        ("dense, initial weights / 2, dropout 0.1", "linear"),
        ("dense, initial weights / 2, dropout 0.1", "linear, dropout 0.1"),
        ("dense, initial weights / 2, dropout 0.1", "dense, dropout 0.1"),
    ),
    readings={"small": READING},
)
