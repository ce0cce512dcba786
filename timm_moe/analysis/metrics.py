"""Metrics of accuracy, calibration and diversity (pBE, arXiv 2110.03360, section 4 and appendix B).

Each one is a torchmetrics ``Metric``. ``update`` takes a batch of labels (B,) and of logits or probabilities (B, C), or
(B, M, C) of the M members of an ensemble, which predicts the mean of their probabilities.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..layers.ensemble import ensemble_log_probabilities

try:
    from torchmetrics import Metric, MetricCollection  # noqa: F401  (evaluation takes it from here, with the message)
    from torchmetrics.classification import BinaryAUROC, BinaryROC, MulticlassCalibrationError
    from torchmetrics.utilities import dim_zero_cat
except ModuleNotFoundError as error:
    raise ImportError(f"timm_moe.analysis.metrics needs {error.name}: pip install torchmetrics.") from error


def log_probabilities(outputs: Tensor, from_logits: bool = True) -> Tensor:
    """(B, M, C) log-probabilities of each member from logits or probabilities of shape (B, C) or (B, M, C)."""
    if outputs.ndim not in (2, 3):
        raise ValueError(f"Outputs must have shape (B, C) or (B, M, C), got {tuple(outputs.shape)}.")
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    outputs = outputs.unsqueeze(1) if outputs.ndim == 2 else outputs
    if from_logits:
        return outputs.log_softmax(2)
    if (outputs < 0).any() or not torch.allclose(outputs.sum(2), outputs.new_ones(()), atol=1e-3):
        raise ValueError("Probabilities must not be negative and must sum to 1; for logits say from_logits=True.")
    return outputs.clamp(min=torch.finfo(outputs.dtype).tiny).log()


class _MeanOverImages(Metric):
    full_state_update = False
    total: Tensor
    images: Tensor

    def __init__(self, from_logits: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.from_logits = from_logits
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch; raise ValueError on other shapes, or on probabilities that do not sum to 1."""
        log_p_BMC = log_probabilities(outputs, self.from_logits)
        if labels.shape != log_p_BMC.shape[:1]:
            raise ValueError(f"{tuple(outputs.shape)} outputs go with {outputs.shape[0]} labels, got {labels.numel()}.")
        self.total += self.per_image(log_p_BMC, labels).double().sum()
        self.images += len(labels)

    def compute(self) -> Tensor:
        """Give the mean; NaN before the first image."""
        return self.total / self.images


class NegativeLogLikelihood(_MeanOverImages):
    """Minus the logarithm of the probability of the label."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        return -ensemble_log_probabilities(log_p_BMC).gather(1, labels.unsqueeze(1)).squeeze(1)


class ErrorRate(_MeanOverImages):
    """Share of images whose label is not the most probable class."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        return ensemble_log_probabilities(log_p_BMC).argmax(1) != labels


class BrierScore(_MeanOverImages):
    """Squared distance of the probabilities from the one-hot label, summed over the classes; from 0 to 2."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        p_BC = ensemble_log_probabilities(log_p_BMC).exp()
        return (p_BC - F.one_hot(labels, p_BC.shape[1])).square().sum(1)


def _pairs(log_p_BMC: Tensor) -> tuple[Tensor, Tensor]:
    """Pair the members i < j: (B, pairs, C) of i and of j."""
    if log_p_BMC.shape[1] < 2:
        raise ValueError("Members of an ensemble are compared: outputs must be (B, M, C).")
    first, second = torch.triu_indices(log_p_BMC.shape[1], log_p_BMC.shape[1], 1)
    return log_p_BMC[:, first], log_p_BMC[:, second]


class PairwiseKL(_MeanOverImages):
    """Kullback-Leibler divergence of one member's probabilities from another's, the mean over the pairs."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        log_p, log_q = _pairs(log_p_BMC)
        return (log_p.exp() * (log_p - log_q)).sum(2).mean(1)


class CosineSimilarity(_MeanOverImages):
    """Cosine of the angle between two members' probabilities, the mean over the pairs."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        log_p, log_q = _pairs(log_p_BMC)
        return F.cosine_similarity(log_p.exp(), log_q.exp(), dim=2).mean(1)


class Disagreement(_MeanOverImages):
    """Share of images for which two members predict different classes, the mean over the pairs."""

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        log_p, log_q = _pairs(log_p_BMC)
        return (log_p.argmax(2) != log_q.argmax(2)).double().mean(1)


class NormalizedDisagreement(Disagreement):
    """Disagreement divided by the ensemble's error rate; 0 if both are 0, infinite if only the error is."""

    errors: Tensor

    def __init__(self, from_logits: bool = True, **kwargs: Any):
        super().__init__(from_logits, **kwargs)
        self.add_state("errors", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        self.errors += (ensemble_log_probabilities(log_p_BMC).argmax(1) != labels).sum()
        return super().per_image(log_p_BMC, labels)

    def compute(self) -> Tensor:
        return torch.where(self.total == 0, self.total, self.total / self.errors)


class CalibrationError(MulticlassCalibrationError):
    """Expected calibration error: distance of accuracy and confidence in 15 equal bins of the largest probability.

    A bin holds its lower bound, and the last one also 1, for which torchmetrics has another bin.
    """

    confidences: list[Tensor]
    accuracies: list[Tensor]

    def __init__(self, num_classes: int, from_logits: bool = True, n_bins: int = 15, **kwargs: Any):
        super().__init__(num_classes, n_bins, norm="l1", **kwargs)
        self.from_logits = from_logits

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        p_BC = ensemble_log_probabilities(log_probabilities(outputs, self.from_logits)).exp()
        super().update(p_BC.clamp(max=1), labels)  # torchmetrics takes a batch with a value above 1 for logits

    def compute(self) -> Tensor:
        confidence = dim_zero_cat(self.confidences)
        inner_bounds = torch.linspace(0, 1, self.n_bins + 1, device=confidence.device, dtype=confidence.dtype)[1:-1]
        index = torch.bucketize(confidence, inner_bounds, right=True)
        excess = dim_zero_cat(self.accuracies).double() - confidence.double()
        in_bins = excess.new_zeros(self.n_bins).index_add(0, index, excess)
        return in_bins.abs().sum() / len(confidence)


class AUROC(BinaryAUROC):
    """Area under the ROC curve for images of the training distribution and others, by their confidence."""

    def update(self, confidence: Tensor, is_in: Tensor) -> None:
        """Add the largest probabilities (B,) of a batch, and 1 for each image of the training distribution."""
        super().update(confidence.clamp(max=1), is_in)  # as above


class FPRAt95(BinaryROC):
    """False positive rate at the confidence that 95 % of the images of the training distribution reach."""

    def update(self, confidence: Tensor, is_in: Tensor) -> None:
        super().update(confidence.clamp(max=1), is_in)

    def compute(self) -> Tensor:  # type: ignore[override]
        false_positive_rate, true_positive_rate, _ = super().compute()
        return false_positive_rate[(true_positive_rate >= 0.95).nonzero()[0, 0]]
