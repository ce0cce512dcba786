"""Small data sets of point clouds in the formats that examples/points reads, and a tiny model."""

import gzip

import numpy as np
from points.data import S3DIS_CLASSES

TINY = dict(
    num_groups=8, group_size=4, width=48, depth=2, num_heads=3, group_widths=(128, 256, 512, 16)
)


def write_idx(path, array):
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + shape + array.tobytes())


def write_mnist(folder, count=40):
    """Upright bars (class 0) and the same with a foot (class 1)."""
    for stem in ("train", "t10k"):
        images, labels = np.zeros((count, 28, 28), np.uint8), np.arange(count, dtype=np.uint8) % 2
        images[:, 5:23, 10:13] = 255
        images[1::2, 20:23, 10:22] = 255
        write_idx(folder / f"{stem}-images-idx3-ubyte", images)
        write_idx(folder / f"{stem}-labels-idx1-ubyte", labels)
    return folder


def write_modelnet10(folder):
    for name, count in (("chair", 10), ("monitor", 5)):
        grids = np.zeros((count, 1, 32, 32, 32))
        grids[:, :, 4:20, 4:8, 4:6] = 1
        grids[0] = 0
        with gzip.open(folder / f"{name}.npy.gz", "wb") as file:
            np.save(file, grids)
    return folder


def write_modelnet40(folder, count=4, num_points=30):
    """Write balls (class cone) and sticks (class night_stand).

    One of the two class names has an underscore.
    """
    rng = np.random.default_rng(0)
    folder.joinpath("modelnet40_shape_names.txt").write_text("cone\nnight_stand\n")
    for split, first in (("train", 0), ("test", count)):
        names = [
            f"{name}_{index + first + 1:04d}"
            for index in range(count)
            for name in ("cone", "night_stand")
        ]
        folder.joinpath(f"modelnet40_{split}.txt").write_text(
            "".join(f"{name}\n" for name in names)
        )
        for name in names:
            path = folder / name.rpartition("_")[0] / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            rows = rng.standard_normal((num_points, 6)) * (
                [2] * 6 if "cone" in name else [9, 0.1, 0.1, 1, 1, 1]
            )
            np.savetxt(path, rows, "%.6f", ",")
    return folder


def write_s3dis(folder):
    """Write two rooms in both layouts.

    The points of a room come from its objects in the order of their names.
    """
    rng = np.random.default_rng(0)
    (folder / "arrays/raw").mkdir(parents=True)
    for area, room in ((1, "office_1"), (5, "hallway_2")):
        objects = folder / f"texts/Area_{area}/{room}/Annotations"
        objects.mkdir(parents=True)
        (objects.parent / f"{room}.txt").write_text("the points of the whole room\n")
        rows = []
        for name in ("chair_1", "stairs_1", "wall_12"):
            table = np.concatenate([rng.random((4, 3)).round(3), rng.integers(0, 256, (4, 3))], 1)
            np.savetxt(objects / f"{name}.txt", table, "%g")
            label = S3DIS_CLASSES.index(name.partition("_")[0].replace("stairs", "clutter"))
            rows.append(np.concatenate([table, np.full((4, 1), label)], 1))
        np.save(
            folder / f"arrays/raw/Area_{area}_{room}.npy", np.concatenate(rows).astype(np.float32)
        )
    return folder
