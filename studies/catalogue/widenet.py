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
    "Norms of each block's own are not seen to gain here: sharing them changes accuracy by {norms shared too - "
    "WideNet, 2 of 4 experts} points ({interval of norms shared too = WideNet, 2 of 4 experts}; the paper: -1.2). No "
    "experts at all and a ViT whose blocks have weights of their own are {no experts; dense, blocks of their own = "
    "WideNet, 2 of 4 experts} from WideNet. These intervals are three to four points wide: without experts {interval "
    "of no experts = WideNet, 2 of 4 experts}, which leaves out the paper's loss of 2.6 points, but not one of 1.9."
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
