"""EWA and its rivals, trained from scratch (EWA, table 2)."""

from timm_moe.analysis.paired import BETTER, UNCLEAR, WORSE

from ..deploy import Export, LatestAverage
from ..study import Arm, Finding, Study, Training, Use, compare
from .settings import paper, small

DENSE = Training("dense", "dense", options=("--model-ema", "--checkpoint-hist", "100"))


def ewa(name: str, *kwargs: str) -> Training:
    return Training(name, "ewa", kwargs)


LINEAR = ewa("ewa-linear")
#: Experts that are averaged only at the end.
NEVER = ewa("never-averaged", "share_rate=0")
#: Only the weights of the experts are learned, in few epochs.
MERGE = Training(
    "xft-merge",
    "ewa",
    ("router=fused",),
    ("--initial-checkpoint", "{start}", "--epochs", "2", "--warmup-epochs", "0", "--lr", "1e-2"),
    (Use("start", NEVER),),
    callback="only_fusion",
)

#: Switch EMA with a window of six epochs hardly learned: 8.67 % top-1, and dense training 18.30
#: (one seed).
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

MEAN = "experts never averaged, their mean"
MERGED_AT_THE_END = tuple(arm.name for arm in ARMS if arm.name.startswith("experts never averaged"))

FINDINGS = (
    Finding(
        "EWA does not beat dense training. By default (linear) it is 0.31 points worse (0.11 to "
        "0.50), with the late one 0.54; constant and early rates make no clear difference. Both "
        "are clear after Holm's correction over these four. The 0.31 is not clear over EWA's six "
        "trainings in the table at the head of the page.",
        (
            *compare(("EWA, linear", "EWA, late"), WORSE, ("dense",)),
            *compare(("EWA, constant", "EWA, early"), UNCLEAR, ("dense",)),
        ),
    ),
    Finding(
        "Averaging after every step (linear, constant, early) is 0.58 to 0.79 points better than "
        "averaging at the end. Experts merged only at the end lose 0.79 to 1.58 points to dense "
        "training.",
        (
            *compare(("EWA, linear", "EWA, constant", "EWA, early"), BETTER, (MEAN,)),
            *compare(MERGED_AT_THE_END, WORSE, ("dense",)),
        ),
    ),
    Finding(
        "Simpler averages of the dense network's weights: weight EMA gains 0.03 points (0.01 to "
        "0.05), LAWA makes no clear difference, Switch EMA loses 1.94. EWA is 0.34 points worse "
        "than weight EMA and 0.35 worse than LAWA.",
        (
            *compare(("dense, weight EMA",), BETTER, ("dense",)),
            *compare(("dense, LAWA of the last 3 epochs",), UNCLEAR, ("dense",)),
            *compare(("dense, Switch EMA",), WORSE, ("dense",)),
            *compare(
                ("EWA, linear",), WORSE, ("dense, weight EMA", "dense, LAWA of the last 3 epochs")
            ),
        ),
    ),
    Finding(
        "ExFusion, a quarter of the learning rate and half the initial weights show no clear "
        "difference from dense training or EWA.",
        (
            *compare(
                (
                    "experts fused by learned weights (ExFusion)",
                    "dense, learning rate / 4 in the converted networks",
                    "dense, initial weights / 2 in the converted networks",
                ),
                UNCLEAR,
                ("dense", "EWA, linear"),
            ),
        ),
    ),
)

STUDY = Study(
    name="scratch",
    title="EWA from scratch",
    question="Does EWA beat dense training and simpler rivals?",
    source="EWA (arXiv 2308.06093), table 2, ViT-XT on CIFAR-100",
    sizes={"small": small(ARMS, findings=FINDINGS), "paper": paper(ARMS)},
    pairs=(
        ("EWA, linear", "dense, weight EMA"),
        ("EWA, linear", "dense, LAWA of the last 3 epochs"),
        ("EWA, late", MEAN),
    ),
)
