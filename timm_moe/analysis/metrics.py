"""Metrics of accuracy, calibration and diversity (pBE, arXiv 2110.03360, section 4 and appendix B).

Each one is a torchmetrics ``Metric``. ``update`` takes a batch of labels (B,) and of logits (B, C),
or (B, M, C) of the M members of an ensemble, which predicts the mean of their probabilities.
Logarithms of probabilities are logits. A logit of -inf leaves its class out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.ensemble import ensemble_log_probabilities

try:
    from torchmetrics import Metric
    from torchmetrics.functional.classification import (
        binary_auroc,
        binary_specificity_at_sensitivity,
    )
except ModuleNotFoundError as error:
    # Commands that need more beside it name their own extra.
    raise ModuleNotFoundError(
        f"timm_moe.analysis.metrics needs {error.name}: pip install 'timm_moe[evaluate]'.",
        name=error.name,
    ) from error


def log_probabilities(outputs: Tensor) -> Tensor:
    """Return the log-probabilities (B, M, C) of each member.

    Args:
        outputs: logits of shape (B, C) or (B, M, C).

    Raises:
        ValueError: on another shape, NaN, or an image without a finite logit.
    """
    if outputs.ndim not in (2, 3):
        raise ValueError(
            f"Outputs must have shape (B, C) or (B, M, C), got {tuple(outputs.shape)}."
        )
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    outputs = outputs.unsqueeze(1) if outputs.ndim == 2 else outputs
    log_p_BMC = outputs.log_softmax(2)
    if log_p_BMC.isnan().any():
        raise ValueError(
            "Logits must not be NaN or inf, and each image needs one that is not -inf."
        )
    return log_p_BMC


def _check_labels(labels: Tensor, images: int, classes: int) -> None:
    """Raise ValueError unless there is a class, 0 to C - 1, for each image."""
    if labels.shape != (images,):
        raise ValueError(
            f"{images} images need labels of shape ({images},), got {tuple(labels.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"Labels must be whole numbers, got {labels.dtype}.")
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise ValueError(f"Labels must be 0 to {classes - 1}, got {int(wrong[0])}.")


class _Metric(Metric):
    full_state_update = False
    higher_is_better: bool | None = False

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot a value, or values of several calls, as torchmetrics does."""
        return self._plot(val, ax)


