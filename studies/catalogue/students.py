"""From a sparse teacher to a dense student (OneS, table 1)."""

from ..deploy import Export
from ..study import Arm, Study, Training, Use, slug
from .settings import SMALL_FURTHER, imagenet, small
from .widenet import WIDENET

#: Of the registered students. timm prepares the teacher's images by both models' configs, which ``--mean`` of train.py
#: does not change. So the teacher's config has to be the student's, or it sees images of another contrast.
PIXELS = ("--mean", "0.5", "0.5", "0.5", "--std", "0.5", "0.5", "0.5")
TEACHER = Use("teacher", WIDENET, Export(("--moe", *PIXELS)))
#: The weight of the task is the paper's alpha.
DISTILLATION = (
    *("--kd-model-name", "local-dir:{teacher}", "--kd-temperature", "1"),
    *("--task-loss-weight", "0.25", "--distill-loss-weight", "0.75"),
)


#: The last one, where all but the experts is the teacher's, is the paper's "Switch".
METHODS = ("average", "sum", "topk", "svd", "random")
#: Distilled, of the L size.
PAPER = {"random start": "77.3", "average": "78.0", "sum": "78.2", "topk": "78.4", "svd": "78.4", "random": "77.8"}
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
        *(student(method, how, options) for method in ("random start", *METHODS) for how in (False, True)),
        Arm("average, not trained on", WIDENET, Export(("--method", "average"))),
        Arm("the teacher", WIDENET, Export(("--moe",)), paper="79.5"),
        Arm(LONG, Training("widenet-no-experts", "ones"), paper="76.9"),
    )


READING = (
    "A student that starts from the teacher's gathered weights is {average, trained on; topk, trained on; sum, "
    "trained on; svd, trained on > random start, trained on} points above one from a random start, after the same 8 "
    "epochs. Most of that comes from attention and all else that is not an expert: with new experts (the arm called "
    "random) the student is {random, trained on > random start, trained on} points above. The mean and top-k are "
    "{average, trained on; topk, trained on > random, trained on} points better than new experts, {average, "
    "distilled; topk, distilled > random, distilled} where all are distilled. Sum and SVD are {sum, trained on; svd, "
    "trained on < average, trained on} points worse than the mean, and end near new experts; in the paper they are as "
    "good as top-k, or nearly. Distillation adds {sum, distilled > sum, trained on} points with the sum, {svd, "
    "distilled > svd, trained on} with SVD, {random, distilled > random, trained on} with new experts, and {random "
    "start, distilled > random start, trained on} from a random start; with the mean, the distilled student and the "
    "other are {average, distilled = average, trained on}, and with top-k they are {topk, distilled = topk, trained "
    "on} either. But nothing is saved. The same network, trained alone for the 30 epochs of the teacher, takes "
    "neither the teacher's experts nor the student's 8 epochs. The distilled students are {average, distilled; sum, "
    "distilled; topk, distilled; svd, distilled; random, distilled < the student's network, trained as long as the "
    "teacher} points below it. The two best are not far below: {topk, distilled < the student's network, trained as "
    "long as the teacher} points ({interval of topk, distilled < the student's network, trained as long as the "
    "teacher}) for top-k and {average, distilled < the student's network, trained as long as the teacher} ({interval "
    "of average, distilled < the student's network, trained as long as the teacher}, which just leaves out zero) for "
    "the mean. Of the students that are not distilled, those of sum, SVD and new experts are {sum, trained on; svd, "
    "trained on; random, trained on < the student's network, trained as long as the teacher} points below it; mean "
    "and top-k have means below it, but are {average, trained on; topk, trained on = the student's network, trained "
    "as long as the teacher}. In the paper the distilled students are better than that network: by 0.4 points from a "
    "random start, by 0.9 with new experts, by 1.1 to 1.5 from gathered weights. There the teacher is 2.6 points "
    "better than it; here {the teacher - the student's network, trained as long as the teacher}, which is {the "
    "teacher = the student's network, trained as long as the teacher}."
)

STUDY = Study(
    name="students",
    title="OneS: dense students of a WideNet",
    question="Which way of gathering the experts is the best start for a dense student, and does distillation help?",
    source="OneS (arXiv 2201.10890), table 1, L on ImageNet",
    sizes={
        "small": small(arms(SMALL_FURTHER), range(3)),
        "paper": imagenet(arms(("--lr", "0.004"))),
    },
    readings={"small": READING},
    pairs=(
        *((f"{method}, distilled", f"{method}, trained on") for method in METHODS),
        *((f"{method}, trained on", "average, trained on") for method in METHODS[1:]),
        ("topk, trained on", "random, trained on"),
        *((f"{method}, distilled", "random, distilled") for method in ("average", "topk")),
        *((f"{method}, distilled", LONG) for method in METHODS),
        *((f"{method}, trained on", LONG) for method in METHODS),
        ("the teacher", LONG),
    ),
)
