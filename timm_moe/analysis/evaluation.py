"""Measurements of a classifier, or an ensemble of classifiers, on a folder of images.

They are those of :mod:`.metrics`.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from timm.data import ImageDataset
from torch import Tensor, nn

from ..checkpoints.image_settings import took_bce
from ..checkpoints.model_spec import ModelSpec
from . import metrics
from .data import Inference, Source, batches, describe_source, load_classifiers
from .rows import Rows

_logger = logging.getLogger(__name__)

#: Names and formats of the numbers of an evaluation in a table, in their order.
LABELS = {
    "images": ("images", "{:,}"),
    "members": ("members", "{:,}"),
    "nll": ("NLL", "{:.4f}"),
    "accuracy": ("top-1 accuracy", "{:.2%}"),
    "error": ("error", "{:.2%}"),
    "ece": ("ECE, 15 bins", "{:.4f}"),
    "brier": ("Brier score", "{:.4f}"),
    "mean_member_nll": ("mean NLL of a member", "{:.4f}"),
    "mean_member_error": ("mean error of a member", "{:.2%}"),
    "pairwise_kl": ("KL, earlier from later", "{:.4f}"),
    "cosine_similarity": ("cosine of two members", "{:.4f}"),
    "disagreement": ("disagreement", "{:.2%}"),
    "normalized_disagreement": ("disagreement / error", "{:.4f}"),
    "ood_images": ("images of other data", "{:,}"),
    "auroc": ("AUROC", "{:.4f}"),
    "fpr_at_95": ("FPR at 95% TPR", "{:.2%}"),
}
#: Option of every metric: whichever processes evaluate, each has all images.
_ALONE: Any = {"sync_on_compute": False}


def own_members(model: Any, x: Tensor) -> Tensor:
    """Return the logits (B, M, C) of a model's members; a model without members is one."""
    return model.forward_members(x) if hasattr(model, "forward_members") else model(x).unsqueeze(1)


def evaluate(
    sources: Sequence[Source],
    images: ImageDataset,
    ood_images: ImageDataset | None = None,
    *,
    spec: ModelSpec | None = None,
    use_ema: bool = False,
    inference: Inference | None = None,
) -> dict[str, float]:
    """Measure one classifier, or the ensemble of all members of several classifiers.

    A model with a method ``forward_members``, from images to logits (B, M, C), has M members; any
    other is one. The ensemble predicts the mean of its members' probabilities (pBE, arXiv
    2110.03360, section 4).

    Args:
        sources: models, or sources of :func:`timm_moe.checkpoints.source.load_source`.
        images: from :func:`timm_moe.analysis.data.image_folder`.
        ood_images: images of other classes, which the largest mean probability should tell from the
            first.
        spec: as for ``load_source``.
        use_ema: as for ``load_source``.
        inference: settings of the forwards.

    Returns:
        The first seven numbers of :data:`LABELS`; of several members the next six, means over
        members or their pairs; with other images the last three. Errors and rates are shares, NLL
        and KL are in nats.

    Raises:
        ValueError: if an output is NaN; and as
            :func:`timm_moe.analysis.data.load_classifiers`.
    """
    inference = inference or Inference()
    models, images = load_classifiers(sources, images, spec, use_ema, inference)
    names = [describe_source(source) for source in sources]
    warn_of_bce(models, names)
    return measure(models, names, images, ood_images, inference).result()


def measure(
    models: Sequence[nn.Module],
    names: Sequence[str],
    images: ImageDataset,
    ood_images: ImageDataset | None,
    inference: Inference,
) -> "Figures":
    """Run the ensemble of models on images.

    The models and images are those of :func:`timm_moe.analysis.data.load_classifiers`; the models'
    names are for messages.

    Raises:
        ValueError: if an output is NaN.
    """
    figures = Figures(models[0].num_classes)  # type: ignore[arg-type]
    for _, log_p_BMC, labels in predictions(models, names, images, inference):
        figures.update(log_p_BMC, labels)
    if ood_images is not None:
        for _, log_p_BMC, _ in predictions(models, names, ood_images, inference):
            figures.update_ood(log_p_BMC)
    return figures


def warn_of_bce(models: Sequence[nn.Module], names: Sequence[str]) -> None:
    """Warn of models whose training had no softmax, which the figures take."""
    for model, name in zip(models, names, strict=True):
        if took_bce(model):
            _logger.warning(
                f"{name} was trained by binary cross-entropy, so that each class has a probability "
                "of its own: NLL, ECE and Brier score are those of the softmax, which it did not "
                "learn."
            )


