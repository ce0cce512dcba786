"""Metrics of accuracy, calibration and diversity (pBE, arXiv 2110.03360, section 4 and appendix B).

Each one is a torchmetrics ``Metric``: ``update`` takes a batch, ``compute`` gives the value over all batches. Outputs
are logits or probabilities of shape (B, C), or (B, M, C) with M members of an ensemble, which predicts the mean of
their probabilities.
"""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..layers.ensemble import ensemble_log_probabilities

try:
    from torchmetrics import Metric
    from torchmetrics.classification import BinaryAUROC, BinaryROC, MulticlassCalibrationError
    from torchmetrics.utilities import dim_zero_cat
except ModuleNotFoundError as error:
    raise ImportError(f"timm_moe.analysis.metrics needs {error.name}: pip install torchmetrics.") from error


def log_probabilities(outputs: Tensor, from_logits: bool = True) -> Tensor:
    """(B, M, C) log-probabilities of each member from logits or probabilities of shape (B, C) or (B, M, C).

    Raises:
        ValueError: on another number of dimensions, or on probabilities that are negative or do not sum to 1.
    """
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
    """Mean over all images of :meth:`per_image`."""

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
        """Take in a batch of outputs and their labels (B,)."""
        log_p_BMC = log_probabilities(outputs, self.from_logits)
        if labels.shape != log_p_BMC.shape[:1]:
            raise ValueError(f"{tuple(outputs.shape)} outputs go with {outputs.shape[0]} labels, got {labels.numel()}.")
        self.total += self.per_image(log_p_BMC, labels).double().sum()
        self.images += labels.shape[0]

    def compute(self) -> Tensor:
        """The mean; NaN before the first image."""
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
        one_hot = torch.nn.functional.one_hot(labels, p_BC.shape[1])
        return (p_BC - one_hot).square().sum(1)


class _MeanOverPairs(_MeanOverImages):
    """Mean over the pairs of members i < j of :meth:`per_pair`."""

    def per_pair(self, log_p_BC: Tensor, log_q_BC: Tensor) -> Tensor:
        raise NotImplementedError

    def per_image(self, log_p_BMC: Tensor, labels: Tensor) -> Tensor:
        pairs = list(combinations(log_p_BMC.unbind(1), 2))
        if not pairs:
            raise ValueError(f"{type(self).__name__} compares the members of an ensemble: outputs must be (B, M, C).")
        return torch.stack([self.per_pair(*pair).double() for pair in pairs]).mean(0)


class PairwiseKL(_MeanOverPairs):
    """Kullback-Leibler divergence of one member's probabilities from another's."""

    def per_pair(self, log_p_BC: Tensor, log_q_BC: Tensor) -> Tensor:
        return (log_p_BC.exp() * (log_p_BC - log_q_BC)).sum(1)


class CosineSimilarity(_MeanOverPairs):
    """Cosine of the angle between two members' probabilities."""

    def per_pair(self, log_p_BC: Tensor, log_q_BC: Tensor) -> Tensor:
        return torch.nn.functional.cosine_similarity(log_p_BC.exp(), log_q_BC.exp(), dim=1)


class Disagreement(_MeanOverPairs):
    """Share of images for which two members predict different classes."""

    def per_pair(self, log_p_BC: Tensor, log_q_BC: Tensor) -> Tensor:
        return log_p_BC.argmax(1) != log_q_BC.argmax(1)


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
        """The quotient."""
        return torch.where(self.total == 0, self.total, self.total / self.errors)


def _at_most_1(probability: Tensor) -> Tensor:
    """Undo rounding above 1, for which torchmetrics takes the whole batch for logits."""
    return probability.clamp(max=1)


class CalibrationError(MulticlassCalibrationError):
    """Expected calibration error: distance of accuracy and confidence in 15 equal bins of the largest probability.

    A bin holds its lower bound and not its upper one, except the last, which holds confidences of exactly 1.
    torchmetrics has one more bin for these.
    """

    confidences: list[Tensor]
    accuracies: list[Tensor]

    def __init__(self, num_classes: int, from_logits: bool = True, n_bins: int = 15, **kwargs: Any):
        super().__init__(num_classes, n_bins, norm="l1", **kwargs)
        self.from_logits = from_logits

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Take in a batch of outputs and their labels (B,)."""
        p_BC = ensemble_log_probabilities(log_probabilities(outputs, self.from_logits)).exp()
        super().update(_at_most_1(p_BC), labels)

    def compute(self) -> Tensor:
        """The mean over all images of the distance in their bin."""
        confidence = dim_zero_cat(self.confidences)
        inner_bounds = torch.linspace(0, 1, self.n_bins + 1, device=confidence.device, dtype=confidence.dtype)[1:-1]
        index = torch.bucketize(confidence, inner_bounds, right=True)
        excess = dim_zero_cat(self.accuracies).double() - confidence.double()
        in_bins = excess.new_zeros(self.n_bins).index_add(0, index, excess)
        return in_bins.abs().sum() / len(confidence)


class AUROC(BinaryAUROC):
    """Area under the ROC curve for images of the training distribution and others, by their confidence."""

    def update(self, confidence: Tensor, is_in: Tensor) -> None:
        """Take in the largest probabilities (B,) of a batch, and 1 for each image of the training distribution."""
        super().update(_at_most_1(confidence), is_in)


class FPRAt95(BinaryROC):
    """False positive rate at the confidence that 95 % of the images of the training distribution reach."""

    def update(self, confidence: Tensor, is_in: Tensor) -> None:
        """Take in a batch, as :meth:`AUROC.update`."""
        super().update(_at_most_1(confidence), is_in)

    def compute(self) -> Tensor:  # type: ignore[override]
        """The rate at the highest such threshold."""
        false_positive_rate, true_positive_rate, _ = super().compute()
        return false_positive_rate[(true_positive_rate >= 0.95).nonzero()[0, 0]]
