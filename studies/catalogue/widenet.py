"""One MoE shared by all blocks (WideNet, table 3)."""

from ..deploy import Export
from ..study import Arm, Study, Training
from .scratch import DENSE
from .settings import imagenet, small

WIDENET = Training("widenet", "widenet")
AS_EXPERTS = Export(("--moe",))

ARMS = (
    Arm("WideNet, 2 of 4 experts", WIDENET, AS_EXPERTS, paper="79.5"),
    Arm(
        "norms shared too", Training("widenet-shared-norm", "widenet", ("shared_norm=True",)), AS_EXPERTS, paper="78.3"
    ),
    Arm("no experts", Training("widenet-no-experts", "ones"), paper="76.9"),
)

READING = (
    "Norms of each block's own give nothing here: sharing them changes less than a quarter of a point (the paper: 1.2 "
    "points). Experts are not told apart from none, nor WideNet from a ViT whose blocks have weights of their own. "
    "These intervals are three to four points wide, so the paper's gain by experts, 2.6 points, is left out, but one "
    "of nearly two is not."
)

STUDY = Study(
    name="widenet",
    title="WideNet: experts, and norms of each block",
    question="What do experts, and norms of their own, give to a block that all layers share?",
    source="WideNet (arXiv 2107.11817), table 3, L on ImageNet",
    sizes={
        "small": small((*ARMS, Arm("dense, blocks of their own", DENSE)), range(3)),
        "paper": imagenet(ARMS),
    },
    readings={"small": READING},
)
