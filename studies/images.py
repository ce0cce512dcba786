"""The images of a study: links to a part of a folder of images."""

import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .study import Images

SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Part:
    """Identity of a study's images.

    Attributes:
        classes: number of classes.
        digest: digest of the names of all images.
    """

    classes: int
    digest: str


def link(images: Images, source: Path, target: Path) -> Part:
    """Link the images of a study, unless this has been done.

    Args:
        images: the part to link.
        source: folder with ``train/<class>/`` and ``test/<class>/``.
        target: folder for the links.

    Raises:
        FileNotFoundError: if there are no images, or the folder has another number of classes than
            the study's.
        FileExistsError: if ``target`` holds other images.
    """
    if not source.is_dir():
        raise FileNotFoundError(f"There is no folder {source}.")
    found = _classes(source / "train")
    if len(found) != images.of:
        raise FileNotFoundError(
            f"The study is about {images.of} classes of images; {source}/train has {len(found)}."
        )
    classes = found[slice(*images.classes)]
    wanted = {path: file for name in classes for path, file in _of_class(name, images, source)}
    if not target.exists():
        _make(wanted, target)
    if {path.relative_to(target): path.resolve() for path in target.glob("*/*/*")} != wanted:
        raise FileExistsError(
            f"{target} holds other images than the study's of {source}: move it away."
        )
    names = "\n".join(sorted(map(str, wanted)))
    return Part(len(classes), hashlib.sha256(names.encode()).hexdigest()[:16])


def _classes(folder: Path) -> list[str]:
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    )


def _of_class(name: str, images: Images, source: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the path of each link of a class, and the file that it points to."""
    parts = {"train": ("train", images.train), "test": ("test", (None,))}
    if images.held_out is not None:
        parts["test"] = ("train", images.held_out)
    for split, (origin, which) in parts.items():
        for file in _files(source / origin / name)[slice(*which)]:
            yield Path(split, name, file.name), file.resolve()


def _files(folder: Path) -> list[Path]:
    files = (
        sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        if folder.is_dir()
        else []
    )
    if not files:
        raise FileNotFoundError(f"No images are in {folder}.")
    return files


def _make(links: dict[Path, Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as folder:
        unfinished = Path(folder, target.name)
        for path, file in links.items():
            (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
            (unfinished / path).symlink_to(file)
        try:
            unfinished.rename(target)
        except OSError:  # another process may have been faster; the caller checks its links
            if not target.exists():
                raise
