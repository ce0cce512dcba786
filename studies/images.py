"""The images of a study: a part of a folder, as links, so that train.py reads it as any other."""

import os
from pathlib import Path

from .study import Images

SUFFIXES = (".png", ".jpg", ".jpeg")


def link(images: Images, source: Path, target: Path) -> int:
    """Make ``target`` the part of ``source`` that a study is about, anew unless it is there already.

    Args:
        images: which.
        source: holds ``train/<class>/`` and ``test/<class>/``.
        target: a folder of links.

    Returns:
        Number of classes.

    Raises:
        FileNotFoundError: if there are no such images.
    """
    classes = _classes(source / "train")[slice(*images.classes)]
    if not classes:
        raise FileNotFoundError(f"No images of the classes that the study takes are in {source}/train/<class>/.")
    if not target.exists():
        unfinished = target.with_name(f"{target.name}.unfinished")
        for name in classes:
            _link_files(_files(source / "train" / name)[slice(*images.train)], unfinished / "train" / name)
            _link_files(_files(source / "test" / name), unfinished / "test" / name)
        unfinished.rename(target)
    return len(classes)


def _classes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"No images are in {folder}.")
    return files


def _link_files(files: list[Path], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in files:
        link = target / file.name
        if not link.exists():
            os.symlink(file.resolve(), link)
