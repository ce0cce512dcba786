"""Finds the images of a folder, numbers their classes as timm does, and opens them; what does not fit is refused."""

import logging
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image
from timm.data import ImageDataset, get_img_extensions
from timm.data.readers.reader import Reader
from timm.utils import natural_key

from ..checkpoints.source import describe

_logger = logging.getLogger(__name__)

#: Formats of Pillow that are opened, whatever a file's name says: another one, PostScript, would start a program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
#: Other names of a split, as in timm's scripts.
_SYNONYMS = (("train", "training"), ("val", "valid", "validation", "eval", "evaluation"))
#: Images with sides of a larger ratio are refused where a resize would give them more pixels.
_LARGEST_RATIO, _MOST_PIXELS = 16, 2**26


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
        ValueError: if the class map is damaged, or a pickle; if it and the folders name different classes; if without
            it a class has no images or two classes have no order; or if an image is no regular file.
    """
    folder = Path(data_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no data folder {folder}.")
    root = str(_split_folder(folder, split))
    names = None if not class_map else read_class_map(class_map if os.path.exists(class_map) else Path(root, class_map))
    found, empty, left_out = find_images(root, get_img_extensions())
    of_class: dict[str, list[str]] = defaultdict(list)
    for path, files in found.items():
        of_class[_utf8(os.path.basename(path)) if path != root else ""] += files
    if len(of_class) > 1 and "" in of_class:
        left_out["images in no folder of a class"] = of_class.pop("")
    if names is None:
        if empty:
            raise ValueError(
                f"Class {_text(min(_utf8(os.path.basename(path)) for path in empty))} has no images in {root}."
            )
        names = _in_order(of_class, root)
    elif others := [name for name in of_class if name not in names]:
        if missing := [name for name in names if name not in of_class]:
            raise ValueError(
                f"The class map {class_map} lacks {_text(others[0])!r}, a folder of {root}, and names {missing[0]!r}, "
                "which has no images there: correct the name, or remove one of them."
            )
        left_out["folders that the class map lacks"] = others
    samples = [(file, number) for number, name in enumerate(names) for file in of_class.get(name, [])]
    samples.sort(key=lambda sample: (natural_key(sample[0]), sample))
    if not samples:
        raise FileNotFoundError(f"{folder} has no image of a class in its split {split!r}.")
    reader = FolderReader(root, samples, [*map(_text, names)], numbers_stated=bool(class_map))
    in_words = "" if class_map else _order(names)
    log_taken(root, f"{len(names):,} classes{in_words}, {len(samples):,} images", left_out)
    return FolderImages(reader)


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


def read_class_map(file: str | Path) -> list[str]:
    """Read the names of classes from a text file, a line for each, in the order of their numbers.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no text, names no class, has an empty line before a name, or a name twice.
    """
    if not Path(file).is_file():
        raise FileNotFoundError(f"There is no class map {file}.")
    if str(file).endswith(".pkl"):
        raise ValueError(f"{file} may run code when it is read: write the names of the classes to a text file.")
    try:  # some editors begin a file with a byte-order mark
        names = [line.strip() for line in Path(file).read_text(encoding="utf-8-sig").rstrip().split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"The class map {file} is no text: {describe(error)}") from error
    if names == [""]:
        raise ValueError(f"The class map {file} names no class.")
    if "" in names:
        raise ValueError(f"Line {names.index('') + 1} of the class map {file} is empty: a line is the name of a class.")
    if len(set(names)) < len(names):
        raise ValueError(f"The class map {file} names a class twice.")
    return names


def find_images(
    root: str | Path, endings: Collection[str]
) -> tuple[dict[str, list[str]], list[str], dict[str, list[str]]]:
    """Find the files of a folder, and of the folders in it, whose names have one of these endings.

    Real folders come before links to folders, and what was found already in the same folder of ``root`` is left out,
    so no circle of links is walked twice.

    Returns:
        Images by their folder; folders that hold nothing where others hold images; what is left out, by the reason.

    Raises:
        ValueError: if such a file is no regular one.
    """
    images: dict[str, list[str]] = {}
    empty: list[str] = []
    left_out: dict[str, list[str]] = defaultdict(list)

    def visit(folder: str) -> list[str]:
        files: list[str] = []
        folders: list[str] = []
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            hidden, named = entry.name.startswith("."), os.path.splitext(entry.name)[1].lower() in endings
            if os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir():
                (left_out["hidden folders"] if hidden else folders).append(entry.path)
            elif not named:
                if not hidden:
                    left_out["files of other endings"].append(os.path.splitext(entry.name)[1].lower() or entry.name)
            elif hidden:
                left_out["hidden files"].append(entry.path)
            elif os.path.isfile(entry.path) if entry.is_symlink() else entry.is_file():
                files.append(entry.path)
            else:
                raise ValueError(f"{entry.path} is no image but a pipe, a device or a broken link: remove it.")
        parent = os.path.dirname(folder)
        if files:
            images[folder] = files
        elif not folders and folder != str(root) and (parent == str(root) or parent not in images):
            empty.append(folder)
        return folders

    for top in visit(str(root)):
        real, links, seen = ([], [top], {_identity(root)}) if os.path.islink(top) else ([top], [], {_identity(root)})
        while real or links:
            folder = (real or links).pop()
            if _identity(folder) in seen:
                left_out["links to folders that are read already"].append(folder)
                continue
            seen.add(_identity(folder))
            for inner in visit(folder):
                (links if os.path.islink(inner) else real).append(inner)
    return images, empty, left_out


def _identity(folder: str | Path) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _in_order(names: Collection[str], root: str) -> list[str]:
    """Sort the names as timm does, where the order does not depend on chance."""
    ordered = sorted(names, key=natural_key)
    for first, second in pairwise(ordered):
        if natural_key(first) == natural_key(second):
            first, second = sorted((_text(first), _text(second)))
            raise ValueError(
                f"{root} has the classes {first!r} and {second!r}, which timm numbers by chance: state the order of "
                "all classes with --class-map (class_map=)."
            )
    return ordered


def _order(names: Sequence[str]) -> str:
    """Tell timm's order of the classes where torchvision has another."""
    pairs = zip(names, sorted(names), strict=True)
    return next((f" in timm's order ({_text(a)!r} before {_text(b)!r})" for a, b in pairs if a != b), "")


