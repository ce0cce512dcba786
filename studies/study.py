"""What a study is: trainings by train.py, what is deployed of each, on which images, and what is compared with what."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .deploy import Deployment, Export


@dataclass(frozen=True)
class Images:
    """A part of a folder of images, ``train/<class>/`` and ``test/<class>/``.

    Attributes:
        classes: which of the classes, in alphabetical order: start, stop and step.
        train: which of the training images of each class, in alphabetical order. All test images are taken.
    """

    classes: tuple[int | None, ...] = (None,)
    train: tuple[int | None, ...] = (None,)


@dataclass(frozen=True)
class Training:
    """One run of train.py for each seed.

    Attributes:
        name: of the folder of its runs.
        model: which of the models of the study's size.
        kwargs: of the model, beside those of the size.
        options: of train.py, beside those of the size.
        start: the training of the same seed whose last checkpoint it begins from.
        callback: name of what :mod:`studies.callbacks` adds to train.py, which has no option for it.
    """

    name: str
    model: str
    kwargs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    start: "Training | None" = None
    callback: str = ""


@dataclass(frozen=True)
class Arm:
    """What is compared: a model that is deployed.

    Attributes:
        name: in the tables.
        training: what it comes from; arms may share one.
        deployment: how it is made of the trained model.
        paper: the paper's figure, in the unit of the study.
    """

    name: str
    training: Training
    deployment: Deployment = field(default_factory=Export)
    paper: float | None = None


@dataclass(frozen=True)
class Size:
    """How large a study is.

    Attributes:
        images: that it is trained on.
        models: names for timm, by the names that trainings have for them.
        kwargs: of all of these models.
        options: of train.py, for all trainings.
        seeds: how many runs of each training.
    """

    images: Images
    models: dict[str, str]
    kwargs: tuple[str, ...]
    options: tuple[str, ...]
    seeds: int


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    Attributes:
        name: as on the command line.
        title: of its section.
        question: in a sentence or two.
        arms: the first is the baseline.
        sizes: by name, ``"small"`` for two cores and ``"paper"`` for a GPU.
        source: paper and table.
    """

    name: str
    title: str
    question: str
    arms: tuple[Arm, ...]
    sizes: dict[str, Size]
    source: str

    def trainings(self) -> Iterator[Training]:
        """Each once, those that others begin from first."""
        seen: set[str] = set()
        for arm in self.arms:
            for training in _with_starts(arm.training):
                if training.name not in seen:
                    seen.add(training.name)
                    yield training


def _with_starts(training: Training) -> Iterator[Training]:
    if training.start is not None:
        yield from _with_starts(training.start)
    yield training
