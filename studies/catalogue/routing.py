"""Routed experts, kept: the naive MoE, and Early EWA (EWA, table 5)."""

from ..deploy import Export
from ..study import Arm, Study, Training
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

READING = (
    "Routed experts and their averages are {naive MoE; MoE, Early EWA; EWA, linear = dense} from dense training. "
    "Early EWA is {MoE, Early EWA = naive MoE} from the naive MoE either: the interval, {interval of MoE, Early EWA = "
    "naive MoE}, leaves out the paper's gain of 2.1 points. (By the five seeds of the study of EWA from scratch, EWA "
    "with the linear rate is worse than dense training.) The routers work: at the end each of the four experts gets "
    "between 22 and 28 % of the tokens, and 2.4 % or less are dropped (train.py's log)."
)

STUDY = Study(
    name="routing",
    title="Naive MoE and Early EWA",
    question="Do routed experts pay, and does averaging them in the first half of the training help? They stay "
    "experts; EWA's are averaged.",
    source="EWA (arXiv 2308.06093), table 5, ViT-S",
    sizes={
        "small": small(ARMS, range(3)),
        "paper": paper(
            ARMS,
            range(3),
            setting="vit-s-paper",
            models={"dense": "vit_small_patch16_224", "ewa": "vit_small_ewa_moe", "moe": "vit_small_moe"},
            kwargs=("img_size=32", "patch_size=4"),
            options=(
                *(*PAPER_OPTIONS, *PIXELS, "--epochs", "300", "--warmup-epochs", "30"),
                *("--lr", "6e-4", "--weight-decay", "0.06", "--drop-path", "0"),
            ),
        ),
    },
    pairs=(("MoE, Early EWA", "naive MoE"),),
    readings={"small": READING},
)
