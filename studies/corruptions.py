"""Evaluation on clean and on corrupted test images.

The command is ``python -m studies.corruptions MODEL FILE OPTIONS``.

Four corruptions of two strengths each, similar to CIFAR-100-C (arXiv 1903.12261). They are applied
as the images are read, each with its own seed, so every model sees the same images.
"""

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from PIL import Image
from timm.data import ImageDataset
from torchvision.transforms.v2 import functional

from timm_moe.analysis.data import Inference
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.images import read_image

from .evaluation import add_data_options, read_data_options

#: Maps an RGB image to another one of its size.
Corruption = Callable[[Image.Image], Image.Image]


def noise(deviation: float) -> Corruption:
    """Add normal noise, its standard deviation relative to the range of a pixel."""

    def corrupt(image: Image.Image) -> Image.Image:
        pixels = functional.to_dtype(functional.pil_to_tensor(image), torch.float32, scale=True)
        return functional.to_pil_image(functional.gaussian_noise(pixels, 0.0, deviation))

    return corrupt


def blur(deviation: float) -> Corruption:
    """Blur by a Gaussian of this many pixels."""
    return lambda image: functional.gaussian_blur(image, [7, 7], [deviation, deviation])


def contrast(factor: float) -> Corruption:
    """Keep this share of the contrast."""
    return lambda image: functional.adjust_contrast(image, factor)


def jpeg(quality: int) -> Corruption:
    """Compress by JPEG."""
    return lambda image: Image.open(_written(image, "JPEG", quality=quality))


def _written(image: Image.Image, form: str, **options: int) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, form, **options)
    file.seek(0)
    return file


CORRUPTIONS: dict[str, Corruption] = {
    "noise, mild": noise(0.04),
    "noise, strong": noise(0.08),
    "blur, mild": blur(0.6),
    "blur, strong": blur(1.0),
    "contrast, mild": contrast(0.5),
    "contrast, strong": contrast(0.25),
    "JPEG, mild": jpeg(65),
    "JPEG, strong": jpeg(40),
}


class CorruptedReader:
    """A reader of timm that corrupts its images.

    Args:
        reader: reader of the clean images.
        corruption: applied to each image, with a seed that is the number of the image.
    """

    def __init__(self, reader: Any, corruption: Corruption):
        self._reader, self._corruption = reader, corruption
        self.root, self.class_to_idx = reader.root, reader.class_to_idx

    @property
    def samples(self) -> "CorruptedReader":
        """The pairs of a file and its label, as the evaluation reads them."""
        return self

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
        file, label = self._reader[index]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            corrupted = self._corruption(read_image(file, "RGB"))
        return _written(corrupted, "PNG"), label


def measure(model: str, images: ImageDataset, inference: Inference) -> dict[str, dict[str, float]]:
    """Evaluate a model on clean images and on each corruption of them.

    Returns:
        Error, NLL and ECE for ``"clean"``, for each corruption by its name, and for
        ``"corrupted"``, their mean.
    """
    clean = images.reader
    measured = {"clean": evaluate([model], images, inference=inference)}
    for name, corruption in CORRUPTIONS.items():
        images.reader = CorruptedReader(clean, corruption)
        measured[name] = evaluate([model], images, inference=inference)
    keys = ("error", "nll", "ece")
    figures = {name: {key: of_one[key] for key in keys} for name, of_one in measured.items()}
    return figures | {
        "corrupted": {key: mean(figures[name][key] for name in CORRUPTIONS) for key in keys}
    }


def main() -> None:
    """Evaluate the model and write a JSON file."""
    parser = argparse.ArgumentParser(prog="python -m studies.corruptions", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    add_data_options(parser)
    args = parser.parse_args()
    measured = measure(args.model, *read_data_options(args))
    args.file.write_text(json.dumps(measured, indent=1))


if __name__ == "__main__":
    main()
