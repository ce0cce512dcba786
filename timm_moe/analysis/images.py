"""Finds the images of a folder, numbers their classes as timm does, and opens them."""

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import ImageDataset, get_img_extensions
from timm.utils import natural_key

from ..console import describe

_logger = logging.getLogger(__name__)

#: Formats of Pillow that are opened, whatever a file's name says: another one, PostScript, would start a program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
#: Other names of a split, as in timm's scripts.
_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))


class UnreadableImage(ValueError):
    """Error that names the file."""


def image_folder(data_dir: str | Path, split: str = "validation", class_map: str = "") -> ImageDataset:
    """Open the images of a split, a folder for each class, as timm's validate.py does, and log what is taken.

    The name of the folder that holds an image is its class. Hidden files and folders, and images beside the folders of
    the classes, are left out, which timm's scripts take for a class. A link to a folder is followed once in a class.

    Args:
        data_dir: folder that holds the split's folder.
        split: ``validation`` may also be called ``val``, ``eval`` and the like; ``""`` is ``data_dir`` itself.
        class_map: text file with the name of a class in each line, in the order of their numbers; by default they are
            sorted as in timm, 2 before 10.

    Raises:
        FileNotFoundError: if there is no such folder, split or class map, or no image of a class.
        ValueError: if the class map is damaged; if it and the folders name different classes; or if without it a class
            has no images or two classes have no order.
    """
    root = str(_split_folder(Path(data_dir), split))
    found, left_out = find_images(root, get_img_extensions())
    of_class: dict[str, list[str]] = defaultdict(list)
    for path in sorted(found, key=lambda path: natural_key(os.path.basename(path))):  # as timm numbers the classes
        of_class["" if path == root else _text(os.path.basename(path))] += found[path]
    if len(of_class) > 1 and "" in of_class:
        left_out["images in no folder of a class"] = of_class.pop("")
    order = ""
    if class_map:
        names = read_class_map(class_map if os.path.exists(class_map) else Path(root, class_map))
        others = [name for name in of_class if name not in names]
        missing = [name for name in names if not of_class.get(name)]
        if others and missing:
            raise ValueError(
                f"The class map {class_map} lacks {others[0]!r}, a folder of {root}, and names {missing[0]!r}, which "
                "has no images there: correct the name, or remove one of them."
            )
        if others:
            left_out["folders that the class map lacks"] = others
    else:
        names = [*of_class]
        _check_classes(of_class, root)
        moved = [pair for pair in zip(names, sorted(names), strict=True) if pair[0] != pair[1]]
        if moved:  # torchvision has another order
            order = " in timm's order ({!r} before {!r})".format(*moved[0])
    samples = [(file, number) for number, name in enumerate(names) for file in of_class.get(name, [])]
    samples.sort(key=lambda sample: natural_key(sample[0]))
    if not samples:
        raise FileNotFoundError(f"{data_dir} has no image of a class in its split {split!r}.")
    log_taken(root, f"{len(names):,} classes{order}, {len(samples):,} images", left_out)
    return FolderImages(root, reader=FolderReader(root, samples, names, numbers_stated=bool(class_map)))


def _split_folder(folder: Path, split: str) -> Path:
    others = next((names for names in _SYNONYMS if split in names), ())
    for name in (split, *others):
        if (folder / name).is_dir():
            return folder / name
    found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir())[:5])
    raise FileNotFoundError(
        f"{folder} has no split {split!r}; its folders begin with {found}: name one with --split, or --split '' if "
        "they are the classes."
    )


def _check_classes(of_class: dict[str, list[str]], root: str) -> None:
    """Raise ValueError if a class has no images, or if two in a row have the same place in timm's order."""
    for name, files in of_class.items():
        if not files:
            raise ValueError(f"Class {name} has no images in {root}.")
    for first, second in pairwise(of_class):
        if natural_key(first) == natural_key(second):
            raise ValueError(
                f"{root} has the classes {first!r} and {second!r}, which timm numbers by chance: state the order of "
                "all classes with --class-map (class_map=)."
            )


