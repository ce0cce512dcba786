"""EWA and its rivals, trained from scratch (EWA, table 2)."""

from ..deploy import Export, LatestAverage
from ..study import Arm, Study, Training, Use
from .settings import paper, small

DENSE = Training("dense", "dense", options=("--model-ema", "--checkpoint-hist", "100"))


def ewa(name: str, *kwargs: str) -> Training:
    return Training(name, "ewa", kwargs)


LINEAR = ewa("ewa-linear")
#: Never averaged until the end.
NEVER = ewa("never-averaged", "share_rate=0")
#: Weights of equal experts are learned in few epochs, with nothing else.
MERGE = Training(
    "xft-merge",
    "ewa",
    ("router=fused",),
    ("--initial-checkpoint", "{start}", "--epochs", "2", "--warmup-epochs", "0", "--lr", "1e-2"),
    (Use("start", NEVER),),
    callback="only_fusion",
)

#: Switch EMA with a window of six epochs hardly learned: 8.67 % top-1 where dense training had 18.30 (one seed).
ARMS = (
    Arm("dense", DENSE, paper="73.93"),
    Arm("dense, weight EMA", DENSE, Export(("--use-ema",))),
    Arm("dense, LAWA of the last 3 epochs", DENSE, LatestAverage(3)),
    Arm("dense, Switch EMA", Training("switch-ema", "dense", callback="switch_ema=0.5")),
    Arm(
        "dense, learning rate / 4 in the converted networks",
        Training("lr-over-4", "dense", callback="lr_divided=every-2/4"),
    ),
    Arm(
        "dense, initial weights / 2 in the converted networks",
        Training("half-begin", "dense", callback="begin_divided=every-2/2"),
    ),
    Arm("EWA, linear", LINEAR, paper="75.20"),
    Arm("EWA, constant", ewa("ewa-constant", "share_schedule=constant")),
    Arm("EWA, late", ewa("ewa-late", "share_schedule=late")),
    Arm("EWA, early", ewa("ewa-early", "share_schedule=early")),
    Arm("experts never averaged, their mean", NEVER),
    *(
        Arm(f"experts never averaged, gathered by {method}", NEVER, Export(("--method", method)))
        for method in ("sum", "topk", "svd")
    ),
    Arm("experts never averaged, merged by learned weights (XFT)", MERGE),
    Arm("experts fused by learned weights (ExFusion)", ewa("exfusion", "router=fused")),
)

READING = (
    "EWA does not beat dense training here. With its linear share rate, the default, it is {EWA, linear < dense} "
    "points worse; with the late one {EWA, late < dense}. Constant and early rates, LAWA, ExFusion, a smaller "
    "learning rate and initial weights of half the size are {EWA, constant; EWA, early; dense, LAWA of the last 3 "
    "epochs; experts fused by learned weights (ExFusion); dense, learning rate / 4 in the converted networks; dense, "
    "initial weights / 2 in the converted networks = dense} from dense training. EWA with the linear rate is {EWA, "
    "linear < dense, weight EMA; dense, LAWA of the last 3 epochs} points worse than EMA and LAWA. It is {EWA, linear "
    "= experts fused by learned weights (ExFusion); dense, learning rate / 4 in the converted networks; dense, "
    "initial weights / 2 in the converted networks} from ExFusion, the smaller learning rate and the smaller initial "
    "weights. (The mean of four experts that are drawn apart begins with weights of half the size, too.) An average "
    "over steps (EMA) is better than dense training by {dense, weight EMA > dense} points, which nobody would notice. "
    "Averaging after every step is better than never averaging, by {EWA, linear; EWA, constant; EWA, early > experts "
    "never averaged, their mean} points with a linear, a constant or an early rate; the late one is {EWA, late = "
    "experts never averaged, their mean} from it. Experts that become one network only at the end, in whatever way, "
    "lose {experts never averaged, their mean; experts never averaged, gathered by sum; experts never averaged, "
    "gathered by topk; experts never averaged, gathered by svd; experts never averaged, merged by learned weights "
    "(XFT) < dense} points to dense training. With the linear rate the experts' distance from their mean falls from "
    "25 % of its norm to 4 % within the second of 30 epochs (`experts.json`). From then on EWA is nearly dense "
    "training. The paper's gain is of ViTs that are trained longer, on five times as many images."
)

STUDY = Study(
    name="scratch",
    title="EWA from scratch",
    question="Does a network trained as averaged experts beat the same trained alone, and EWA's plainest rivals?",
    source="EWA (arXiv 2308.06093), table 2, ViT-XT on CIFAR-100",
    sizes={"small": small(ARMS), "paper": paper(ARMS)},
    pairs=(
        ("EWA, linear", "dense, weight EMA"),
        ("EWA, linear", "dense, LAWA of the last 3 epochs"),
        ("EWA, linear", "dense, learning rate / 4 in the converted networks"),
        ("EWA, linear", "dense, initial weights / 2 in the converted networks"),
        ("EWA, linear", "experts fused by learned weights (ExFusion)"),
        *(
            (f"EWA, {schedule}", "experts never averaged, their mean")
            for schedule in ("linear", "constant", "late", "early")
        ),
    ),
    readings={"small": READING},
)
