"""CIFAR-100 as a folder of images.

``python -m studies.cifar100 FOLDER`` downloads it (170 MB) and writes PNG files.
"""

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
    """Write ``<class>/<name>.png`` with the dataset's own names.

    Args:
        batch: a file of the dataset, with ``"data"`` (N, 3072), ``"fine_labels"`` and
            ``"filenames"``.
        classes: names of the classes.
        folder: folder for the folders of the classes.
    """
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    rows = zip(batch["data"], batch["fine_labels"], batch["filenames"], strict=True)
    for pixels, label, name in tqdm(rows, folder.name, len(batch["data"]), unit="image"):
        image = Image.fromarray(pixels.reshape(3, 32, 32).transpose(1, 2, 0))
        image.save(folder / classes[label] / name)


def main() -> None:
    """Download CIFAR-100, check it and write the images."""
    parser = argparse.ArgumentParser(prog="python -m studies.cifar100", description=__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="becomes train/<class>/ and test/<class>/"
    )
    folder = parser.parse_args().folder
    source = folder / "download"
    try:
        classes = CIFAR100(source, download=True).classes  # checks the files too
    except OSError as error:
        sys.exit(f"CIFAR-100 cannot be downloaded from {CIFAR100.url} to {source}: {error}")
    for split in ("train", "test"):
        with (source / "cifar-100-python" / split).open("rb") as file:
            write(pickle.load(file, encoding="latin1"), classes, folder / split)


if __name__ == "__main__":
    main()
