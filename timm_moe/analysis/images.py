"""Folders of images as timm's scripts read them, and the reading of an image."""

import copy
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from timm.data import ImageDataset, create_dataset
from timm.utils import natural_key

from ..console import describe

_logger = logging.getLogger(__name__)

#: Formats of Pillow that are opened, whatever a file's name says. PostScript, another format, would
#: start a program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")


class UnreadableImage(ValueError):
    """Error that names the file."""


class FolderImages(ImageDataset):
    """Images of a reader of folders.

    An image that cannot be read is an error; timm's dataset takes another one in its place.
    """

    numbers_stated = True  #: by a class map or a caller; otherwise they follow from the folders

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, label = self.reader.samples[index]
        image = read_image(file, self.input_img_mode)
        return image if self.transform is None else self.transform(image), label


def image_folder(
    data_dir: str | Path,
    split: str = "validation",
    class_map: str = "",
    option: str = "--split",
) -> ImageDataset:
    """Open the images of a split, a folder for each class, as timm's train.py and validate.py do.

    :func:`timm.data.create_dataset` finds them: it decides which files are images, which folders
    are classes, and which numbers these have. The log says what it takes.

    Args:
        data_dir: folder that holds the split's folder.
        split: ``validation`` may also be called ``val``, ``eval`` and the like; ``""`` is
            ``data_dir`` itself.
        class_map: file that numbers the classes, as for timm's ``--class-map``; by default they are
            sorted by the names of the folders, 2 before 10.
        option: the command's option that names the split, for messages.

    Raises:
        FileNotFoundError: if there is no such folder or split, or no image of a class.
        ValueError: if the split asks for a part, or timm cannot list the folder; if the class map
            cannot be read, leaves a number out, or names other classes than the folders; or if
            without one timm numbers two classes by chance.
    """
    dataset = _dataset(str(data_dir), split, class_map, option)
    images = FolderImages(dataset.reader.root, reader=dataset.reader)
    images.numbers_stated = bool(class_map)
    if class_map:
        _check_class_map(images, class_map)
    else:
        _check_order(images)
    _log_taken(images)
    return images


def _dataset(data_dir: str, split: str, class_map: str, option: str) -> ImageDataset:
    if not os.path.isdir(data_dir):
        raise FileNotFoundError(f"No such folder of images: {data_dir!r}.")
    if "[" in split:
        raise ValueError(
            f"A folder has no parts of a split, as {split!r} asks for: timm takes all."
        )
    options: Any = {"class_map": class_map}  # a file's name too, though timm annotates a dict
    try:
        dataset = create_dataset("", root=data_dir, split=split, **options)
    except RuntimeError as error:
        of_map = f" that {class_map} names" if class_map else ""
        raise FileNotFoundError(
            f"{data_dir} has no image of a class{of_map} in its split {split!r}: {describe(error)}"
        ) from error
    except Exception as error:  # timm asserts, and a damaged pickle may end in anything
        if not class_map:  # such as a digit in a name that is no number for Python, as in 1²3
            raise ValueError(f"timm cannot list {data_dir}: {describe(error)}") from error
        raise ValueError(f"The class map {class_map} cannot be read: {describe(error)}") from error
    if split and dataset.reader.root == data_dir:  # without the split timm takes all that there is
        folders = sorted(path.name for path in Path(data_dir).iterdir() if path.is_dir())
        remedy = (
            f"its folders begin with {', '.join(folders[:5])}: name one with {option}, or {option} "
            ". if they are the classes."
            if folders
            else f"it has no folders: {option} . takes its images as one class."
        )
        raise FileNotFoundError(f"{data_dir} has no split {split!r}; {remedy}")
    return dataset


def _check_class_map(images: FolderImages, class_map: str) -> None:
    """Raise ValueError if names of a class map are misspelt, or its numbers leave one out."""
    numbers = images.reader.class_to_idx
    used = set(numbers.values())
    if used != set(range(len(used))):
        raise ValueError(
            f"The class map {class_map} must number the classes from 0 on and leave no number out. "
            "(Of a name that is there twice timm takes the last number.)"
        )
    folders = ImageDataset(images.reader.root).reader.class_to_idx
    lacking = [name for name in folders if name not in numbers]
    unused = [name for name in numbers if name not in folders]
    if lacking and unused:  # timm would leave the folder out
        raise ValueError(
            f"The class map {class_map} lacks {lacking[0]!r}, a folder of {images.reader.root}, "
            f"and names {unused[0]!r}, which has no images there: correct the name, or remove one."
        )


def _check_order(images: FolderImages) -> None:
    """Raise ValueError if two classes have the same place in timm's order, which sorts a set."""
    for first, second in pairwise(images.reader.class_to_idx):
        if natural_key(first) == natural_key(second):
            raise ValueError(
                f"{images.reader.root} has the classes {first!r} and {second!r}, which timm "
                "numbers by chance: state the order of all classes with --class-map (class_map=)."
            )


