"""EWA's choices: share rate, number, place and start of the experts.

They are those of EWA, figure 2 and its ablations.
"""

from timm_moe.analysis.paired import UNCLEAR

from ..study import Arm, Finding, Study, compare
from .scratch import DENSE, LINEAR, ewa
from .settings import paper, small

ARMS = (
    Arm("EWA, linear", LINEAR),
    Arm("dense", DENSE),
    Arm("share rate 0.1", ewa("ewa-rate-0.1", "share_rate=0.1")),
    Arm("share rate 0.5", ewa("ewa-rate-0.5", "share_rate=0.5")),
    Arm("share rate 0.01", ewa("ewa-rate-0.01", "share_rate=0.01")),
    Arm("2 experts", ewa("ewa-2", "num_experts=2")),
    Arm("8 experts", ewa("ewa-8", "num_experts=8")),
    Arm("in every block", ewa("ewa-every-1", "moe_layers=every-1")),
    Arm("in the last 2 odd blocks", ewa("ewa-last-2", "moe_layers=last-2")),
    Arm("all experts begin alike", ewa("ewa-same", "expert_init=same")),
)

RATES = ("share rate 0.1", "share rate 0.5")

FINDINGS = (
    Finding(
        "None of EWA's choices makes a clear difference from its default or from dense training "
        "(three seeds).",
        compare([arm.name for arm in ARMS[2:]], UNCLEAR, ("EWA, linear", "dense")),
    ),
    Finding(
        "Share rates of 0.1 and 0.5, the range in which the paper tunes it, differ from 0.3 by "
        "less than half a point (-0.47 to +0.34).",
        compare(RATES, UNCLEAR, ("EWA, linear",)),
        quoted=("0.1", "0.5", "0.3"),
    ),
    Finding(
        "Experts that begin alike have the highest mean, +0.59 points (-1.17 to +2.36).",
        compare(("all experts begin alike",), UNCLEAR, ("EWA, linear",)),
    ),
)

STUDY = Study(
    name="ablations",
    title="EWA: share rate, number and place of experts",
    question=(
        "Which of EWA's choices matter? The default is 4 experts in every second block, share rate "
        "0.3."
    ),
    source="EWA (arXiv 2308.06093), section 5.4",
    sizes={"small": small(ARMS, range(3), findings=FINDINGS), "paper": paper(ARMS, range(3))},
)
