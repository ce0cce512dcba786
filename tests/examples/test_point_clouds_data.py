"""examples/point_clouds.py: the readers of data sets."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from point_cloud_files import (
    write_idx,
    write_mnist,
    write_modelnet10,
    write_modelnet40,
    write_s3dis,
)
from points.data import read_mnist, read_modelnet10, read_modelnet40, read_s3dis
from points.grouping import normalize
from points.models import PointViT


def test_mnist(tmp_path):
    clouds = read_mnist(write_mnist(tmp_path), "test", 5)
    assert clouds.points.shape == (5, 256, 3)
    assert clouds.labels.tolist() == [0, 1, 0, 1, 0]
    assert clouds.points[..., 2].eq(0).all()
    torch.testing.assert_close(clouds.points.norm(dim=-1).amax(1), torch.ones(5))
    foot = clouds.points[1]
    assert foot[foot[:, 0] > 0.4, 1].max() < 0  # the foot is below, to the right
    bar = clouds.points[0]
    assert bar[:, 1].max() - bar[:, 1].min() > 4 * (bar[:, 0].max() - bar[:, 0].min())
    assert len(clouds.points[0].unique(dim=0)) == 256
    for file in tmp_path.iterdir():
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert torch.equal(read_mnist(tmp_path, "test", 5).points, clouds.points)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def zip_and_cut(path):
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes())[:-9])
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (Path.unlink, "has no train-images-idx3-ubyte"),
        (cut, "train-images-idx3-ubyte .*idx file"),
        (zip_and_cut, r"train-images-idx3-ubyte\.gz is damaged"),
        (
            lambda path: write_idx(path, np.zeros((40, 28, 28), np.uint8)),
            "Image 0 of train",
        ),
        (
            lambda path: write_idx(path, np.ones((9, 28, 28), np.uint8)),
            "9 images of train .*40 labels",
        ),
        (lambda path: None, "40 images of train, 41 "),
    ],
)
def test_mnist_that_is_refused(tmp_path, damage, sentence):
    damage(write_mnist(tmp_path) / "train-images-idx3-ubyte")
    with pytest.raises(ValueError, match=sentence):
        read_mnist(tmp_path, "train", 41 if "41" in sentence else None)


def test_modelnet10(tmp_path, capsys):
    train, test = (
        read_modelnet10(write_modelnet10(tmp_path), split) for split in ("train", "test")
    )
    assert capsys.readouterr().out.count("monitor.npy.gz: 1 grids are empty and left out\n") == 2
    assert (train.points.shape, test.points.shape) == ((10, 512, 3), (3, 512, 3))
    assert (train.labels.bincount().tolist(), test.labels.bincount().tolist()) == ([7, 3], [2, 1])
    extent = train.points.amax(1) - train.points.amin(1)
    assert (extent[:, 0] > 3 * extent[:, 1]).all()
    assert (extent[:, 1] > 1.5 * extent[:, 2]).all()
    (tmp_path / "chair.npy.gz").write_bytes(gzip.compress(b"no array"))
    with pytest.raises(ValueError, match=r"chair\.npy\.gz is no array"):
        read_modelnet10(tmp_path, "train")
    with gzip.open(tmp_path / "chair.npy.gz", "wb") as file:
        np.save(file, np.zeros((3, 32, 32, 32)))
    with pytest.raises(ValueError, match=r"shape \(3, 32, 32, 32\)"):
        read_modelnet10(tmp_path, "train")
    (tmp_path / "chair.npy.gz").unlink()
    with pytest.raises(ValueError, match=r"chair\.npy\.gz is missing"):
        read_modelnet10(tmp_path, "train")


def test_modelnet40(tmp_path):
    clouds = read_modelnet40(write_modelnet40(tmp_path), "train")
    assert clouds.points.shape == (8, 30, 3)
    assert (clouds.labels.tolist(), clouds.classes) == ([0, 1] * 4, ["cone", "night_stand"])
    written = np.loadtxt(tmp_path / "night_stand/night_stand_0002.txt", delimiter=",")[:, :3]
    torch.testing.assert_close(
        clouds.points[3], normalize(torch.from_numpy(written)[None].float())[0]
    )
    assert read_modelnet40(tmp_path, "test", 3, 10).points.shape == (3, 10, 3)


def test_a_part_of_modelnet40_has_several_classes(tmp_path):
    """The published lists have the shapes by class."""
    file = write_modelnet40(tmp_path, 8) / "modelnet40_train.txt"
    file.write_text("\n".join(sorted(file.read_text().split())))
    for _ in range(2):
        assert read_modelnet40(tmp_path, "train", 6).labels.tolist() == [0, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("modelnet40_shape_names.txt", None, "modelnet40_shape_names.txt is missing"),
        ("modelnet40_train.txt", "", "modelnet40_train.txt is empty"),
        ("modelnet40_train.txt", "vase_0001", r"modelnet40_train\.txt .*vase_0001, .*'vase'"),
        ("modelnet40_train.txt", "cone_0009", "cone_0009.txt is missing"),
        ("cone/cone_0001.txt", "1,2,x,4,5,6", r"cone_0001\.txt .*table of numbers"),
        ("cone/cone_0001.txt", "1,2,3", r"cone_0001\.txt .*6 finite numbers"),
        ("cone/cone_0001.txt", "1,2,nan,4,5,6", r"cone_0001\.txt .*6 finite numbers"),
        ("cone/cone_0002.txt", "1,2,3,4,5,6", r"cone_0002\.txt .*1 points, 30 "),
    ],
)
def test_modelnet40_that_is_refused(tmp_path, file, text, sentence):
    path = write_modelnet40(tmp_path) / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_modelnet40(tmp_path, "train")


@pytest.mark.parametrize("layout", ["texts", "arrays"])
def test_s3dis(tmp_path, layout):
    folder = write_s3dis(tmp_path) / layout
    (train,), (test,) = (list(read_s3dis(folder, split)) for split in ("train", "test"))
    assert (train.name, test.name) == ("Area_1_office_1", "Area_5_hallway_2")
    expected = torch.from_numpy(np.load(tmp_path / "arrays/raw/Area_5_hallway_2.npy"))
    assert test.labels.tolist() == [7] * 4 + [12] * 4 + [2] * 4
    torch.testing.assert_close(
        torch.cat([test.points, test.colors, test.labels[:, None].float()], 1), expected
    )
    assert [room.name for room in read_s3dis(folder, "test", 1)] == ["Area_1_office_1"]
    model = PointViT(width=48, depth=2, num_heads=3, group_size=2, stages=1)
    features = torch.cat([test.points, test.colors / 255, test.points[:, 2:]], 1)
    assert model(test.points[None], features[None])[1].shape == (1, 1 + 3, 48)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("wall_12.txt", b"1 2 3 4 5 6\n1 2 3 4 5\x106 7\n", r"wall_12\.txt .*table of numbers"),
        ("wall_12.txt", b"1 2 3 4 5\n", r"wall_12\.txt .*6 finite numbers"),
        ("lamp_1.txt", b"1 2 3 4 5 6\n", r"lamp_1\.txt .*class of S3DIS: 'lamp'"),
        (None, None, "has no objects"),
    ],
)
def test_s3dis_texts_that_are_refused(tmp_path, file, text, sentence):
    objects = write_s3dis(tmp_path) / "texts/Area_1/office_1/Annotations"
    if file is None:
        [path.unlink() for path in objects.iterdir()]
    else:
        (objects / file).write_bytes(text)
    with pytest.raises(ValueError, match=sentence):
        list(read_s3dis(tmp_path / "texts", "train"))


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.zeros((4, 6)), r"\(4, 6\), not \(points, 7\)"),
        (np.full((4, 7), 13.0), "labels other than 0 to 12"),
        (np.array([{}]), "is no array"),
    ],
)
def test_s3dis_arrays_that_are_refused(tmp_path, array, sentence):
    np.save(write_s3dis(tmp_path) / "arrays/raw/Area_1_office_1.npy", array)
    with pytest.raises(ValueError, match=sentence):
        list(read_s3dis(tmp_path / "arrays", "train"))


def test_s3dis_without_rooms(tmp_path):
    with pytest.raises(ValueError, match="no rooms of test"):
        read_s3dis(tmp_path, "test")