class _MeanOverImages(_Metric):
    """Mean of K numbers of each image, in float64."""

    def __init__(self, *, numbers: int = 1, **kwargs: Any):
        super().__init__(**kwargs)
        # MetricCollection updates only one of several metrics whose states have the same names and
        # first values, so the name of the state tells the metrics apart.
        self._state = f"sums_of_{type(self).__name__}"
        zeros = torch.zeros(numbers + 1, dtype=torch.float64, device="cpu")
        self.add_state(self._state, zeros, dist_reduce_fx="sum")

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        """Return the numbers of each image, (B,) or (B, K)."""
        raise NotImplementedError

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Raises:
            ValueError: on wrong shapes or labels, or NaN.
        """
        log_p_BMC = log_probabilities(outputs)
        images, _, classes = log_p_BMC.shape
        _check_labels(labels, images, classes)
        sums = getattr(self, self._state)
        numbers = self._per_image(log_p_BMC, labels.long())
        sum_K = numbers.double().reshape(images, len(sums) - 1).sum(0)
        setattr(self, self._state, sums + torch.cat([sum_K, sum_K.new_full((1,), images)]))

    def means(self) -> Tensor:
        """Return the means, (K,); NaN before the first image."""
        sums = getattr(self, self._state)
        return sums[:-1] / sums[-1]

    def compute(self) -> Tensor:
        """Return the mean; NaN before the first image."""
        return self.means()[0]


class NegativeLogLikelihood(_MeanOverImages):
    """Minus the logarithm of the probability of the label."""

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        return -ensemble_log_probabilities(log_p_BMC).gather(1, labels.unsqueeze(1)).squeeze(1)


class ErrorRate(_MeanOverImages):
    """Share of images whose label is not the most probable class."""

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        return ensemble_log_probabilities(log_p_BMC).argmax(1) != labels


class BrierScore(_MeanOverImages):
    """Squared distance of the probabilities from the one-hot label, summed over the classes.

    It is from 0 to 2.
    """

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        p_BC = ensemble_log_probabilities(log_p_BMC).exp()
        return (p_BC - F.one_hot(labels, p_BC.shape[1])).square().sum(1)


class CalibrationError(_MeanOverImages):
    """Expected calibration error.

    It is the distance of accuracy and confidence in ``n_bins`` equal bins of the largest
    probability.

    A bin holds its lower bound, and the last bin also 1. ``update`` raises ValueError on outputs of
    another number of classes.
    """

    def __init__(self, num_classes: int, *, n_bins: int = 15, **kwargs: Any):
        super().__init__(numbers=n_bins, **kwargs)
        self.num_classes, self.n_bins = num_classes, n_bins

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        if log_p_BMC.shape[2] != self.num_classes:
            raise ValueError(
                f"Outputs must have {self.num_classes} classes, got {log_p_BMC.shape[2]}."
            )
        confidence, predicted = ensemble_log_probabilities(log_p_BMC).exp().clamp(max=1).max(1)
        bounds = torch.linspace(
            0, 1, self.n_bins + 1, device=confidence.device, dtype=confidence.dtype
        )
        index = torch.bucketize(confidence, bounds[1:-1], right=True)
        excess = (predicted == labels).double() - confidence.double()
        return F.one_hot(index, self.n_bins) * excess.unsqueeze(1)

    def compute(self) -> Tensor:
        """Return the sum over the bins; NaN before the first image."""
        return self.means().abs().sum()


class _MeanOverPairs(_MeanOverImages):
    """Mean over the pairs of members i < j, and over the images."""

    higher_is_better = None

    def _of_pair(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        """Compare the members of each pair, (B, pairs, C); return (B, pairs)."""
        raise NotImplementedError

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        members = log_p_BMC.shape[1]
        if members < 2:
            raise ValueError("Members of an ensemble are compared: outputs must be (B, M, C).")
        first, second = torch.triu_indices(members, members, 1)
        return self._of_pair(log_p_BMC[:, first], log_p_BMC[:, second]).double().mean(1)


class PairwiseKL(_MeanOverPairs):
    """Kullback-Leibler divergence of the earlier member's probabilities from the later one's.

    It is the mean over the pairs of members. Another order of them gives another number.
    """

    def _of_pair(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return torch.where(log_p == -torch.inf, 0, log_p.exp() * (log_p - log_q)).sum(2)


class CosineSimilarity(_MeanOverPairs):
    """Cosine of the angle between two members' probabilities, the mean over the pairs."""

    def _of_pair(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return F.cosine_similarity(log_p.exp(), log_q.exp(), dim=2)


class Disagreement(_MeanOverPairs):
    """Share of images for which two members predict different classes, the mean over the pairs."""

    def _of_pair(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return log_p.argmax(2) != log_q.argmax(2)


class NormalizedDisagreement(Disagreement):
    """Disagreement divided by the ensemble's error rate.

    It is 0 if both are 0, and infinite if only the error rate is 0.
    """

    def __init__(self, **kwargs: Any):
        super().__init__(numbers=2, **kwargs)

    def _per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        wrong = ensemble_log_probabilities(log_p_BMC).argmax(1) != labels
        return torch.stack([super()._per_image(log_p_BMC, labels), wrong.double()], 1)

    def compute(self) -> Tensor:
        """Return the ratio of the two means; NaN before the first image."""
        disagreement, error = self.means()
        return torch.where(disagreement == 0, disagreement, disagreement / error)


def separation(confidence: Tensor, ood_confidence: Tensor) -> dict[str, float]:
    """Return the AUROC and the FPR at 95 % TPR of two kinds of images.

    Args:
        confidence: (N,) probabilities, which should be the larger ones.
        ood_confidence: (K,) probabilities of images of other data.
    """
    # Rounding may give more than 1, which torchmetrics would take for a logit.
    scores = torch.cat([confidence, ood_confidence]).clamp(max=1)
    is_in = (torch.arange(len(scores)) < len(confidence)).int()
    specificity, _ = binary_specificity_at_sensitivity(scores, is_in, 0.95)
    return {"auroc": binary_auroc(scores, is_in).item(), "fpr_at_95": 1 - specificity.item()}
