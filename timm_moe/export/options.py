"""Options of exports and pushes."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, TypeVar

from huggingface_hub.utils import validate_repo_id

from ..checkpoints.model_spec import ModelSpec
from ..console import describe, did_you_mean
from ..model_config import check_problem_type

OptionsT = TypeVar("OptionsT", bound="ModelOptions")


@dataclass(frozen=True)
class ModelOptions:
    """Options for reading a source, and entries of config.json that the user states.

    Attributes:
        spec: model to create for a file that does not name it, or its preprocessing; for models of
            timm.
        use_ema: take the EMA weights of a train.py checkpoint.
        model_args: arguments that ``timm.create_model`` needs for the written model, where the
            source does not record them (a model converted in memory, with a timm version that does
            not record them).
        license: by default the licence of the pretrained weights that training began from, if
            known, or the one in the config of a folder or repository.
        example_inputs: arguments of the model for the comparison of outputs: a tensor, a tuple of
            arguments, or a dict of keyword arguments. By default two random images of the size that
            the model states.
        label_names: names of the classes, in order; by default the names in the source's config. A
            folder or repository that names its classes must have them in the same order; other
            names than its own give a warning.
        label_descriptions: texts by class name. Only models of timm have them.
        problem_type: of the outputs of a model of timm, by which transformers chooses between
            softmax and sigmoids: ``"single_label_classification"``,
            ``"multi_label_classification"`` or ``"regression"``. By default it is the source's own,
            which is multi-label if train.py's ``--task`` was. A loop of your own states it here.

    Raises:
        ValueError: if the problem type is another.
    """

    spec: ModelSpec | None = None
    use_ema: bool = False
    model_args: dict[str, Any] | None = None
    license: str | None = None
    example_inputs: Any = None
    label_names: Sequence[str] | None = None
    label_descriptions: Mapping[str, str] | None = None
    problem_type: str | None = None

    def __post_init__(self) -> None:
        check_problem_type(self.problem_type)

    @classmethod
    def of(cls: type[OptionsT], function: Callable[..., Any], /, **options: Any) -> OptionsT:
        """Make options of the keyword arguments of a function.

        Raises:
            TypeError: if there is no option of a name; the message names the nearest argument.
        """
        known = {each.name for each in fields(cls)}
        for name in options.keys() - known:
            arguments = known.union(signature(function).parameters) - {"options"}
            raise TypeError(
                f"{function.__name__} got an unexpected keyword argument {name!r}"
                f"{did_you_mean(name, arguments)}"
            )
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class PushOptions(ModelOptions):
    """Options of a push: its place, and what the model card should say.

    ``license`` goes to the card, too.

    Attributes:
        repo_id: ``user/name``.
        private: make the repository a private one.
        revision: branch, created if it does not exist; main by default.
        create_pr: open a pull request instead of committing to the branch.
        dry_run: do everything but upload.
        dataset: images that the model was trained on, by their name on the Hub or any other name.
        metrics: results of the published model, by name.

    Raises:
        ValueError: if the name of the repository or branch is not possible, a metric is not a
            finite number, or the licence not as the Hub abbreviates it, ``"apache-2.0"``.
    """

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    dry_run: bool = False
    dataset: str | None = None
    metrics: dict[str, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            validate_repo_id(self.repo_id)
        except ValueError as error:
            raise ValueError(
                f"{self.repo_id!r} is no name of a repository: {describe(error)}"
            ) from error
        if self.repo_id.count("/") != 1:
            raise ValueError(f"A repository is named user/name, got {self.repo_id!r}.")
        if self.revision is not None and not re.fullmatch(r"\w[\w./-]*", self.revision):
            raise ValueError(f"revision must be the name of a branch, got {self.revision!r}.")
        for name, value in (self.metrics or {}).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not math.isfinite(value)
            ):
                raise ValueError(f"The metric {name} must be a finite number, got {value!r}.")
        if self.license is not None and not is_abbreviation(self.license):
            raise ValueError(
                "license must be an abbreviation as the Hub has it, as apache-2.0: got "
                f"{self.license!r}."
            )

    @property
    def model_name(self) -> str:
        """Name for ``timm.create_model``."""
        return f"hf-hub:{self.repo_id}" + (f"@{self.revision}" if self.revision else "")


def is_abbreviation(license: Any) -> bool:
    """Tell if a licence is written as the Hub abbreviates it; a config may state any text."""
    return isinstance(license, str) and re.fullmatch(r"[a-z0-9.+-]+", license) is not None
