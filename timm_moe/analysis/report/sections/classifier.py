"""Accuracy, confidence and confusions of a report's classifiers, side by side."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ...evaluation import LABELS
from .. import charts
from ..observe import Observation
from ..page import Part, Section

#: The direction in which each figure is good.
_BETTER = (
    "As timm-moe evaluate measures them. Lower is better for NLL, error, ECE, Brier score and FPR, "
    "higher for accuracy and AUROC. KL, cosine and disagreement say how far members differ, which "
    "is neither good nor bad by itself; KL is the divergence of the earlier member from the later."
)
_ONE_RUN = (
    " Each column is one run, and runs that differ in their seed alone differ too: timm-moe "
    "compare takes several of each method."
)
#: Difference of confidence and accuracy up to which a model is not called over- or under-confident.
TOLERANCE = 0.01
#: Pairs of classes that are shown as confused.
CONFUSED = 15
#: Bins of the reliability diagram.
RELIABILITY_BINS = 15
#: Bins of the histogram of confidences.
CONFIDENCE_BINS = 20


def classifier_section(observations: Mapping[str, Observation]) -> Section:
    """Show the figures of evaluation, calibration, confidences and confused classes.

    The observations are by the names of the models.
    """
    several = len(observations) > 1
    table = [["", *observations]]
    for name, (label, layout) in LABELS.items():
        cells = [
            layout.format(seen.figures[name]) if name in seen.figures else ""
            for seen in observations.values()
        ]
        table += [[label, *cells]] if any(cells) else []
    reliable, sure, confidences, confused = [], [], [], []
    for name, seen in observations.items():
        reliable += _reliability(name, seen)
        sure.append(f"{name}: {_calibration(seen)}" if several else _calibration(seen))
        confidences += _confidences(f"{name}, " if several else "", seen)
        confused += [[name, *row] if several else row for row in _confused(seen)]
    sure.append("Below the dashed line it is surer than it is right.")
    histogram = charts.histogram(confidences, "images", "confidence", "share of the images")
    if any(seen.ood_confidence is not None for seen in observations.values()):
        other = "Images of other data should be to the left."
    else:
        other = "--ood-data-dir DIR puts the images of other classes beside them."
    parts = [
        Part("The figures", _BETTER + (_ONE_RUN if several else ""), table=table),
        Part(
            "Is it as sure as it is right?", " ".join(sure), charts.reliability(reliable).to_dict()
        ),
        Part("How sure is it?", other, histogram.to_dict()),
    ]
    if confused:
        head = (["model"] if several else []) + [
            "class",
            "taken for",
            "images of the class",
            "share of them",
        ]
        parts.append(Part("Which classes are confused most?", table=[head, *confused]))
    return Section("classifier", "The classifier", parts)


def _reliability(name: str, seen: Observation) -> list[dict[str, Any]]:
    """Compute mean confidence and accuracy in each bin with images."""
    index = (seen.confidence * RELIABILITY_BINS).long().clamp(max=RELIABILITY_BINS - 1)
    right = seen.predicted == seen.labels
    rows = []
    for bin_number in index.unique().tolist():
        own = index == bin_number
        confidence, accuracy = (
            values[own].double().mean().item() for values in (seen.confidence, right)
        )
        rows.append(
            {
                "model": name,
                "confidence": confidence,
                "accuracy": accuracy,
                "images": int(own.sum()),
            }
        )
    return rows


def _calibration(seen: Observation) -> str:
    """Say if mean confidence and accuracy differ.

    A difference must be larger than chance (95 %) and :data:`TOLERANCE`.
    """
    right = (seen.predicted == seen.labels).double()
    gap, images = seen.confidence.double() - right, len(right)
    chance = 1.96 * (gap.std().item() if images > 1 else 1.0) / math.sqrt(images)
    if abs(gap.mean()) <= max(chance, TOLERANCE):
        verdict = (
            f"Neither over- nor under-confident on average, as far as {images:,} images can tell"
        )
    else:
        verdict = f"{'Over' if gap.mean() > 0 else 'Under'}-confident on average"
    return (
        f"{verdict}: confidence {seen.confidence.double().mean():.1%}, accuracy "
        f"{right.mean():.1%}, difference {100 * gap.mean():+.1f} points (95 % interval "
        f"±{100 * chance:.1f}), expected calibration error {seen.figures['ece']:.3f}."
    )


def _confidences(prefix: str, seen: Observation) -> list[dict[str, Any]]:
    return [
        {
            "value": (index + 0.5) / CONFIDENCE_BINS,
            "share": count / len(confidence),
            "images": f"{prefix}{kind}",
        }
        for kind, confidence in (
            ("these images", seen.confidence),
            ("other data", seen.ood_confidence),
        )
        if confidence is not None
        for index, count in enumerate(
            torch.histc(confidence.float(), CONFIDENCE_BINS, 0, 1).tolist()
        )
    ]


def _confused(seen: Observation) -> list[list[str]]:
    """List label, prediction, images of the label and share of them.

    The most frequent pairs come first.
    """
    classes = len(seen.classes)
    wrong = seen.predicted != seen.labels
    pair, count = (seen.labels[wrong] * classes + seen.predicted[wrong]).unique(return_counts=True)
    rows = []
    for index in count.argsort(descending=True)[:CONFUSED].tolist():
        label, taken = divmod(int(pair[index]), classes)
        total = int((seen.labels == label).sum())
        rows.append(
            [
                seen.classes[label],
                seen.classes[taken],
                str(total),
                f"{int(count[index]) / total:.0%}",
            ]
        )
    return rows
