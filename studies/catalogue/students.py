"""From a sparse teacher to a dense student (OneS, table 1)."""

from timm_moe.analysis.paired import BETTER, UNCLEAR, WORSE

from ..deploy import Export
from ..study import Arm, Compared, Finding, Study, Training, Use, compare, slug
from .settings import SMALL_FURTHER, imagenet, small
from .widenet import WIDENET

#: The registered students' mean and deviation. timm prepares the teacher's images by both models'
#: configs, which ``--mean`` of train.py does not change, so the teacher must be exported with the
#: student's values.
PIXELS = ("--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5")
TEACHER = Use("teacher", WIDENET, Export(("--moe", *PIXELS)))
#: The weight of the task is the paper's alpha.
DISTILLATION = (
    *("--kd-model-name", "local-dir:{teacher}", "--kd-temperature", "1"),
    *("--task-loss-weight", "0.25", "--distill-loss-weight", "0.75"),
)


#: The last one takes everything but the experts from the teacher; it is the paper's "Switch".
METHODS = ("average", "sum", "topk", "svd", "random")
#: Distilled students of size L.
PAPER = {
    "random start": "77.3",
    "average": "78.0",
    "sum": "78.2",
    "topk": "78.4",
    "svd": "78.4",
    "random": "77.8",
}
LONG = "the student's network, trained as long as the teacher"


def student(method: str, distilled: bool, options: tuple[str, ...]) -> Arm:
    uses: list[Use] = []
    if method != "random start":
        uses.append(Use("start", WIDENET, Export(("--method", method))))
        options += ("--initial-checkpoint", "{start}/model.safetensors")
    if distilled:
        uses.append(TEACHER)
        options += DISTILLATION
    training = f"ones-{slug(method)}-{'distilled' if distilled else 'alone'}"
    how = "distilled" if distilled else "trained on"
    return Arm(
        f"{method}, {how}",
        Training(training, "ones", (), options, tuple(uses)),
        paper=PAPER[method] if distilled else "",
    )


def arms(options: tuple[str, ...]) -> tuple[Arm, ...]:
    return (
        *(
            student(method, how, options)
            for method in ("random start", *METHODS)
            for how in (False, True)
        ),
        Arm("average, not trained on", WIDENET, Export(("--method", "average"))),
        Arm("the teacher", WIDENET, Export(("--moe",)), paper="79.5"),
        Arm(LONG, Training("widenet-no-experts", "ones"), paper="76.9"),
    )


TRAINED_ON = {method: f"{method}, trained on" for method in METHODS}
DISTILLED = {method: f"{method}, distilled" for method in METHODS}

FINDINGS = (
    Finding(
        "A student from the experts' mean or top-k is 1.20 to 2.22 points better than one with "
        "new experts, distilled or not; without distillation sum and SVD are 1.68 to 1.84 points "
        "worse than the mean. Of these six, over three seeds, one is clear after Holm's "
        "correction: the mean over new experts, without distillation.",
        (
            *compare((TRAINED_ON["average"], TRAINED_ON["topk"]), BETTER, (TRAINED_ON["random"],)),
            *compare((DISTILLED["average"], DISTILLED["topk"]), BETTER, (DISTILLED["random"],)),
            *compare((TRAINED_ON["sum"], TRAINED_ON["svd"]), WORSE, (TRAINED_ON["average"],)),
        ),
    ),
    Finding(
        "Distillation adds 0.61 to 1.20 points with sum, SVD and new experts, after Holm's "
        "correction clearly with SVD alone. It makes no clear difference with mean and top-k.",
        (
            *(
                Compared(DISTILLED[method], BETTER, TRAINED_ON[method])
                for method in ("sum", "svd", "random")
            ),
            *(
                Compared(DISTILLED[method], UNCLEAR, TRAINED_ON[method])
                for method in ("average", "topk")
            ),
        ),
    ),
    Finding(
        "Nothing is saved: the same network, trained alone for the teacher's 30 epochs, is 0.71 "
        "to 2.64 points better than the five distilled students that begin from the teacher. After "
        "Holm's correction two of the five are clear, sum and SVD. In the paper it is worse.",
        compare(DISTILLED.values(), WORSE, (LONG,)),
    ),
)

STUDY = Study(
    name="students",
    title="OneS: dense students of a WideNet",
    question=(
        "Which way of gathering the experts is the best start for a dense student? Does "
        "distillation help?"
    ),
    source="OneS (arXiv 2201.10890), table 1, L on ImageNet",
    sizes={
        "small": small(arms(SMALL_FURTHER), range(3), findings=FINDINGS),
        "paper": imagenet(arms(("--lr", "0.004"))),
    },
    pairs=(
        (TRAINED_ON["topk"], TRAINED_ON["average"]),
        *((name, LONG) for name in (*TRAINED_ON.values(), "the teacher")),
    ),
)