def _log_taken(images: FolderImages) -> None:
    """Log the numbers of classes and images, odd classes, and what in the folder gave no image."""
    root, names = images.reader.root, class_names(images)
    moved = [pair for pair in zip(names, sorted(names), strict=True) if pair[0] != pair[1]]
    order = ""
    if moved and not images.numbers_stated:  # torchvision has another order
        order = " in timm's order ({!r} before {!r})".format(*moved[0])
    parts = [f"{len(names):,} classes{order}, {len(images):,} images"]
    odd = [name for name in names if _is_odd(name)]
    if odd:
        parts.append(f"among the classes are {_listed(odd)}")
    taken = {file for file, _ in images.reader.samples}
    merged = _of_one_name(root, taken)
    if merged:
        parts.append(f"folders of one last name are one class: {_listed(merged)}")
    others = [_text(name) for name in _left_out(root, taken)]
    if others:
        parts.append(f"nothing is taken from {_listed(others)}")
    level = logging.WARNING if odd or merged or others else logging.INFO
    _logger.log(level, f"{root}: {'; '.join(parts)}.")


def _of_one_name(root: str, taken: set[str]) -> list[str]:
    """List folders of images whose last name another one has too, which timm merges.

    Those of one name follow each other. Hidden folders are left out, as the log lists them anyway.
    """
    folders = {os.path.relpath(folder, root) for folder in set(map(os.path.dirname, taken))}
    paths: dict[str, list[str]] = defaultdict(list)
    for folder in sorted(folders):
        paths[os.path.basename(folder)].append(_text(folder))
    groups = [group for name, group in paths.items() if len(group) > 1 and not _is_odd(name)]
    return [folder for group in groups for folder in group]


def _is_odd(name: str) -> bool:
    """Tell if a class is of a hidden folder, or of images beside the folders of the classes."""
    return not name or name.startswith(".")


def _left_out(root: str, taken: set[str]) -> list[str]:
    """List what in a folder gave no image, and what inside of the folders that gave some."""
    inside = {file[len(root) :].lstrip(os.sep).partition(os.sep)[0] for file in taken}
    others = sorted(name for name in os.listdir(root) if name not in inside)
    for name in sorted(inside):
        for folder, _, files in os.walk(os.path.join(root, name), followlinks=True):  # as timm does
            paths = (os.path.join(folder, file) for file in sorted(files))
            others += [os.path.relpath(path, root) for path in paths if path not in taken]
    return others


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def class_names(images: ImageDataset) -> list[str]:
    """List the classes in the order of their numbers; a class map may give several one number."""
    of_number: dict[int, list[str]] = defaultdict(list)
    for name, number in images.reader.class_to_idx.items():
        of_number[number].append(_text(name))
    return [", ".join(of_number[number]) for number in range(max(of_number) + 1)]


def _text(name: str) -> str:
    r"""Write the name of a file as text, in any locale: bytes that are no UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def renumbered(images: ImageDataset, names: Sequence[str]) -> ImageDataset:
    """Return the same images with the classes in another order."""
    number_of = [names.index(name) for name in class_names(images)]
    samples = [(file, number_of[number]) for file, number in images.reader.samples]
    return _with_reader(images, samples, {name: number for number, name in enumerate(names)})


def chosen(images: ImageDataset, indices: Sequence[int]) -> ImageDataset:
    """Return the images with these indices."""
    samples = [images.reader.samples[index] for index in indices]
    return _with_reader(images, samples, images.reader.class_to_idx)


def _with_reader(
    images: ImageDataset,
    samples: list[tuple[str, int]],
    class_to_idx: dict[str, int],
) -> ImageDataset:
    images, reader = copy.copy(images), copy.copy(images.reader)
    reader.samples, reader.class_to_idx = samples, class_to_idx
    images.reader = reader
    return images


def read_image(file: Any, mode: str | None = None) -> Image.Image:
    """Open and decode an image, and convert it to a mode of Pillow if one is given.

    Raises:
        UnreadableImage: if it is damaged, of another format than :data:`FORMATS`, or would lose
            its values by the conversion.
    """
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
        image.load()
        is_wide = image.mode.startswith(("I", "F"))
        if is_wide and mode is not None and np.asarray(image).max() > 255:
            raise ValueError(
                f"it has more than 8 bits in a channel (mode {image.mode}), of which timm, in "
                "train.py too, makes white or takes the lowest 8: write 8 bits."
            )
        return image if mode is None else image.convert(mode)
    except Exception as error:  # a damaged image may end in anything
        raise UnreadableImage(f"The image {file} cannot be read: {describe(error)}") from error
