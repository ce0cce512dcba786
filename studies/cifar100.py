"""CIFAR-100 as a folder of images: ``python -m studies.cifar100 FOLDER`` downloads it (170 MB) and writes PNG files."""

import argparse
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torchvision.datasets import CIFAR100
from tqdm import tqdm


def write(batch: Mapping[str, Any], classes: list[str], folder: Path) -> None:
    """Write ``<class>/<name>.png``, the names as the dataset has them.

    Args:
        batch: as the dataset stores it: ``"data"`` of shape (N, 3072), ``"fine_labels"`` and ``"filenames"``.
        classes: their names.
        folder: of the classes.
    """
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    rows = zip(batch["data"], batch["fine_labels"], batch["filenames"], strict=True)
    for pixels, label, name in tqdm(rows, folder.name, len(batch["data"]), unit="image"):
        image = Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0))
        image.save(folder / classes[label] / name)


def main() -> None:
    """Download, check and write."""
    parser = argparse.ArgumentParser(prog="python -m studies.cifar100", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="becomes train/<class>/ and test/<class>/")
    folder = parser.parse_args().folder
    source = folder / "download"
    try:
        classes = CIFAR100(source, download=True).classes  # which checks the files
    except OSError as error:
        sys.exit(f"CIFAR-100 cannot be downloaded from {CIFAR100.url} to {source}: {error}")
    for split in ("train", "test"):
        with (source / "cifar-100-python" / split).open("rb") as file:
            write(pickle.load(file, encoding="latin1"), classes, folder / split)


if __name__ == "__main__":
    main()