class Figures:
    """Numbers of :func:`evaluate` for C classes, gathered batch by batch.

    Sums are kept, and of each image the label, the ensemble's prediction and its confidence.
    """

    def __init__(self, num_classes: int):
        self.members = 0
        self.labels, self.predicted = Rows(), Rows()
        self.confidence, self.ood_confidence = Rows(), Rows()
        self._of_ensemble: dict[str, metrics.Metric] = {
            "nll": metrics.NegativeLogLikelihood(**_ALONE),
            "error": metrics.ErrorRate(**_ALONE),
            "ece": metrics.CalibrationError(num_classes, **_ALONE),
            "brier": metrics.BrierScore(**_ALONE),
        }
        self._of_member: dict[str, metrics.Metric] = {
            "mean_member_nll": metrics.NegativeLogLikelihood(**_ALONE),
            "mean_member_error": metrics.ErrorRate(**_ALONE),
        }
        self._of_pairs: dict[str, metrics.Metric] = {
            "pairwise_kl": metrics.PairwiseKL(**_ALONE),
            "cosine_similarity": metrics.CosineSimilarity(**_ALONE),
            "disagreement": metrics.Disagreement(**_ALONE),
            "normalized_disagreement": metrics.NormalizedDisagreement(**_ALONE),
        }

    def update(self, log_p_BMC: Tensor, labels: Tensor) -> None:
        """Add log-probabilities (B, M, C) of images and their labels (B,)."""
        self.members = log_p_BMC.shape[1]
        for metric in self._of_ensemble.values():
            metric.update(log_p_BMC, labels)
        if self.members > 1:
            for metric in self._of_pairs.values():
                metric.update(log_p_BMC, labels)
            for metric in self._of_member.values():
                metric.update(log_p_BMC.flatten(0, 1), labels.repeat_interleave(self.members))
        self.labels.add(labels)
        log_p_B, predicted_B = metrics.ensemble_log_probabilities(log_p_BMC).max(1)
        self.predicted.add(predicted_B)
        self.confidence.add(log_p_B.exp())

    def update_ood(self, log_p_BMC: Tensor) -> None:
        """Add log-probabilities (B, M, C) of images of other data."""
        self.ood_confidence.add(metrics.ensemble_log_probabilities(log_p_BMC).amax(1).exp())

    def result(self) -> dict[str, float]:
        """Return the numbers, as :func:`evaluate` does."""
        values: dict[str, float] = {"images": len(self.confidence), "members": self.members}
        found = dict(self._of_ensemble)
        if self.members > 1:
            found |= self._of_member | self._of_pairs
        if self.ood_confidence:
            values["ood_images"] = len(self.ood_confidence)
            values |= metrics.separation(self.confidence.tensor(), self.ood_confidence.tensor())
        values |= {name: metric.compute().item() for name, metric in found.items()}
        values["accuracy"] = 1 - values["error"]
        return {name: values[name] for name in LABELS if name in values}


@torch.inference_mode()
def predictions(
    models: Sequence[nn.Module],
    names: Sequence[str],
    images: ImageDataset,
    inference: Inference,
) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """Yield the images, log-probabilities and labels of each batch.

    The images (B, ...) are those of each model. The log-probabilities (B, M, C) are of all members
    of all models, the labels (B,).

    Log-probabilities and labels are on the CPU, the former in float64: in float32 the normalisation
    may round two logits to the same probability and so change a prediction.

    Raises:
        ValueError: if an output is NaN.
    """
    for inputs, labels in batches(models, images, inference):
        parts = []
        for model, name, x in zip(models, names, inputs, strict=True):
            with inference.autocast(x):
                logits = own_members(model, x)
            parts.append(logits.cpu().double().log_softmax(2))
            if parts[-1].isnan().any():
                raise ValueError(
                    f"{name} gives outputs that are NaN or Inf: leave out --amp, or look for "
                    "NaN in its weights."
                )
        yield inputs, torch.cat(parts, 1), labels.cpu()


def table(result: dict[str, float]) -> Iterator[str]:
    """Yield a line for each number."""
    for name, value in result.items():
        label, layout = LABELS[name]
        yield f"  {label:<24} {layout.format(value)}"
