"""EWA's choices: share rate, number and place of experts, how they begin (EWA, figure 2 and its ablations)."""

from ..study import Arm, Study
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

READING = (
    "None of EWA's choices is seen to matter here, by three seeds. Share rates of 0.1 and 0.5 are {share rate 0.1; "
    "share rate 0.5 = EWA, linear; dense} from 0.3, the default, nor from dense training; with the default, the "
    "intervals reach from {interval of share rate 0.1; share rate 0.5 = EWA, linear}. The paper tunes the rate in "
    "this range. (That both have the same mean is chance: the figures of their seeds are not the same.) All other "
    "arms are {share rate 0.01; 2 experts; 8 experts; in every block; in the last 2 odd blocks; all experts begin "
    "alike = EWA, linear; dense} either, from EWA or from dense training. Experts that begin alike lead, by {all "
    "experts begin alike - EWA, linear} points ({interval of all experts begin alike = EWA, linear})."
)

STUDY = Study(
    name="ablations",
    title="EWA: share rate, number and place of experts",
    question="Which of EWA's choices matter? (E 4, every second block and share rate 0.3, unless said.)",
    source="EWA (arXiv 2308.06093), section 5.4",
    pairs=tuple((arm.name, "dense") for arm in ARMS[2:]),
    sizes={"small": small(ARMS, range(3)), "paper": paper(ARMS, range(3))},
    readings={"small": READING},
)
