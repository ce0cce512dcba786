"""The parts of a study.

They are trainings by train.py, the models made from them, the images, and the comparisons.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product

from .deploy import Checkpoint, Deployment, Export
from .measure import Measure, Validation

#: Files and folders of every run; no arm may have their names.
RESERVED = ("train", "stated", "trained", "log")


@dataclass(frozen=True)
class Images:
    """A part of a folder of images, ``train/<class>/`` and ``test/<class>/``.

    Attributes:
        of: number of classes of the whole folder; a folder with another number is refused.
        classes: slice of the classes in alphabetical order.
        train: slice of the training images of each class in alphabetical order.
        held_out: slice of the training images of each class that models are evaluated on, where the
            result decides a choice; by default models are evaluated on all test images.
    """

    of: int = 100
    classes: tuple[int | None, ...] = (None,)
    train: tuple[int | None, ...] = (None,)
    held_out: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Training:
    """One run of train.py for each seed.

    Attributes:
        name: name of the folder of its runs.
        model: key into the models of the size.
        kwargs: arguments of the model, added to the size's.
        options: options of train.py, added to the size's. ``{name}`` is the path of the use of that
            name.
        uses: results of other trainings of the same seed that it needs.
        images: key into the images of the size.
        callback: ``name`` or ``name=value`` of :mod:`studies.callbacks`, for changes that train.py
            has no option for; several are separated by spaces.
        draw: distinguishes trainings that differ by their random numbers only.
        seeds: number of seeds, the first of the study's; by default all.
    """

    name: str
    model: str
    kwargs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    uses: tuple["Use", ...] = ()
    images: str = "images"
    callback: str = ""
    draw: int = 0
    seeds: int | None = None


@dataclass(frozen=True)
class Use:
    """The result of another training that a training needs: initial weights, or a teacher.

    Attributes:
        name: its name in the options of the training that needs it.
        training: the other training.
        deployment: makes the result from the other training's checkpoint.
    """

    name: str
    training: Training
    deployment: Deployment = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Arm:
    """A model that is compared with others: a row of the tables.

    Attributes:
        name: name in the tables.
        training: the training that it comes from; arms may share one.
        deployment: makes the measured model from the checkpoint.
        beside: other trainings whose models form an ensemble with this one.
        measure: measures the same figures as the study's measure in another way.
        paper: the paper's figure.
        baseline: name of the arm that it is compared with; by default the first arm of the size.
    """

    name: str
    training: Training
    deployment: Deployment = field(default_factory=Export)
    beside: tuple[Training, ...] = ()
    paper: str = ""
    measure: Measure | None = None
    baseline: str = ""

    def trainings(self) -> list[Training]:
        """List all trainings that it needs, each once and after those that it uses."""
        return list({training.name: training for training in _trainings(self)}.values())

    def others(self) -> tuple[Training, ...]:
        """List the trainings that it needs beside its own.

        They are those of its ensemble and of its deployment.
        """
        return (*self.beside, *getattr(self.deployment, "others", ()))


def _trainings(arm: Arm) -> Iterator[Training]:
    for training in (*arm.others(), arm.training):
        yield from with_used(training)


def with_used(training: Training) -> Iterator[Training]:
    """Yield the trainings whose results a training uses, then the training itself."""
    for use in training.uses:
        yield from with_used(use.training)
    yield training


@dataclass(frozen=True)
class Size:
    """A study at one scale.

    Attributes:
        setting: name of the folder of its runs. Studies of one setting share trainings of one name.
        arms: the first is the baseline of all arms that name no other.
        images: images that models are trained on, by the keys that trainings use.
        models: timm's names of the models, by the keys that trainings use.
        kwargs: arguments of all models.
        options: options of train.py for all trainings.
        seeds: seeds of the runs of each training.
        findings: sentences about the results.
    """

    setting: str
    arms: tuple[Arm, ...]
    images: dict[str, Images]
    models: dict[str, str]
    kwargs: tuple[str, ...]
    options: tuple[str, ...]
    seeds: range
    findings: tuple["Finding", ...] = ()

    def __post_init__(self) -> None:
        """Refuse two trainings or two arms with one name.

        Raises:
            ValueError: if there are such names, or an arm's baseline is not an arm.
        """
        trainings: dict[str, Training] = {}
        taken = set(RESERVED)
        for arm in self.arms:
            for training in _trainings(arm):
                if trainings.setdefault(training.name, training) != training:
                    raise ValueError(f"Two trainings are called {training.name}.")
            file = slug(arm.name)
            if file in taken or file.startswith("uses-"):
                raise ValueError(f"{arm.name} needs another name: {file} is taken.")
            taken.add(file)
        for arm in self.arms:
            if self.baseline_of(arm.name) not in {other.name for other in self.arms}:
                raise ValueError(
                    f"{arm.name} is compared with {arm.baseline}, which is not an arm."
                )

    def arm(self, name: str) -> Arm:
        """Look up an arm."""
        return next(arm for arm in self.arms if arm.name == name)

    def seeds_of(self, training: Training) -> range:
        """Select the seeds of a training."""
        return self.seeds[: training.seeds]

    def compared(self) -> list[tuple[str, str]]:
        """List the pairs of arms that the findings are about."""
        return [(pair.first, pair.second) for finding in self.findings for pair in finding.compared]

    def baseline_of(self, name: str) -> str:
        """Name the arm that an arm is compared with; its own name if it is a baseline."""
        return self.arm(name).baseline or self.arms[0].name

    def trainings(self) -> list[Training]:
        """List the trainings of all arms, each once and after those that it uses."""
        by_name = {training.name: training for arm in self.arms for training in arm.trainings()}
        return list(by_name.values())


@dataclass(frozen=True)
class Compared:
    """A comparison that a finding is about.

    Attributes:
        first: name of an arm.
        verdict: of :meth:`timm_moe.analysis.paired.Difference.verdict`, about the first arm.
        second: name of the arm that it is compared with. If the study has the two as an
            interaction, the differences to their baselines are compared.
        figure: key of the figure; by default the study's first.
    """

    first: str
    verdict: str
    second: str
    figure: str = ""


@dataclass(frozen=True)
class Finding:
    """A sentence about results. :mod:`studies.findings` checks it.

    Attributes:
        text: the sentence, with its figures written out.
        compared: all comparisons that it is about.
        quoted: numbers in the text that come from elsewhere, such as a paper.
    """

    text: str
    compared: tuple[Compared, ...]
    quoted: tuple[str, ...] = ()


def compare(
    firsts: Iterable[str], verdict: str, seconds: Iterable[str], figure: str = ""
) -> tuple[Compared, ...]:
    """Compare each of several arms with each of others, with one verdict for all."""
    return tuple(
        Compared(first, verdict, second, figure) for first, second in product(firsts, seconds)
    )


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    Attributes:
        name: name on the command line.
        title: title of its section.
        question: a sentence or two.
        source: paper and table.
        sizes: ``"small"`` for two cores, ``"paper"`` for a GPU.
        measure: measures each arm.
        pairs: names of arms that are compared beside those of the findings, in the sizes that have
            both.
        interactions: names of two arms; the difference of the first to its baseline is compared
            with that of the second to its own.
        primary: names of the two arms whose comparison by the first figure was stated as the
            primary one before the runs. All other comparisons of the study are secondary: they are
            corrected by Holm's method. By default no comparison is primary, and nothing is
            corrected.
        stated: what was stated before the runs.
    """

    name: str
    title: str
    question: str
    source: str
    sizes: dict[str, Size]
    measure: Measure = field(default_factory=Validation)
    pairs: tuple[tuple[str, str], ...] = ()
    interactions: tuple[tuple[str, str], ...] = ()
    primary: tuple[str, str] | None = None
    stated: str = ""


def slug(name: str) -> str:
    """Turn a name into a file name."""
    return "-".join(re.findall(r"[a-z0-9.]+", name.lower()))
