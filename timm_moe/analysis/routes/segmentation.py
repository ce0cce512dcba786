"""Images with a label for each pixel: opened, checked, and resized to a model's input."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data import create_reader, create_transform
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from ...console import describe
from ..data import Inference, reading
from ..images import UnreadableImage, read_image

_logger = logging.getLogger(__name__)

#: Endings of images and masks.
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


def pair_files(images: str | Path, masks: str | Path) -> list[tuple[Path, Path]]:
    """Pair each image with its mask: files of two folders that are equal but for their ending.

    Raises:
        FileNotFoundError: if a folder is not there or has no image.
        ValueError: if an image has no mask, a mask no image, or two files of a folder the same
            name.
    """
    files = {"image": _files(Path(images)), "mask": _files(Path(masks))}
    for kind, other in (("image", "mask"), ("mask", "image")):
        found = files[kind]
        if lonely := sorted(found.keys() - files[other].keys()):
            raise ValueError(
                f"{len(lonely)} of {len(found)} {kind}s have no {other} of the same name, as "
                f"{found[lonely[0]]}."
            )
    pairs = [(files["image"][name], files["mask"][name]) for name in sorted(files["image"])]
    _logger.info("%s: %s images with masks.", images, f"{len(pairs):,}")
    return pairs


def _files(folder: Path) -> dict[Path, Path]:
    """Find the images of a folder, as timm does, by their path in it without the ending."""
    try:
        reader = create_reader("", root=str(folder), input_key=";".join(_SUFFIXES))
    except ValueError as error:  # a digit in a name that is no number for Python, as in 1²3
        raise ValueError(f"timm cannot list {folder}: {describe(error)}") from error
    except (AssertionError, RuntimeError) as error:  # no folder, no image
        raise FileNotFoundError(
            f"{folder} has no image: their names end in {', '.join(_SUFFIXES)}."
        ) from error
    files: dict[Path, Path] = {}
    for file in sorted(Path(file) for file, _ in reader.samples):
        name = file.relative_to(folder).with_suffix("")
        if other := files.get(name):
            raise ValueError(
                f"{other} and {file} differ by their ending alone, so no mask is theirs for "
                "certain."
            )
        files[name] = file
    return files


def read_names(file: str | Path) -> list[str]:
    """Read the names of the classes from a text file, in the order of their numbers.

    Each line is a name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no text, has an empty line before a name, or a name twice.
    """
    try:
        # Some editors begin a file with a byte-order mark, which utf-8-sig leaves out.
        lines = Path(file).read_text(encoding="utf-8-sig").rstrip().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"The class map {file} is no text: {describe(error)}") from error
    names = [line.strip() for line in lines]
    if "" in names:
        line = names.index("") + 1
        raise ValueError(
            f"Line {line} of the class map {file} is empty: a line is the name of a class."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"The class map {file} names a class twice.")
    return names


class MaskedImages(Dataset):
    """Pairs of an image (C, H, W) and its labels (H, W), both at the size of a model's input.

    The whole image is resized, not cropped; a label comes from the nearest pixel.

    Args:
        images: folder, as for :func:`pair_files`.
        masks: folder, as for :func:`pair_files`; the value of a mask's pixel is the number of its
            class.
        config: from :func:`timm_moe.model_config.preprocessing`.
        classes: names of the classes; by default every number is a class and its name.
        ignore_index: value of pixels without a class.
        mode: of the images, in Pillow.
    """

    def __init__(
        self,
        images: str | Path,
        masks: str | Path,
        config: Mapping[str, Any],
        classes: Sequence[str] | None = None,
        ignore_index: int = 255,
        mode: str = "RGB",
    ):
        self.root = Path(images)
        self.pairs = pair_files(images, masks)
        self.classes, self.ignore_index = classes, ignore_index
        self.mode = mode
        self.size = tuple(config["input_size"][1:])
        self.transform: Any = create_transform(**{**config, "crop_pct": 1.0, "crop_mode": "squash"})

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_file, mask_file = self.pairs[index]
        image, pixels = read_image(image_file, self.mode), np.array(read_image(mask_file))
        if pixels.ndim != 2:
            raise UnreadableImage(
                f"The mask {mask_file} has {pixels.shape[2]} channels; it must have one, which "
                "holds the numbers of classes."
            )
        labels = torch.from_numpy(pixels.astype(np.int64))
        if self.classes is not None:
            wrong = labels[
                (labels != self.ignore_index) & ((labels < 0) | (labels >= len(self.classes)))
            ]
            if len(wrong):
                raise UnreadableImage(
                    f"The mask {mask_file} has the label {wrong[0]}, but there are "
                    f"{len(self.classes)} classes, 0 to {len(self.classes) - 1}, and "
                    f"{self.ignore_index} for pixels without a class."
                )
        if labels.shape != (image.height, image.width):
            sizes = f"{image.width} x {image.height} and {labels.shape[1]} x {labels.shape[0]}"
            raise UnreadableImage(
                f"The image {image_file} and its mask differ in size: {sizes} pixels."
            )
        # A float32 holds the number of a class exactly below 2^24.
        resized = F.interpolate(labels[None, None].float(), self.size, mode="nearest-exact")
        return self.transform(image), resized[0, 0].long()

    def class_name(self, number: int) -> str:
        """Return the name of a class; without names it is the number."""
        return str(number) if self.classes is None else self.classes[number]

    def batches(self, inference: Inference) -> Iterator[tuple[Tensor, Tensor]]:
        """Load all pairs in order: images (B, C, H, W) and labels (B, H, W).

        Raises:
            ValueError: if a file is damaged, the sizes of a pair differ, a mask has several
                channels, or a label has no class.
        """
        _logger.info(
            "%s: whole images and masks, resized to %s pixels.",
            self.root,
            " x ".join(map(str, self.size)),
        )
        loader = DataLoader(self, inference.batch_size, num_workers=inference.workers)
        yield from reading(loader, self.root, len(self), inference)


def majority_labels(labels_BHW: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Return the most frequent label of each patch, (B, P), row by row.

    If several are equally frequent, it is the smallest. Pixels beyond the last whole patch are in
    none, as with patches of 14 in 384 pixels.

    Args:
        labels_BHW: label of each pixel.
        patch_size: height and width of a patch, in pixels.
    """
    height, width = patch_size
    patches = labels_BHW.unfold(1, height, height).unfold(2, width, width)
    return patches.flatten(3).mode(3).values.flatten(1)
