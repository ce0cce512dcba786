"""pBE, an ensemble inside one sparse model, and its rivals (pBE, tables 3 and 9)."""

from timm_moe.analysis.paired import BETTER, UNCLEAR, WORSE

from ..deploy import Checkpoint, Export
from ..measure import Evaluation
from ..study import Arm, Compared, Finding, Study, Training, Use, compare
from .scratch import DENSE
from .settings import SMALL_FURTHER, paper, small

UPSTREAM = Training("vmoe", "vmoe", ("num_experts=8",))
#: Options of pBE's fine-tuning, for all arms.
COMMON = ("num_experts=8", "capacity_factor=1.5", "eval_capacity_factor=8.0", "expert_dropout=0.1")
#: The official V-MoE-S/32 of 8 experts, imported by ``timm-moe import-vmoe`` into the working
#: directory.
IMPORTED = "vmoe_s32/model.safetensors"


def arms(uses: tuple[Use, ...], options: tuple[str, ...], half: tuple[str, ...]) -> tuple[Arm, ...]:
    def further(
        name: str, model: str, *kwargs: str, more: tuple[str, ...] = (), draw: int = 0
    ) -> Training:
        return Training(name, model, (*COMMON, *kwargs), (*options, *more), uses, draw=draw)

    first = further("vmoe-half", "vmoe", "top_k=1", more=half)
    second = further("vmoe-other-half", "vmoe", "top_k=1", more=half, draw=1)
    return (
        Arm(
            "V-MoE, K 1",
            further("vmoe-k1", "vmoe", "top_k=1"),
            Checkpoint(),
            paper="83.10 (NLL 0.642, ECE 0.029)",
        ),
        Arm(
            "V-MoE, K 2",
            further("vmoe-k2", "vmoe", "top_k=2"),
            Checkpoint(),
            paper="83.24 (0.638, 0.033)",
        ),
        Arm("pBE, M 2, K 1", further("pbe", "pbe"), Checkpoint(), paper="83.30 (0.622, 0.018)"),
        Arm(
            "only tiling, M 2, K 2",
            further("tiling", "pbe", "ensemble=tiling", "top_k=2"),
            Checkpoint(),
            paper="83.26 (0.637, 0.028)",
        ),
        Arm("two V-MoEs, K 1, each fine-tuned half as long", second, Checkpoint(), beside=(first,)),
        Arm(
            "V-MoE, K 1, MC dropout, M 2",
            further("vmoe-k1", "vmoe", "top_k=1"),
            Checkpoint(),
            paper="82.90 (0.648, 0.019)",
            measure=Evaluation(("--mc-dropout", "2")),
        ),
        Arm(
            "MIMO in V-MoE, M 2, K 2",
            further("mimo", "mimo"),
            Checkpoint(),
            paper="83.03 (0.636, 0.028)",
        ),
    )


def dense_arms() -> tuple[Arm, ...]:
    """Fine-tune a dense ViT; the paper's checkpoint is not public."""
    # Timm would read the averaged weights of the checkpoint.
    uses = (Use("start", DENSE, Export()),)
    options = ("--initial-checkpoint", "{start}/model.safetensors", *SMALL_FURTHER)
    vit = Training("vit-further", "dense", (), options, uses)
    batch_ensemble = Training("batch-ensemble", "be", ("factor_init=normal",), options, uses)
    return (
        Arm("ViT", vit, Checkpoint(), paper="81.35 (0.688, 0.022)"),
        Arm(
            "batch ensemble in ViT, M 2", batch_ensemble, Checkpoint(), paper="81.53 (0.682, 0.021)"
        ),
    )


FURTHER = ("--initial-checkpoint", "{start}", *SMALL_FURTHER)
#: The public E³ configuration: 2,000 steps of 1,024 images.
PUBLIC = (
    "--opt",
    "momentum",
    "--lr",
    "5e-3",
    "-b",
    "1024",
    "--epochs",
    "41",
    "--warmup-epochs",
    "4",
)

PBE = "pBE, M 2, K 1"
RIVALS = (
    "V-MoE, K 2",
    "only tiling, M 2, K 2",
    "two V-MoEs, K 1, each fine-tuned half as long",
    "V-MoE, K 1, MC dropout, M 2",
    "MIMO in V-MoE, M 2, K 2",
)

FINDINGS = (
    Finding(
        "pBE is the best of the tried uses of one V-MoE, over three seeds: its NLL is 0.0812 to "
        "0.0966 better than that of five rivals, its ECE 0.0233 to 0.0427, all clear after Holm's "
        "correction. It computes half more than the V-MoE with K 1. MC dropout computes as much, "
        "tiling and the two V-MoEs more, K 2 and MIMO less. The paper finds the same of four of "
        "them, with smaller differences. An ensemble of V-MoEs that are all fine-tuned in full, "
        "which the paper finds level with pBE, was not tried.",
        (*compare((PBE,), BETTER, RIVALS, "nll"), *compare((PBE,), BETTER, RIVALS, "ece")),
    ),
    Finding(
        "The dense ViT, at two thirds of pBE's operations, shows no clear difference from it in "
        "accuracy, NLL and ECE. The V-MoE's "
        "NLL is 0.0755 worse than the ViT's; in the paper the V-MoE is 1.8 points better.",
        (
            *(Compared(PBE, UNCLEAR, "ViT", figure) for figure in ("top1", "nll", "ece")),
            Compared("V-MoE, K 1", WORSE, "ViT", "nll"),
        ),
        quoted=("1.8",),
    ),
    Finding(
        "A second choice for each token, alone (K 2) or with tiling, makes no clear difference in "
        "accuracy, NLL and ECE. MIMO loses 0.59 points of accuracy, which is not clear after "
        "Holm's correction.",
        (
            *(
                Compared(arm, UNCLEAR, "V-MoE, K 1", figure)
                for arm in RIVALS[:2]
                for figure in ("top1", "nll", "ece")
            ),
            *compare(RIVALS[4:], WORSE, ("V-MoE, K 1",)),
        ),
    ),
)

STUDY = Study(
    name="ensembles",
    title="pBE: an ensemble inside one sparse model",
    question="Are two members inside one V-MoE better than the V-MoE and than other ensembles?",
    source="pBE (arXiv 2110.03360), tables 3 and 9, B/32 on ImageNet",
    measure=Evaluation(),
    sizes={
        "small": small(
            (*arms((Use("start", UPSTREAM),), FURTHER, ("--epochs", "4")), *dense_arms()),
            range(3),
            findings=FINDINGS,
        ),
        "paper": paper(
            arms((), (), ("--epochs", "20")),
            range(3),
            setting="ensembles-paper",
            models={"vmoe": "vmoe_s32", "pbe": "vmoe_pbe_s32", "mimo": "vmoe_mimo_s32"},
            kwargs=("img_size=128",),
            options=(
                *(
                    "--pretrained",
                    "--pretrained-path",
                    IMPORTED,
                    *PUBLIC,
                    "--img-size",
                    "128",
                    "--sched-on-updates",
                ),
                *(
                    "--clip-grad",
                    "10",
                    "--checkpoint-hist",
                    "1",
                    "--amp",
                    "--amp-dtype",
                    "bfloat16",
                ),
            ),
        ),
    },
    pairs=(("batch ensemble in ViT, M 2", "ViT"),),
)
