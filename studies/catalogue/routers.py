"""Routers at equal active FLOPs and equal parameters.

Each layer costs a dense network and holds eight.

Stated before the runs: as in arXiv 2401.15969, Soft MoE is better than Expert Choice, and that than
token choice.

The images and the medium recipe of the study ``recipe``, for half its epochs. Experts are in every
second block and begin independently. A token is never dropped, except by Expert Choice.

Budget: 21 trainings of about 7 minutes of one core, three hours with the measurements.
"""

from timm_moe.analysis.paired import BETTER, UNCLEAR, WORSE

from ..deploy import Export
from ..study import Arm, Finding, Study, Training, compare, slug
from .recipe import IMAGES, RECIPES
from .settings import OPTIMIZER, PIXELS, paper, small

TOP_1 = ("router=top_k", "num_experts=8")
HALVES = ("router=top_k", "num_experts=16", "expert_width=0.5", "top_k=2")
#: A ninth network's quarter is shared.
QUARTERS = ("router=top_k", "num_experts=32", "expert_width=0.25", "top_k=3", "shared_expert=True")


def arms(slots: int) -> tuple[Arm, ...]:
    """Compare the routers; ``slots`` for each of 8 experts are about the tokens of an image."""
    routed = {
        "top-1 of 8": TOP_1,
        "top-2 of 16 halves": HALVES,
        "top-2 of 16 halves, sigmoid and bias": (*HALVES, "score=sigmoid", "balance=bias"),
        "top-3 of 32 quarters and a shared one": QUARTERS,
        "Expert Choice of 8": ("router=expert_choice", "num_experts=8"),
        "Soft MoE of 8": ("router=soft", "num_experts=8", f"slots_per_expert={slots}"),
    }
    return (
        Arm("dense", Training("dense", "dense")),
        *(
            Arm(name, Training(slug(name), "ewa", kwargs), Export(("--moe",)))
            for name, kwargs in routed.items()
        ),
    )


def options(epochs: int, warmup: int) -> tuple[str, ...]:
    length = (
        "--epochs",
        str(epochs),
        "--warmup-epochs",
        str(warmup),
        "--lr",
        "1e-3",
        "--checkpoint-hist",
        "1",
    )
    return (*OPTIMIZER, *RECIPES["medium"], *length)


#: The arms without a clear difference from dense training, and those that are worse before Holm's
#: correction.
EQUAL = ("Soft MoE of 8", "top-2 of 16 halves, sigmoid and bias")
BELOW = (
    "top-1 of 8",
    "top-2 of 16 halves",
    "top-3 of 32 quarters and a shared one",
    "Expert Choice of 8",
)

FINDINGS = (
    Finding(
        "No router beats dense training, over three seeds. Four of the six are 1.39 to 2.25 points "
        "worse, of which none is clear after Holm's correction over the six (p = 0.10). Soft MoE "
        "(-1.80 to +1.33) and sigmoid gates with a bias (-2.91 to +0.40) show no clear difference, "
        "in wide intervals.",
        (*compare(EQUAL, UNCLEAR, ("dense",)), *compare(BELOW, WORSE, ("dense",))),
    ),
    Finding(
        "The claim before the runs was that Soft MoE is better than Expert Choice, and that than "
        "token choice. Its first half holds: Soft MoE is 1.93 points better than Expert Choice. "
        "The second half does not: Expert Choice shows no clear difference from top-1 (-1.73 to "
        "+1.12). Soft MoE is 1.63 better than top-1 (0.06 to 3.19), which is not clear after "
        "Holm's correction.",
        (
            *compare(("Soft MoE of 8",), BETTER, ("Expert Choice of 8", "top-1 of 8")),
            *compare(("Expert Choice of 8",), UNCLEAR, ("top-1 of 8",)),
        ),
    ),
    Finding(
        "Among the top-k routers, two halves for one expert, sigmoid gates with a bias for "
        "softmax with the loss, and quarters with a shared one make no clear difference.",
        (
            *compare(("top-2 of 16 halves",), UNCLEAR, ("top-1 of 8",)),
            *compare(
                ("top-2 of 16 halves, sigmoid and bias", "top-3 of 32 quarters and a shared one"),
                UNCLEAR,
                ("top-2 of 16 halves",),
            ),
        ),
    ),
)

STUDY = Study(
    name="routers",
    title="Routers compared",
    question="Which router is best at equal active FLOPs, and is one better than dense training?",
    source=(
        "ours; after arXiv 2401.15969, with biases (2408.15664) and fine-grained experts "
        "(2401.06066)"
    ),
    sizes={
        "small": small(
            arms(slots=2),
            range(400, 403),
            setting="cifar100-routers",
            images={"images": IMAGES},
            options=(*PIXELS, *options(60, 5)),
            findings=FINDINGS,
        ),
        "paper": paper(
            arms(slots=8),
            setting="cifar100-routers-paper",
            options=(*options(300, 10), "--amp", "--amp-dtype", "bfloat16"),
        ),
    },
)
