"""Statements of the user about a model to load, and the origin of its weights."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..model_config import check_preprocessing


@dataclass(frozen=True)
class ModelSpec:
    """The user's statements about a model; they override the file's.

    Attributes:
        name: registered model name, or ``local-dir:`` or ``hf-hub:`` name of a folder whose
            config.json describes the model; for files that hold only weights, or were trained from
            such a folder.
        num_classes: size of the classifier.
        kwargs: further arguments of ``timm.create_model``, as in timm's ``--model-kwargs``.
        preprocessing: of the images, under timm's names: ``img_size`` in pixels, ``mean`` and
            ``std`` of pixels from 0 to 1, ``crop_pct`` as a share of the resized image's side,
            ``crop_mode``, ``interpolation``.

    Raises:
        ValueError: if the preprocessing is impossible.
    """

    name: str | None = None
    num_classes: int | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    preprocessing: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_preprocessing(self.preprocessing)

    def args(self) -> dict[str, Any]:
        """Return the arguments of ``timm.create_model`` that are stated."""
        return {
            **({} if self.num_classes is None else {"num_classes": self.num_classes}),
            **self.kwargs,
        }


@dataclass(frozen=True)
class Origin:
    """Source of loaded weights, and what their file says of the training.

    A loaded model has it as ``origin``.
    """

    place: str  #: path of the file or folder, or ``hf-hub:`` name
    folder: Path | None = None  #: the folder, if it is one
    #: train.py's arguments; empty if it did not write the file
    train_args: dict[str, Any] = field(default_factory=dict)
    epoch: Any = None
    metric: Any = None  #: that train.py measured at this epoch
    ema: bool = False  #: whether these are the EMA weights
    #: whether the file holds a dense network, of which the model's experts were made
    upcycled: bool = False
    recorded: Any = None  #: what an export has written of the training to the folder's config.json

    @property
    def is_file(self) -> bool:
        """Tell if the weights are from a file.

        The model's config is then that of other weights of timm, or missing.
        """
        return self.folder is None and not self.place.startswith("hf-hub:")
