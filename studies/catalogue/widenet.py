"""One MoE shared by all blocks (WideNet, table 3)."""

from timm_moe.analysis.paired import UNCLEAR

from ..deploy import Export
from ..study import Arm, Finding, Study, Training, compare
from .scratch import DENSE
from .settings import imagenet, small

WIDENET = Training("widenet", "widenet")
AS_EXPERTS = Export(("--moe",))

ARMS = (
    Arm("WideNet, 2 of 4 experts", WIDENET, AS_EXPERTS, paper="79.5"),
    Arm(
        "norms shared too",
        Training("widenet-shared-norm", "widenet", ("shared_norm=True",)),
        AS_EXPERTS,
        paper="78.3",
    ),
    Arm("no experts", Training("widenet-no-experts", "ones"), paper="76.9"),
)

ALL = "WideNet, 2 of 4 experts"

FINDINGS = (
    Finding(
        "Shared norms show no clear difference: +0.04 points (-0.15 to +0.24). The paper loses "
        "1.2.",
        compare(("norms shared too",), UNCLEAR, (ALL,)),
        quoted=("1.2",),
    ),
    Finding(
        "No experts, at half the feed-forward work, show no clear difference either, but the "
        "interval (-1.91 to +0.92) is wide; the paper loses 2.6.",
        compare(("no experts",), UNCLEAR, (ALL,)),
        quoted=("2.6",),
    ),
    Finding(
        "A dense ViT whose blocks have weights of their own shows no clear difference from "
        "WideNet (-0.39 to +3.96), and computes a quarter less. (All three: three seeds.)",
        compare(("dense, blocks of their own",), UNCLEAR, (ALL,)),
    ),
)

STUDY = Study(
    name="widenet",
    title="WideNet: experts, and norms of each block",
    question="What do experts and separate norms add to a block that all layers share?",
    source="WideNet (arXiv 2107.11817), table 3, L on ImageNet",
    sizes={
        "small": small(
            (*ARMS, Arm("dense, blocks of their own", DENSE)), range(3), findings=FINDINGS
        ),
        "paper": imagenet(ARMS),
    },
)
