"""Fine-tuning as the pages do it: AdamW at their recipe.

The weights have learned 80 classes and are trained on 20 others.
"""

from ..deploy import Export, Soup
from ..measure import Evaluation
from ..study import Arm, Study, Training
from .finetuning import HERE, PARTS
from .recipe import RECIPES
from .settings import small

#: README.md and docs/train.md.
RECIPE = ("--opt", "adamw", "--lr", "1e-4", "--weight-decay", "0.05", "-b", "64", "--epochs", "20")
OPTIONS = (
    "--pretrained",
    "--pretrained-path",
    "{start}/model.safetensors",
    *RECIPE,
    "--warmup-epochs",
    "2",
)
#: In the last two odd blocks of six.
TOP_2 = ("num_experts=8", "top_k=2")
#: Trainings of one start, whose weights are averaged.
SOUP = 3


def tuned(
    name: str, model: str, *kwargs: str, more: tuple[str, ...] = (), draw: int = 0
) -> Training:
    return Training(
        f"adamw-{name}", model, kwargs, (*OPTIONS, *more), HERE, "images-of-20", draw=draw
    )


def draws(name: str, model: str) -> tuple[Training, ...]:
    """Make the trainings of a soup; they differ by the order of the images and what is drawn."""
    return tuple(
        tuned(f"{name}-{draw}" if draw else name, model, draw=draw) for draw in range(SOUP)
    )


def arms() -> tuple[Arm, ...]:
    dense, *more_dense = draws("dense", "dense")
    ewa, *more_ewa = draws("ewa", "ewa")
    return (
        Arm("dense", dense),
        Arm("dense, strong recipe", tuned("strong", "dense", more=RECIPES["strong"])),
        Arm("EWA, linear", ewa),
        Arm("EWA, linear, strong recipe", tuned("ewa-strong", "ewa", more=RECIPES["strong"])),
        Arm(
            "V-MoE, gates as they are",
            tuned("vmoe-prob", "vmoe", *TOP_2, "gate_mode=prob"),
            Export(("--moe",)),
        ),
        Arm(
            "V-MoE, gates renormalised",
            tuned("vmoe-renorm", "vmoe", *TOP_2, "gate_mode=renorm"),
            Export(("--moe",)),
        ),
        Arm(f"dense, soup of {SOUP}", dense, Soup(tuple(more_dense))),
        Arm(f"EWA, linear, soup of {SOUP}", ewa, Soup(tuple(more_ewa))),
    )


STUDY = Study(
    name="adamw",
    title="Fine-tuning by AdamW",
    question=(
        "What helps a network that has learned 80 classes and is fine-tuned on 20 others, by the "
        "pages' recipe?"
    ),
    source="ours",
    sizes={"small": small(arms(), images=PARTS)},
    measure=Evaluation(),
    pairs=(
        ("V-MoE, gates renormalised", "V-MoE, gates as they are"),
        ("EWA, linear, soup of 3", "dense, soup of 3"),
        ("EWA, linear, strong recipe", "dense, strong recipe"),
    ),
)
