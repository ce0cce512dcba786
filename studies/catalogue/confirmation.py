"""The leaders of the search, on classes and seeds that it never saw, beside what may explain the gain."""

from ..deploy import Export
from ..study import Arm, Images, Study, Training
from .search import (
    ANNEALED,
    DENSE,
    DENSE_DROPOUT,
    DENSE_HALF,
    DROPOUT,
    FUSED,
    HALF,
    LINEAR,
    LINEAR_DROPOUT,
    LONG,
    candidate,
)
from .settings import SMALL_OPTIONS, small

IMAGES = Images(classes=(20, 40), train=(0, 200), held_out=(200, 500))

READING = (
    "Of the four ways of merging that led the search, only linear is better than dense training, by {linear > dense} "
    "points ({interval of linear > dense}). The search saw 1.80; twice the paper's gain would be 2.54. If no arm "
    "differed, ten intervals would still show a difference in four studies of ten. EMA is {dense, weight EMA = dense} "
    "from dense training, so linear is better than it by about as much ({interval of linear > dense, weight EMA}). A "
    "quarter of the learning rate in the same networks and experts that are never averaged are {dense, learning rate "
    "/ 4 in the converted networks; experts never averaged, their mean = dense; linear} from dense training, nor from "
    "linear. Dropout alone is better than dense training by as narrow a margin as linear ({interval of dense, dropout "
    "0.1 > dense}). Linear is {linear = dense, dropout 0.1; dense, initial weights / 2 in the converted networks} "
    "from it, nor from dense training that begins with half the weights in the same networks. Linear and dropout "
    "together are {linear, dropout 0.1 = linear; dense, dropout 0.1; dense} from either alone, nor from neither. "
    "Dense training with both, half the initial weights and dropout, has the highest mean: it is {dense, initial "
    "weights / 2, dropout 0.1 > dense} points above dense training, and {dense, initial weights / 2, dropout 0.1 > "
    "linear, dropout 0.1} above linear with dropout. It is {dense, initial weights / 2, dropout 0.1 = linear} from "
    "linear without dropout. The annealed schedule and the common expert are {annealed; fused, 0.75 of a common "
    "expert = dense} from dense training. So nothing here asks for experts, and no schedule is recommended over dense "
    "training. (EMA, the smaller learning rate and experts that are never averaged came later, on another kind of "
    "CPU. There dense training was repeated for EMA, and gave the same top-1 in all five seeds.)"
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
                Arm("dense, weight EMA", DENSE, Export(("--use-ema",))),
                Arm("dense, dropout 0.1", DENSE_DROPOUT),
                Arm(
                    "dense, learning rate / 4 in the converted networks",
                    Training("dense-slow", "dense", callback="lr_divided=every-2/4"),
                ),
                Arm("dense, initial weights / 2 in the converted networks", DENSE_HALF),
                Arm(
                    "dense, initial weights / 2, dropout 0.1",
                    Training("dense-begin-dropout", "dense", (DROPOUT,), callback=HALF),
                ),
                Arm("experts never averaged, their mean", candidate("never", "share_rate=0")),
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
        ("linear", "dense, weight EMA"),
        ("linear", "dense, learning rate / 4 in the converted networks"),
        ("linear", "experts never averaged, their mean"),
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