def _utf8(name: str) -> str:
    """Read a file's name as UTF-8, whatever the locale is; other bytes become surrogates."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _text(name: str) -> str:
    r"""Write surrogates, which no file of text may hold, as ``\xff``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def log_taken(root: Any, taken: str, left_out: dict[str, list[str]]) -> None:
    """Log what is taken, and each reason for leaving something out with the number of paths and some names."""
    parts = []
    for reason, paths in left_out.items():
        names = sorted({repr(_text(_utf8(os.path.basename(path)))) for path in paths})
        parts.append(f"{reason} ({len(paths):,}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''})")
    message = f"{root}: {taken}{'; left out are ' if parts else ''}{', '.join(parts)}."
    _logger.log(logging.WARNING if parts else logging.INFO, message)


class FolderReader(Reader):
    """Files of images with the numbers of their classes, for timm's ``ImageDataset``.

    Attributes:
        class_to_idx: numbers of the classes by their names, in order.
        numbers_stated: the user has stated the numbers.
    """

    def __init__(self, root: str, samples: list[tuple[str, int]], names: Sequence[str], numbers_stated: bool):
        super().__init__()
        self.root, self.samples, self.numbers_stated = root, samples, numbers_stated
        self.class_to_idx = {name: number for number, name in enumerate(names)}

    def renumber(self, names: Sequence[str]) -> None:
        """Number the same classes in another order."""
        number_of = [names.index(name) for name in self.class_to_idx]
        self.samples = [(file, number_of[number]) for file, number in self.samples]
        self.class_to_idx = {name: number for number, name in enumerate(names)}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, number = self.samples[index]
        return open(file, "rb"), number

    def _filename(self, index: int, basename: bool = False, absolute: bool = False) -> str:
        file = self.samples[index][0]
        return file if absolute else os.path.basename(file) if basename else os.path.relpath(file, self.root)


class FolderImages(ImageDataset):
    """Images of a reader, where one that cannot be read is an error, and not another image as in timm.

    Args:
        reader: gives the files.
        wanted: numbers of the images; by default all.
        mode: of Pillow.
        side: length to which the shorter side is resized, if the transform keeps the ratio of both.
    """

    def __init__(self, reader: Any, wanted: Sequence[int] | None = None, mode: str = "RGB", side: float = 0):
        super().__init__(reader.root, reader=reader, input_img_mode=mode)
        self.wanted, self.side = wanted, side

    def __len__(self) -> int:
        return len(self.reader if self.wanted is None else self.wanted)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file, label = self.reader.samples[index if self.wanted is None else self.wanted[index]]
        image = read_image(file, self.input_img_mode)
        if self.transform is None:
            return image, label
        sides = f"{image.width} x {image.height}"
        ratio = max(image.size) / min(image.size)
        if ratio > _LARGEST_RATIO and ratio * self.side**2 > _MOST_PIXELS:
            raise UnreadableImage(f"The image {file} of {sides} pixels is too thin to be resized: crop or remove it.")
        try:
            return self.transform(image), label
        except Exception as error:
            raise UnreadableImage(
                f"The image {file} of {sides} pixels is not transformed: {describe(error)}"
            ) from error


def read_image(file: Any, mode: str | None = None) -> Image.Image:
    """Open and decode an image, and convert it to a mode of Pillow if one is given; or raise UnreadableImage."""
    try:
        if isinstance(file, (str, Path)) and not os.path.isfile(file):
            raise OSError("it is no regular file.")
        image: Image.Image = Image.open(file, formats=FORMATS)
        if image.format == "PNG":  # decoding does not look at its checksums
            image.verify()
            image = Image.open(file, formats=FORMATS)
        image.load()
        return image if mode is None else image.convert(mode)
    except Exception as error:  # a damaged image may end in anything
        raise UnreadableImage(f"The image {file} cannot be read: {describe(error)}") from error