def read_class_map(file: str | Path) -> list[str]:
    """Read the names of classes from a text file, a line for each, in the order of their numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no text, has an empty line before a name, or a name twice.
    """
    try:  # some editors begin a file with a byte-order mark
        names = [line.strip() for line in Path(file).read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"The class map {file} is no text: {describe(error)}") from error
    if "" in names:
        raise ValueError(f"Line {names.index('') + 1} of the class map {file} is empty: a line is the name of a class.")
    if len(set(names)) < len(names):
        raise ValueError(f"The class map {file} names a class twice.")
    return names


def find_images(root: str | Path, endings: Collection[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Find the files of a folder, and of the folders in it, whose names have one of these endings.

    A link to a folder is left out if the same folder of ``root`` has led there already, so no circle of links is walked
    twice.

    Returns:
        Images by their folder, an empty list for a folder that holds nothing where others hold images; what is left
        out, by the reason.
    """
    root = os.fspath(root)
    images: dict[str, list[str]] = {}
    left_out: dict[str, list[str]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for folder, folders, names in os.walk(root, followlinks=True):
        files: list[str] = []
        for name in sorted(names):
            ending, path = os.path.splitext(name)[1].lower(), os.path.join(folder, name)
            if ending in endings:
                (left_out["hidden files"] if name.startswith(".") else files).append(path)
            elif not name.startswith("."):
                left_out["files of other endings"].append(ending or name)
        left_out["hidden folders"] += [os.path.join(folder, name) for name in folders if name.startswith(".")]
        inner = [os.path.join(folder, name) for name in sorted(folders) if not name.startswith(".")]
        parent = os.path.dirname(folder)
        if files or (not inner and folder != root and (parent == root or parent not in images)):
            images[folder] = files
        folders.clear()  # os.walk goes on to the ones that are put back
        for path in sorted(inner, key=os.path.islink):  # real folders first
            place = os.path.relpath(path, root).split(os.sep)[0], os.path.realpath(path)
            if place in seen or place[1] == os.path.realpath(root):
                left_out["links to folders that are read already"].append(path)
            else:
                seen.add(place)
                folders.append(os.path.basename(path))
    return images, left_out


def _text(name: str) -> str:
    r"""Write the name of a file as text, in any locale: bytes that are no UTF-8 become ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def log_taken(root: Any, taken: str, left_out: dict[str, list[str]]) -> None:
    """Log what is taken, and each reason for leaving something out with the number of paths and some names."""
    parts = []
    for reason, paths in left_out.items():
        names = sorted({repr(_text(os.path.basename(path))) for path in paths})
        if names:
            parts.append(f"{reason} ({len(paths):,}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    message = f"{root}: {taken}{'; left out are ' if parts else ''}{', '.join(parts)}."
    _logger.log(logging.WARNING if parts else logging.INFO, message)


@dataclass
class FolderReader:
    """Files of images with the numbers of their classes, for timm's ``ImageDataset``."""

    root: str
    samples: Sequence[tuple[Any, int]]
    names: Sequence[str]  #: of the classes, in the order of their numbers
    numbers_stated: bool  #: by the user

    @property
    def class_to_idx(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def renumbered(self, names: Sequence[str]) -> "FolderReader":
        """Return the same files with the classes in another order."""
        samples = [(file, names.index(self.names[number])) for file, number in self.samples]
        return FolderReader(self.root, samples, names, self.numbers_stated)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.samples[index]


class FolderImages(ImageDataset):
    """Images of a reader of files, where one that cannot be read is an error, and not another image as in timm."""

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, label = self.reader.samples[index]
        image = read_image(file, self.input_img_mode)
        return image if self.transform is None else self.transform(image), label


def read_image(file: Any, mode: str | None = None) -> Image.Image:
    """Open and decode an image, and convert it to a mode of Pillow if one is given; or raise UnreadableImage."""
    try:
        image: Image.Image = Image.open(file, formats=FORMATS)
        image.load()
        return image if mode is None else image.convert(mode)
    except Exception as error:  # a damaged image may end in anything
        raise UnreadableImage(f"The image {file} cannot be read: {describe(error)}") from error
