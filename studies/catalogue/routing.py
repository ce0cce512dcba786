"""Routed experts, kept: the naive MoE, and Early EWA (EWA, table 5)."""

from timm_moe.analysis.paired import UNCLEAR

from ..deploy import Export
from ..study import Arm, Finding, Study, Training, compare
from .scratch import DENSE, LINEAR
from .settings import PAPER_OPTIONS, PIXELS, paper, small

NAIVE = Training("moe-naive", "moe")
EARLY = Training("moe-early", "moe", ("share_schedule=early",))
AS_EXPERTS = Export(("--moe",))

ARMS = (
    Arm("dense", DENSE, paper="72.61"),
    Arm("naive MoE", NAIVE, AS_EXPERTS, paper="72.17"),
    Arm("MoE, Early EWA", EARLY, AS_EXPERTS, paper="74.31"),
    Arm("EWA, linear", LINEAR),
)

FINDINGS = (
    Finding(
        "Routed experts, with and without averaging, show no clear difference from dense training.",
        compare(("naive MoE", "MoE, Early EWA"), UNCLEAR, ("dense",)),
    ),
    Finding(
        "Early EWA shows no clear difference from the naive MoE (-1.54 to +1.93); the paper's "
        "gain of 2.14 points, at its size, is outside.",
        compare(("MoE, Early EWA",), UNCLEAR, ("naive MoE",)),
        quoted=("2.14",),
    ),
)

STUDY = Study(
    name="routing",
    title="Naive MoE and Early EWA",
    question=(
        "Do routed experts pay, and does averaging them in the first half of the training help?"
    ),
    source="EWA (arXiv 2308.06093), table 5, ViT-S",
    sizes={
        "small": small(ARMS, range(3), findings=FINDINGS),
        "paper": paper(
            ARMS,
            range(3),
            setting="vit-s-paper",
            models={
                "dense": "vit_small_patch16_224",
                "ewa": "vit_small_ewa_moe",
                "moe": "vit_small_moe",
            },
            kwargs=("img_size=32", "patch_size=4"),
            options=(
                *(*PAPER_OPTIONS, *PIXELS, "--epochs", "300", "--warmup-epochs", "30"),
                *("--lr", "6e-4", "--weight-decay", "0.06", "--drop-path", "0"),
            ),
        ),
    },
)
