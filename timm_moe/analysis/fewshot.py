"""Few-shot linear evaluation of a frozen model.

A regression from the model's features to classes is learned from few images of each class.

The protocol is of V-MoE's code and pBE (arXiv 2110.03360, appendix B.4): features before the
classifier are whitened, a constant serves as the bias, and a ridge regression to classes in {-1, 1}
is solved in closed form. Shape suffixes: N images, D width of features, C classes, M members, L
penalties, R runs.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..checkpoints.model_spec import ModelSpec
from .data import (
    Inference,
    Source,
    batches,
    class_names,
    describe_source,
    open_model,
    require_different,
)
from .images import chosen
from .rows import Rows

_logger = logging.getLogger(__name__)

#: Penalties of the regression; the best one is taken.
PENALTIES = tuple(2.0**exponent for exponent in range(-10, 20))
#: Regressions: one on the features of all members side by side. Of an ensemble there are also the
#: mean of the members' own regressions, and their mean weighted by the inverse of
#: :meth:`Ridge.left_out_error`.
KINDS = ("joint", "disjoint", "weighted")
#: Value of the constant feature; it is large, so that the bias is hardly penalised.
CONSTANT = 100.0


@dataclass(frozen=True)
class Folder:
    """Images of the same classes, to draw the shots from and to classify."""

    name: str
    train: ImageDataset
    test: ImageDataset


@dataclass(frozen=True)
class Result:
    """Accuracy on the test images after so many shots."""

    folder: str
    shots: int
    members: str  #: one of :data:`KINDS`
    accuracy: float  #: mean over the draws, a share
    standard_error: float | None  #: of that mean; None of a single draw
    penalty: float  #: of the regression


class Ridge:
    """Ridge regressions from features to C classes, for all penalties.

    One singular value decomposition serves all of them.
    """

    def __init__(self, x_ND: Tensor, label_N: Tensor, num_classes: int):
        x_ND = x_ND.double()
        self._mean, self._std = x_ND.mean(0), x_ND.std(0, correction=0) + 1e-5
        self._x_ND = self._whitened(x_ND)
        self._y_NC = 2 * nn.functional.one_hot(label_N, num_classes).double() - 1
        self._left, self._values, self._right = torch.linalg.svd(self._x_ND, full_matrices=False)
        self._projected = self._left.T @ self._y_NC

    def scores(self, x_ND: Tensor, penalty: float) -> Tensor:
        """Return the scores (N, C) of other features; the predicted class has the largest."""
        return self._whitened(x_ND.double()) @ self._weights(penalty)

    def left_out_error(self, penalty: float) -> float:
        """Return the mean squared error on each training image by the regression from all others.

        In closed form, the error on an image is that of the regression from all images, divided by
        one minus the image's leverage. All images are whitened together.
        """
        leverage_N = self._left.square() @ (
            self._values.square() / (self._values.square() + penalty)
        )
        error_NC = (self._y_NC - self._x_ND @ self._weights(penalty)) / (1 - leverage_N[:, None])
        return error_NC.square().mean().item()

    def _weights(self, penalty: float) -> Tensor:
        shrunk = self._values / (self._values.square() + penalty)
        return self._right.T @ (shrunk[:, None] * self._projected)

    def _whitened(self, x_ND: Tensor) -> Tensor:
        return nn.functional.pad((x_ND - self._mean) / self._std, (0, 1), value=CONSTANT)


def fewshot(
    sources: Sequence[Source],
    folders: Sequence[Folder],
    shots: Sequence[int] = (1, 5, 10, 25),
    draws: int = 3,
    seed: int = 0,
    *,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> list[Result]:
    """Learn the classes of each folder from few images of each, and classify the test images.

    This is done several times, with other images each time.

    Each kind of regression and number of shots has one penalty. It has the best mean rank over all
    folders and draws by the accuracy on the test images, as in V-MoE's code. The shots of a draw
    contain its smaller numbers of shots.

    Args:
        sources: models, or sources of :func:`timm_moe.checkpoints.source.load_source`; several
            models, or one with members, are an ensemble.
        folders: images to learn from and to classify.
        shots: training images of each class.
        draws: number of draws.
        seed: of the draws, of all folders in their order.
        spec: as for ``load_source``.
        use_ema: as for ``load_source``.
        inference: settings of the forwards.

    Returns:
        For each folder and number of shots the joint regression, and of an ensemble the disjoint
        ones, without and with weights.

    Raises:
        ValueError: on a source that is named twice, a number below 1, shots above the images of a
            class, other classes in a folder's test images, or features that are NaN; and as
            ``load_source``.
    """
    inference = inference or Inference()
    require_different(sources)
    if not shots or min(shots) < 1 or draws < 1:
        raise ValueError(f"shots and draws must be at least 1, got {list(shots)} and {draws}.")
    labels = [_checked_labels(folder, max(shots)) for folder in folders]
    models = [open_model(source, spec, use_ema, inference) for source in sources]
    named = [*zip(models, map(describe_source, sources), strict=True)]
    generator = torch.Generator("cpu").manual_seed(seed)
    tables = [
        _folder_accuracies(
            named, folder, _draw(label_N, max(shots), draws, generator), shots, inference
        )
        for folder, label_N in zip(folders, labels, strict=True)
    ]
    return _results(folders, shots, tables)


def _draw(label_N: Tensor, shots: int, draws: int, generator: torch.Generator) -> Tensor:
    """Return the indices (R, C, shots) of images of each class, drawn several times."""
    of_class = [(label_N == number).nonzero().flatten() for number in label_N.unique()]
    drawn = [
        torch.stack(
            [
                images[torch.randperm(len(images), generator=generator, device="cpu")[:shots]]
                for images in of_class
            ]
        )
        for _ in range(draws)
    ]
    return torch.stack(drawn)


def _folder_accuracies(
    named: Sequence[tuple[nn.Module, str]],
    folder: Folder,
    drawn: Tensor,
    shots: Sequence[int],
    inference: Inference,
) -> Tensor:
    """Return the accuracies (draws, numbers of shots, kinds, L) on a folder's test images.

    Args:
        named: models and their names.
        folder: images to learn from and to classify.
        drawn: (R, C, most shots) indices of training images.
        shots: numbers of shots.
        inference: settings of the forwards.
    """
    draws = len(drawn)
    used, place = drawn.unique(return_inverse=True)  # the features of an image are computed once
    counts = f"{len(used):,}", f"{len(folder.test):,}"
    _logger.info("%s: features of %s training and %s test images ...", folder.name, *counts)
    train, label = _features(named, chosen(folder.train, used.tolist()), inference)
    test, expected = _features(named, folder.test, inference)

    rows = []
    for draw in range(draws):
        _logger.info("%s: regressions of draw %s of %s ...", folder.name, draw + 1, draws)
        for number in shots:
            shown = place[draw, :, :number].flatten()
            features = [x_ND[shown] for x_ND in train]
            rows.append(_accuracies(features, label[shown], test, expected))
    return torch.stack(rows).unflatten(0, (draws, len(shots)))


def _results(
    folders: Sequence[Folder], shots: Sequence[int], tables: Sequence[Tensor]
) -> list[Result]:
    """Choose the penalty of each kind and number of shots, and list the accuracies with it.

    Args:
        folders: images that were classified.
        shots: numbers of shots.
        tables: of each folder the accuracies by :func:`_folder_accuracies`.
    """
    draws = len(tables[0])
    results = []
    for kind, accuracies in zip(KINDS, torch.stack([*tables]).unbind(3), strict=False):
        for index, number in enumerate(shots):
            best = _best_penalty(accuracies[:, :, index].flatten(0, 1))
            for folder, accuracy_RSL in zip(folders, accuracies, strict=True):
                of_draws = accuracy_RSL[:, index, best]
                error = of_draws.std().item() / math.sqrt(draws) if draws > 1 else None
                mean = of_draws.mean().item()
                results.append(Result(folder.name, number, kind, mean, error, PENALTIES[best]))
    return results


def _checked_labels(folder: Folder, shots: int) -> Tensor:
    """Return the classes (N,) of the training images."""
    names = class_names(folder.train)
    if class_names(folder.test) != names:
        raise ValueError(
            f"{folder.name} has other classes among its test images than among those to learn from."
        )
    labels = torch.tensor([label for _, label in folder.train.reader.samples])
    fewest, name = min(zip(labels.bincount(minlength=len(names)).tolist(), names, strict=True))
    if fewest < shots:
        raise ValueError(
            f"{shots} shots are asked for, but class {name} of {folder.name} has {fewest} images."
        )
    return labels


def _accuracies(
    train: Sequence[Tensor], label: Tensor, test: Sequence[Tensor], expected: Tensor
) -> Tensor:
    """Return the accuracies (kinds, L), from the features (N, D) of each member."""
    num_classes = int(label.max()) + 1
    joint, test_ND = Ridge(torch.cat([*train], 1), label, num_classes), torch.cat([*test], 1)
    ridges = [Ridge(x_ND, label, num_classes) for x_ND in train] if len(train) > 1 else []
    columns = []
    for penalty in PENALTIES:
        scores = [joint.scores(test_ND, penalty)]
        if ridges:
            scores_MNC = torch.stack(
                [ridge.scores(x_ND, penalty) for ridge, x_ND in zip(ridges, test, strict=True)]
            )
            error_M = scores_MNC.new_tensor([ridge.left_out_error(penalty) for ridge in ridges])
            scores += [scores_MNC.sum(0), (scores_MNC / error_M[:, None, None]).sum(0)]
        columns.append((torch.stack(scores).argmax(2) == expected).double().mean(1))
    return torch.stack(columns, 1)


@torch.inference_mode()
def _features(
    named: Sequence[tuple[nn.Module, str]],
    images: ImageDataset,
    inference: Inference,
) -> tuple[list[Tensor], Tensor]:
    """Return the features (N, D) of each member of each model, and the labels (N,)."""
    parts: dict[int, Rows] = defaultdict(Rows)
    labels = Rows()
    for inputs, label in batches([model for model, _ in named], images, inference):
        members = [
            _member_features(*each, x, inference) for each, x in zip(named, inputs, strict=True)
        ]
        for number, feature in enumerate(
            feature for of_model in members for feature in of_model.unbind(1)
        ):
            parts[number].add(feature)
        labels.add(label)
    return [part.tensor() for part in parts.values()], labels.tensor()


def _member_features(model: Any, name: str, x: Tensor, inference: Inference) -> Tensor:
    """Return the features (B, M, D) before the classifier."""
    with inference.autocast(x):
        if hasattr(model, "forward_member_features"):
            features = model.forward_member_features(x)
        else:
            features = model.forward_head(model.forward_features(x), pre_logits=True).unsqueeze(1)
    if not features.isfinite().all():
        raise ValueError(
            f"{name} gives features that are NaN or Inf: leave out --amp, or look for "
            "NaN in its weights."
        )
    return features


def _best_penalty(accuracy_RL: Tensor) -> int:
    """Return the index of the penalty with the best mean rank over the runs.

    Of equal penalties it is the first.
    """
    above_RLL = accuracy_RL.unsqueeze(2) - accuracy_RL.unsqueeze(1)
    return int(above_RLL.sign().sum(2).mean(0).argmax())


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each result, then remarks on them."""
    width = max(len(result.folder) for result in results)
    for result in results:
        error = "" if result.standard_error is None else f" ± {result.standard_error:.2%}"
        kind = f"{result.folder:<{width}}  {result.shots:>4} shots  {result.members:<8}"
        yield f"  {kind}  {result.accuracy:.2%}{error}  (penalty {result.penalty:g})"
    if any(result.standard_error is not None for result in results):
        yield "  ± is the standard error over the draws of the images."
    yield "  The penalty is the best one for these images."
