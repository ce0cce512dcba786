"""What a study is: trainings by train.py, what is deployed of each, on which images, and what is compared with what."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .deploy import Checkpoint, Deployment, Export
from .measure import Measure, Validation

#: Files and folders of every run, which no arm may take for its own.
RESERVED = ("train", "stated", "trained", "log", "lock")


@dataclass(frozen=True)
class Images:
    """A part of a folder of images, ``train/<class>/`` and ``test/<class>/``.

    Attributes:
        of: number of classes of the whole folder, so that a study is not run on another one's images.
        classes: which of the classes, in alphabetical order: start, stop and step.
        train: which of the training images of each class, in alphabetical order.
        held_out: which of the training images of each class are evaluated on, for what is chosen by the result; by
            default the test images are, all of them.
    """

    of: int = 100
    classes: tuple[int | None, ...] = (None,)
    train: tuple[int | None, ...] = (None,)
    held_out: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Training:
    """One run of train.py for each seed.

    Attributes:
        name: of the folder of its runs.
        model: which of the models of the study's size.
        kwargs: of the model, beside those of the size.
        options: of train.py, beside those of the size. ``{name}`` is the path of what is used by that name.
        uses: what it needs of other trainings of the same seed.
        images: which of the images of the size.
        callback: what :mod:`studies.callbacks` adds to train.py, which has no option for it: a name, or ``name=value``.
        draw: tells trainings apart that differ by chance alone.
    """

    name: str
    model: str
    kwargs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    uses: tuple["Use", ...] = ()
    images: str = "images"
    callback: str = ""
    draw: int = 0


@dataclass(frozen=True)
class Use:
    """What a training needs of another one: weights to begin from, a teacher.

    Attributes:
        name: in the options of the training that needs it.
        training: the other one.
        deployment: how it is made of that.
    """

    name: str
    training: Training
    deployment: Deployment = field(default_factory=Checkpoint)


@dataclass(frozen=True)
class Arm:
    """What is compared: a model that is deployed.

    Attributes:
        name: in the tables.
        training: what it comes from; arms may share one.
        deployment: how it is made of the trained model.
        beside: other trainings, whose models are deployed likewise and measured together with it, as an ensemble.
        measure: the same figures as the study's, measured otherwise.
        paper: what the paper has of it.
    """

    name: str
    training: Training
    deployment: Deployment = field(default_factory=Export)
    beside: tuple[Training, ...] = ()
    paper: str = ""
    measure: Measure | None = None

    def trainings(self) -> list[Training]:
        """All that it takes, each once, after those that it uses."""
        return list({training.name: training for training in _trainings(self)}.values())


def _trainings(arm: Arm) -> Iterator[Training]:
    for training in (*arm.beside, arm.training):
        yield from _with_used(training)


def _with_used(training: Training) -> Iterator[Training]:
    for use in training.uses:
        yield from _with_used(use.training)
    yield training


@dataclass(frozen=True)
class Size:
    """How large a study is.

    Attributes:
        setting: name of the folder of its runs. Studies of the same setting share trainings of the same name.
        arms: the first is the baseline.
        images: that models are trained on, by the names that trainings have for them.
        models: names for timm, by the names that trainings have for them.
        kwargs: of all of these models.
        options: of train.py, for all trainings.
        seeds: of the runs of each training.
    """

    setting: str
    arms: tuple[Arm, ...]
    images: dict[str, Images]
    models: dict[str, str]
    kwargs: tuple[str, ...]
    options: tuple[str, ...]
    seeds: range

    def __post_init__(self) -> None:
        """Refuse names that would make one run, or one row of results, of two.

        Raises:
            ValueError: if there are such names.
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

    def trainings(self) -> list[Training]:
        """Each once, after those that it uses."""
        by_name = {training.name: training for arm in self.arms for training in arm.trainings()}
        return list(by_name.values())


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    Attributes:
        name: as on the command line.
        title: of its section.
        question: in a sentence or two.
        source: paper and table.
        sizes: by name, ``"small"`` for two cores and ``"paper"`` for a GPU.
        measure: what is measured of each arm.
        pairs: names of arms that are compared beside the comparisons with the baseline, in the sizes that have both.
        readings: what may be said of the results, by the name of the size.
    """

    name: str
    title: str
    question: str
    source: str
    sizes: dict[str, Size]
    measure: Measure = field(default_factory=Validation)
    pairs: tuple[tuple[str, str], ...] = ()
    readings: dict[str, str] = field(default_factory=dict)


def slug(name: str) -> str:
    """A name as that of a file."""
    return "-".join(re.findall(r"[a-z0-9.]+", name.lower()))
