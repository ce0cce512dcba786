"""What the classifiers of a report get right, and how sure they are, side by side."""

import math
from typing import Any

import torch

from ...analysis.evaluation import LABELS
from .. import charts
from ..observe import Observation
from .part import Part, Section

#: Which way the figures are good.
_BETTER = (
    "As timm-moe evaluate measures them. Lower is better for NLL, error, ECE, Brier score and FPR, higher for accuracy "
    "and AUROC. KL, cosine and disagreement say how far members differ, which is neither good nor bad by itself."
)
#: Points by which confidence and accuracy may differ before the model is called over- or under-confident.
TOLERANCE = 0.01
#: Pairs of classes that are shown as confused, bins of the reliability diagram, and of confidences.
CONFUSED, RELIABILITY_BINS, CONFIDENCE_BINS = 15, 15, 20


def classifier_section(observations: dict[str, Observation]) -> Section:
    """What the classifiers get right, and how sure they are; several side by side."""
    section = Section("classifier", "The classifier")
    table = [["", *observations]]
    for name, (label, layout) in LABELS.items():
        cells = [layout.format(seen.figures[name]) if name in seen.figures else "" for seen in observations.values()]
        table += [[label, *cells]] if any(cells) else []
        if name == "error":
            table.append(["top-1 accuracy", *(f"{1 - seen.figures[name]:.2%}" for seen in observations.values())])
    section.parts.append(Part("The figures", _BETTER, table=table))
    reliable = [row for name, seen in observations.items() for row in _reliability(name, seen)]
    sure = " ".join(_over_confident(name, seen, len(observations) > 1) for name, seen in observations.items())
    section.parts.append(
        Part("Is it as sure as it is right?", f"{sure} Below the dashed line it is surer than it is right.",
             charts.reliability(reliable).to_dict())
    )  # fmt: skip
    confidences = [
        row for name, seen in observations.items() for row in _confidences(name, seen, len(observations) > 1)
    ]
    chart = charts.histogram(
        confidences, "confidence", "share", "images", x_title="confidence", y_title="share of the images"
    )
    other = any(seen.ood_confidence is not None for seen in observations.values())
    text = (
        "Images of other data should be to the left."
        if other
        else "--ood-data-dir DIR puts the images of other classes beside them."
    )
    section.parts.append(Part("How sure is it?", text, chart.to_dict()))
    confused = [row for name, seen in observations.items() for row in _confused(name, seen)]
    if confused:
        head = ["class", "taken for", "images of the class", "share of them"]
        many = len(observations) > 1
        section.parts.append(
            Part(
                "Which classes are confused most?",
                table=[["model", *head] if many else head, *(row if many else row[1:] for row in confused)],
            )
        )
    return section


def _reliability(name: str, seen: Observation) -> list[dict[str, Any]]:
    right = (seen.predicted == seen.labels).double()
    index = (seen.confidence * RELIABILITY_BINS).long().clamp(max=RELIABILITY_BINS - 1)
    count = index.bincount(minlength=RELIABILITY_BINS)
    sure = index.bincount(seen.confidence.double(), RELIABILITY_BINS)
    good = index.bincount(right, RELIABILITY_BINS)
    return [
        {
            "model": name,
            "confidence": (sure[number] / count[number]).item(),
            "accuracy": (good[number] / count[number]).item(),
            "images": int(count[number]),
        }
        for number in count.nonzero().flatten().tolist()
    ]


def _over_confident(name: str, seen: Observation, named: bool) -> str:
    """Whether mean confidence and accuracy differ by more than chance (95 %) and :data:`TOLERANCE`."""
    right = (seen.predicted == seen.labels).double()
    gap = seen.confidence.double() - right
    images = len(gap)
    chance = 1.96 * (gap.std().item() if images > 1 else 1.0) / math.sqrt(images)
    if abs(gap.mean()) <= max(chance, TOLERANCE):
        verdict = f"Neither over- nor under-confident on average, as far as {images:,} images can tell"
    else:
        verdict = f"{'Over' if gap.mean() > 0 else 'Under'}-confident on average"
    return (
        f"{f'{name}: ' if named else ''}{verdict}: confidence {seen.confidence.double().mean():.1%}, accuracy "
        f"{right.mean():.1%}, difference {100 * gap.mean():+.1f} points (95 % interval ±{100 * chance:.1f}), expected "
        f"calibration error {seen.figures['ece']:.3f}."
    )


def _confidences(name: str, seen: Observation, named: bool) -> list[dict[str, Any]]:
    rows = []
    for kind, confidence in (("these images", seen.confidence), ("other data", seen.ood_confidence)):
        if confidence is None:
            continue
        share = torch.histc(confidence.float(), CONFIDENCE_BINS, 0, 1) / len(confidence)
        series = f"{name}, {kind}" if named else kind
        rows += [
            {"confidence": (index + 0.5) / CONFIDENCE_BINS, "share": value, "images": series}
            for index, value in enumerate(share.tolist())
        ]
    return rows


def _confused(name: str, seen: Observation) -> list[list[str]]:
    classes = len(seen.classes)
    wrong = seen.predicted != seen.labels
    pair, count = (seen.labels[wrong] * classes + seen.predicted[wrong]).unique(return_counts=True)
    total = seen.labels.bincount(minlength=classes)
    rows = []
    for index in count.argsort(descending=True)[:CONFUSED].tolist():
        label, taken = divmod(int(pair[index]), classes)
        share = count[index].item() / total[label].item()
        rows.append([name, seen.classes[label], seen.classes[taken], str(int(total[label])), f"{share:.0%}"])
    return rows
