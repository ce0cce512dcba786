"""examples/point_clouds.py: groups of points, models with the published names, readers, and the command."""

import copy
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import point_clouds
import pytest
import torch
from common import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from points.data import S3DIS_CLASSES, read_mnist, read_modelnet10, read_modelnet40, read_s3dis
from points.grouping import farthest_points, group_points, nearest_points, normalize
from points.models import PointTransformer, PointViT, load_point_bert
from processes import run_script

import timm_moe

DOCS = ROOT / "docs"
TINY = dict(num_groups=8, group_size=4, width=48, depth=2, num_heads=3, group_widths=(128, 256, 512, 16))


# --- groups


@settings(max_examples=25)
@given(st.integers(1, 3), st.integers(1, 30), st.data())
def test_each_point_is_the_farthest_from_those_before(clouds, num_points, data):
    count = data.draw(st.integers(1, num_points))
    points = torch.rand(clouds, num_points, 3, generator=torch.Generator().manual_seed(num_points))
    chosen = farthest_points(points, count)
    assert chosen.shape == (clouds, count)
    for cloud, indices in zip(points, chosen.tolist(), strict=True):
        assert indices[0] == 0
        assert len(set(indices)) == count
        distances = torch.cdist(cloud[None], cloud[None], compute_mode="donot_use_mm_for_euclid_dist")[0]
        for place in range(1, count):
            to_chosen = distances[:, indices[:place]].amin(1)
            torch.testing.assert_close(to_chosen[indices[place]], to_chosen.max())


def test_groups_are_the_nearest_points_seen_from_their_center():
    points = torch.rand(2, 40, 3)
    groups, centers = group_points(points, 5, 6)
    for cloud in range(2):
        for group, center in zip(groups[cloud], centers[cloud], strict=True):
            nearest = sorted(points[cloud].tolist(), key=lambda point: sum((torch.tensor(point) - center) ** 2))[:6]
            places = sorted((group + center).tolist())
            torch.testing.assert_close(torch.tensor(places), torch.tensor(sorted(nearest)))


def test_neighbors_far_from_the_origin():
    points = torch.tensor([0.0, 1, 2, 3, 4, 5])[None, :, None] * torch.tensor([2**-7, 0, 0]) + 300
    points = torch.cat([points, points + 50], 1)
    assert nearest_points(points.repeat(1, 3, 1), points[:, 2:3], 3)[0, 0].remainder(12).tolist() == [2, 2, 2]


def test_normalized_clouds():
    points = normalize(torch.rand(3, 20, 3) * 7 + 5)
    torch.testing.assert_close(points.mean(1), torch.zeros(3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(points.norm(dim=-1).amax(1), torch.ones(3))
    assert torch.equal(normalize(torch.full((1, 4, 3), 2.0)), torch.zeros(1, 4, 3))


@pytest.mark.parametrize(
    ("points", "sentence"),
    [
        (torch.rand(1, 7, 3), "8 points are needed of each cloud, these have 7"),
        (torch.rand(7, 3), r"has the shape \(clouds, points, coordinates\), not \(7, 3\)"),
        (torch.tensor([0.0, 1, torch.nan]).expand(2, 9, 3), "Cloud 0 of the batch has coordinates that are not finite"),
    ],
)
def test_clouds_that_are_refused(points, sentence):
    with pytest.raises(ValueError, match=sentence):
        PointTransformer(5, **TINY)(points)


def test_groups_of_more_points_than_there_are():
    with pytest.raises(ValueError, match="16 points are needed of each cloud, these have 10"):
        group_points(torch.rand(1, 10, 3), 4, 16)
    assert nearest_points(torch.rand(1, 10, 3), torch.rand(1, 4, 3), 10).shape == (1, 4, 10)


# --- models


def block_shapes(prefix, depth, qkv_bias):
    one = {
        "norm1.weight": (384,), "norm1.bias": (384,), "attn.qkv.weight": (1152, 384), "attn.proj.weight": (384, 384),
        "attn.proj.bias": (384,), "norm2.weight": (384,), "norm2.bias": (384,), "mlp.fc1.weight": (1536, 384),
        "mlp.fc1.bias": (1536,), "mlp.fc2.weight": (384, 1536), "mlp.fc2.bias": (384,),
    } | ({"attn.qkv.bias": (1152,)} if qkv_bias else {})  # fmt: skip
    return {f"{prefix}.{index}.{name}": shape for index in range(depth) for name, shape in one.items()}


def norm_shapes(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def point_bert_shapes():
    """Of ModelNet40's classifier in Julie-tang00/Point-BERT."""
    shapes = {"cls_token": (1, 1, 384), "cls_pos": (1, 1, 384)} | norm_shapes("norm", 384)
    linear = {
        "encoder.first_conv.0": (128, 3, 1), "encoder.first_conv.3": (256, 128, 1),
        "encoder.second_conv.0": (512, 512, 1), "encoder.second_conv.3": (256, 512, 1),
        "reduce_dim": (384, 256), "pos_embed.0": (128, 3), "pos_embed.2": (384, 128),
        "cls_head_finetune.0": (256, 768), "cls_head_finetune.3": (40, 256),
    }  # fmt: skip
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name, width in (("encoder.first_conv.1", 128), ("encoder.second_conv.1", 512)):
        shapes |= norm_shapes(name, width)
        shapes |= {f"{name}.running_mean": (width,), f"{name}.running_var": (width,), f"{name}.num_batches_tracked": ()}
    return shapes | block_shapes("blocks.blocks", 12, qkv_bias=False)


def pix4point_shapes():
    """Of S3DIS's encoder in guochengqian/openpoints, without the prefix ``encoder.``."""
    shapes = {"cls_token": (1, 1, 384), "cls_pos": (1, 1, 384)} | norm_shapes("norm", 384)
    for name, shape in {"pos_embed.0.0": (128, 3), "pos_embed.1": (384, 128)}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for stage, (wide, width) in enumerate([(10, 192), (195, 384)]):
        at = f"patch_embed.convs.{stage}"
        shapes |= {f"{at}.0.0.0.weight": (width, wide, 1, 1), f"{at}.0.1.0.weight": (width, width, 1, 1)}
        shapes |= {f"{at}.0.1.0.bias": (width,), f"{at}.1.0.0.weight": (2 * width, 2 * width, 1, 1)}
        shapes |= {f"{at}.1.1.0.weight": (width, 2 * width, 1, 1)}
        shapes |= norm_shapes(f"{at}.0.0.1", width) | norm_shapes(f"{at}.1.0.1", 2 * width)
        shapes |= norm_shapes(f"{at}.1.1.1", width)
    return shapes | block_shapes("blocks", 12, qkv_bias=True)


@pytest.mark.parametrize(
    ("model_class", "expected"), [(PointTransformer, point_bert_shapes()), (PointViT, pix4point_shapes())]
)
def test_published_names(model_class, expected):
    with torch.device("meta"):
        state = model_class().state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == expected


@torch.no_grad()
def fill(model):
    """The weights with which points.npz was computed."""
    rng = np.random.RandomState(0)  # numpy keeps its draws for good
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.is_floating_point():
            drawn = torch.from_numpy(rng.standard_normal(tensor.shape))
            drawn /= tensor[0].numel() ** 0.5 if tensor.dim() > 1 else 1
            tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
    return model.eval()


@torch.no_grad()
def test_outputs_of_the_published_code(golden):
    """points.npz is from the published models at these sizes, their CUDA sampling replaced by farthest_points."""
    expected = golden("points")
    torch.testing.assert_close(fill(PointTransformer(5, **TINY))(expected["points"]), expected["logits"])
    _, tokens = fill(PointViT(width=48, depth=2, num_heads=3, group_size=4))(expected["points"], expected["features"])
    torch.testing.assert_close(tokens, expected["tokens"], atol=1e-5, rtol=1e-4)


def checkpoint(tmp_path, state, **changes):
    """A file as Point-BERT's code writes it."""
    metrics = {"acc": torch.tensor(92.4)}
    file = {"base_model": state, "optimizer": {}, "epoch": 7, "metrics": metrics, "best_metrics": metrics, **changes}
    torch.save({name: value for name, value in file.items() if value is not None}, tmp_path / "ckpt-best.pth")
    return tmp_path / "ckpt-best.pth"


def test_a_fine_tuned_checkpoint_loads_whole(tmp_path):
    source, model = fill(PointTransformer(5, **TINY)), PointTransformer(5, **TINY).eval()
    path = checkpoint(tmp_path, {f"module.{name}": value for name, value in source.state_dict().items()})
    assert load_point_bert(model, path) == []
    points = torch.rand(2, 20, 3)
    assert torch.equal(model(points), source(points))


def test_of_a_pretrained_checkpoint_all_but_the_head_is_loaded(tmp_path):
    source, model = fill(PointTransformer(5, **TINY)), PointTransformer(5, **TINY)
    mask = {f"transformer_q.{name}": torch.zeros(1) for name in ("mask_token", "lm_head.weight", "cls_head.0.weight")}
    body = {name: value for name, value in source.state_dict().items() if not name.startswith("cls_head_finetune")}
    state = mask | {f"transformer_{part}.{name}": value for part in "qk" for name, value in body.items()}
    path = checkpoint(tmp_path, {f"module.{name}": value for name, value in state.items()} | {"module.queue": mask})
    head = load_point_bert(model, path)
    assert head == [f"cls_head_finetune.{layer}.{part}" for layer in (0, 3) for part in ("weight", "bias")]
    for name, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[name]) == (name not in head)


class Harmful:
    def __reduce__(self):
        return print, ("ran",)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("norm.bias"), r"1 tensors: of norm.bias the file has the shape None, the model \(48"),
        (lambda state: state.update(more=torch.zeros(2)), r"of more the file has the shape \(2,\), the model None"),
        (lambda state: state.update(cls_pos=torch.zeros(3)), r"of cls_pos the file has the shape \(3,\), the model"),
        (lambda state: state.update(cls_pos=Harmful()), "no checkpoint that can be read without running code"),
    ],
)
def test_checkpoints_that_do_not_fit(tmp_path, capsys, change, sentence):
    state = PointTransformer(5, **TINY).state_dict()
    change(state)
    model = PointTransformer(5, **TINY)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        load_point_bert(model, checkpoint(tmp_path, state))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "ran" not in capsys.readouterr().out


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="neither of the entries"):
        load_point_bert(PointTransformer(5, **TINY), checkpoint(tmp_path, None))
    (tmp_path / "text.pth").write_text("text")
    with pytest.raises(ValueError, match="no checkpoint that can be read"):
        load_point_bert(PointTransformer(5, **TINY), tmp_path / "text.pth")


@pytest.mark.parametrize("kind", ["classifier", "encoder"])
def test_experts_become_the_dense_model_again(kind):
    points, features = torch.rand(2, 64, 3), torch.rand(2, 64, 7)
    inputs = (points,) if kind == "classifier" else (points, features)
    small = dict(width=48, depth=2, num_heads=3)
    model = PointTransformer(5, **TINY) if kind == "classifier" else PointViT(group_size=4, **small)
    names, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
    timm_moe.convert_to_moe(model, expert_init="independent")
    blocks = "blocks.blocks" if kind == "classifier" else "blocks"
    assert list(timm_moe.moe_layers(model)) == [f"{blocks}.1.mlp"]
    dense = timm_moe.to_dense(model.eval())
    assert list(dense.state_dict()) == names
    assert [type(module) for module in dense.modules()] == kinds
    last = lambda out: out[-1] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        assert (last(dense(*inputs)) - last(model(*inputs))).abs().max() == 0.0


def test_the_variants_of_a_seed():
    """They differ in their experts alone, and the experts are those of the paper's section 6."""
    settings = {"training": {"model": TINY}, "share_rate": 0.3}
    models = {name: point_clouds.make_model(name, 1, 5, settings, None) for name in point_clouds.VARIANTS}
    dense = models["dense"].state_dict()
    for name, model in models.items():
        same = [key for key, value in model.state_dict().items() if key in dense and value.shape == dense[key].shape]
        assert len(dense) - len(same) == (0 if name == "dense" else 4)
        assert all(torch.equal(model.state_dict()[key], dense[key]) for key in same)
    layers = {name: list(timm_moe.moe_layers(model).values()) for name, model in models.items()}
    assert not layers["dense"]
    ((ewa,), (naive,), (early,)) = (layers[name] for name in ("ewa", "naive", "early-ewa"))
    assert (ewa.share_rate, ewa.share_schedule, early.share_rate, early.share_schedule) == (0.3, "linear", 0.3, "early")
    assert not naive.share_rate
    for layer in (naive, early):
        router = layer.router
        assert (router.num_experts, router.top_k, router.noise_std) == (4, 1, 0)
        assert (router.capacity_factor, router.eval_capacity_factor) == (1.2, None)
        assert router.loss_weights == {"balance": 0.01}


# --- readers


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
        (cut, "train-images-idx3-ubyte is no whole idx file"),
        (zip_and_cut, "train-images-idx3-ubyte.gz is damaged or cut off"),
        (lambda path: write_idx(path, np.zeros((40, 28, 28), np.uint8)), "Image 0 of train has no ink"),
        (lambda path: write_idx(path, np.ones((9, 28, 28), np.uint8)), "has 9 images of train and 40 labels"),
        (lambda path: None, "There are 40 images of train, 41 were asked for"),
    ],
)
def test_mnist_that_is_refused(tmp_path, damage, sentence):
    damage(write_mnist(tmp_path) / "train-images-idx3-ubyte")
    with pytest.raises(ValueError, match=sentence):
        read_mnist(tmp_path, "train", 41 if "41" in sentence else None)


def write_modelnet10(folder):
    for name, count in (("chair", 10), ("monitor", 5)):
        grids = np.zeros((count, 1, 32, 32, 32))
        grids[:, :, 4:20, 4:8, 4:6] = 1
        grids[0] = 0
        with gzip.open(folder / f"{name}.npy.gz", "wb") as file:
            np.save(file, grids)
    return folder


def test_modelnet10(tmp_path, capsys):
    train, test = (read_modelnet10(write_modelnet10(tmp_path), split) for split in ("train", "test"))
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
    with pytest.raises(ValueError, match=r"shape \(3, 32, 32, 32\), not grids"):
        read_modelnet10(tmp_path, "train")
    (tmp_path / "chair.npy.gz").unlink()
    with pytest.raises(ValueError, match=r"chair\.npy\.gz is missing"):
        read_modelnet10(tmp_path, "train")


def write_modelnet40(folder, count=4, num_points=30):
    """Balls (class cone) and sticks (class night_stand): two class names, one of them with an underscore."""
    rng = np.random.default_rng(0)
    folder.joinpath("modelnet40_shape_names.txt").write_text("cone\nnight_stand\n")
    for split, first in (("train", 0), ("test", count)):
        names = [f"{name}_{index + first + 1:04d}" for index in range(count) for name in ("cone", "night_stand")]
        folder.joinpath(f"modelnet40_{split}.txt").write_text("".join(f"{name}\n" for name in names))
        for name in names:
            path = folder / name.rpartition("_")[0] / f"{name}.txt"
            path.parent.mkdir(exist_ok=True)
            rows = rng.standard_normal((num_points, 6)) * ([2] * 6 if "cone" in name else [9, 0.1, 0.1, 1, 1, 1])
            np.savetxt(path, rows, "%.6f", ",")
    return folder


def test_modelnet40(tmp_path):
    clouds = read_modelnet40(write_modelnet40(tmp_path), "train")
    assert clouds.points.shape == (8, 30, 3)
    assert (clouds.labels.tolist(), clouds.classes) == ([0, 1] * 4, ["cone", "night_stand"])
    written = np.loadtxt(tmp_path / "night_stand/night_stand_0002.txt", delimiter=",")[:, :3]
    torch.testing.assert_close(clouds.points[3], normalize(torch.from_numpy(written)[None].float())[0])
    assert read_modelnet40(tmp_path, "test", 3, 10).points.shape == (3, 10, 3)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("modelnet40_shape_names.txt", None, "modelnet40_shape_names.txt is missing"),
        ("modelnet40_train.txt", "", "modelnet40_train.txt is empty"),
        ("modelnet40_train.txt", "vase_0001", "names vase_0001, but 'vase' is none of the classes"),
        ("modelnet40_train.txt", "cone_0009", "cone_0009.txt is missing"),
        ("cone/cone_0001.txt", "1,2,x,4,5,6", "cone_0001.txt is no table of numbers"),
        ("cone/cone_0001.txt", "1,2,3", "should have 6 finite numbers in each line"),
        ("cone/cone_0001.txt", "1,2,nan,4,5,6", "should have 6 finite numbers in each line"),
        ("cone/cone_0002.txt", "1,2,3,4,5,6", "cone_0002.txt has 1 points, 30 are needed"),
    ],
)
def test_modelnet40_that_is_refused(tmp_path, file, text, sentence):
    path = write_modelnet40(tmp_path) / file
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_modelnet40(tmp_path, "train")


def write_s3dis(folder):
    """Two rooms in both layouts; the points of a room are those of its objects in the order of their names."""
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
        np.save(folder / f"arrays/raw/Area_{area}_{room}.npy", np.concatenate(rows).astype(np.float32))
    return folder


@pytest.mark.parametrize("layout", ["texts", "arrays"])
def test_s3dis(tmp_path, layout):
    folder = write_s3dis(tmp_path) / layout
    (train,), (test,) = (list(read_s3dis(folder, split)) for split in ("train", "test"))
    assert (train.name, test.name) == ("Area_1_office_1", "Area_5_hallway_2")
    expected = torch.from_numpy(np.load(tmp_path / "arrays/raw/Area_5_hallway_2.npy"))
    assert test.labels.tolist() == [7] * 4 + [12] * 4 + [2] * 4
    torch.testing.assert_close(torch.cat([test.points, test.colors, test.labels[:, None].float()], 1), expected)
    assert [room.name for room in read_s3dis(folder, "test", 1)] == ["Area_1_office_1"]
    model = PointViT(width=48, depth=2, num_heads=3, group_size=2, stages=1)
    features = torch.cat([test.points, test.colors / 255, test.points[:, 2:]], 1)
    assert model(test.points[None], features[None])[1].shape == (1, 1 + 3, 48)


@pytest.mark.parametrize(
    ("file", "text", "sentence"),
    [
        ("wall_12.txt", b"1 2 3 4 5 6\n1 2 3 4 5\x106 7\n", "wall_12.txt is no table of numbers"),
        ("wall_12.txt", b"1 2 3 4 5\n", "should have 6 finite numbers in each line"),
        ("lamp_1.txt", b"1 2 3 4 5 6\n", "is of no class of S3DIS: 'lamp'"),
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
        (np.zeros((4, 6)), r"shape \(4, 6\), not \(points, 7\)"),
        (np.full((4, 7), 13.0), "has labels other than 0 to 12"),
        (np.array([{}]), "is no array"),
    ],
)
def test_s3dis_arrays_that_are_refused(tmp_path, array, sentence):
    np.save(write_s3dis(tmp_path) / "arrays/raw/Area_1_office_1.npy", array)
    with pytest.raises(ValueError, match=sentence):
        list(read_s3dis(tmp_path / "arrays", "train"))


def test_s3dis_without_rooms(tmp_path):
    with pytest.raises(ValueError, match="has no rooms of test"):
        read_s3dis(tmp_path, "test")


# --- the command


@pytest.fixture
def tiny_sizes(monkeypatch):
    short = dict(model={**TINY, "group_widths": (4, 8, 8, 8), "width": 12}, epochs=2, warmup_epochs=1, batch_size=8)
    for name, size in point_clouds.SIZES.items():
        sampled = dict(num_points=16, sampled_points=24) if name == "paper" else {}
        monkeypatch.setitem(point_clouds.SIZES, name, {**size, **short, **sampled})


def test_runs_are_kept_and_not_run_again(tmp_path, capsys, tiny_sizes):
    folder, output = write_mnist(tmp_path), tmp_path / "new/results.json"
    options = ["--data", "mnist", "--data-dir", str(folder), "--output", str(output), "--train-clouds", "32"]
    point_clouds.main([*options, "--seeds", "0", "--variants", "dense", "ewa"])
    first = capsys.readouterr().out
    assert "ewa, seed 0, epoch 2 of 2: training loss" in first
    assert first.endswith("logits of EWA's experts and its dense classifier: 0.0\n")
    (folder / "train-images-idx3-ubyte").rename(folder / "away")
    point_clouds.main([*options, "--seeds", "0", "--variants", "dense", "ewa"])
    assert first.endswith(capsys.readouterr().out)  # the table alone, without data
    with pytest.raises(SystemExit, match="has no train-images-idx3-ubyte"):
        point_clouds.main([*options, "--seeds", "0", "--share-rate", "0.2"])
    (folder / "away").rename(folder / "train-images-idx3-ubyte")
    point_clouds.main([*options, "--seeds", "0", "1", "--variants", "dense", "naive"])
    assert "dense, seed 0, epoch" not in capsys.readouterr().out
    runs = [(run["variant"], run["seed"]) for run in json.loads(output.read_text())]
    assert runs == [("dense", 0), ("ewa", 0), ("naive", 0), ("dense", 1), ("naive", 1)]
    point_clouds.main([*options, "--seeds", "0", "0", "--variants", "dense", "--epochs", "1"])
    assert len(json.loads(output.read_text())) == 6
    assert capsys.readouterr().out.count("| dense |") == 1


def test_what_is_drawn_anew_with_votes(tmp_path, capsys, tiny_sizes):
    folder = write_modelnet40(tmp_path, 8)
    where = ["--data-dir", str(folder), "--output", str(tmp_path / "results.json")]
    point_clouds.main(
        ["--data", "modelnet40", "--size", "paper", "--vote", "--seeds", "0", "--variants", "early-ewa", *where]
    )
    out = capsys.readouterr().out
    assert "modelnet40, test: 16 clouds of 30 points" in out
    assert "With 10 votes:" in out
    assert out.count("| early-ewa |") == 2


def test_differences_are_paired_by_seed():
    accuracies = {"dense": {0: 90.0, 1: 92.0, 2: 94.0}, "ewa": {2: 95.5, 0: 91.0}, "naive": {7: 90.0}}
    runs = [
        {"variant": variant, "seed": seed, "accuracy": accuracy, "parameters": 1000}
        for variant, by_seed in accuracies.items()
        for seed, accuracy in by_seed.items()
    ]
    assert point_clouds.table(runs).splitlines()[2:] == [
        "| dense | 92.00 ± 1.15 | 90.00, 92.00, 94.00 |  | 1,000 |",
        "| ewa | 93.25 ± 2.25 | 91.00, 95.50 | +1.25 ± 0.25 | 1,000 |",
        "| naive | 90.00 | 90.00 |  | 1,000 |",
    ]


def test_clouds_are_drawn_scaled_and_moved():
    size, points = dict(sampled_points=40, num_points=30), torch.rand(4, 50, 3) + 1
    drawn = point_clouds.sample(points, size, torch.Generator().manual_seed(0))
    assert drawn.shape == (4, 30, 3)
    assert torch.equal(drawn, point_clouds.sample(points, size, torch.Generator().manual_seed(0)))
    other = point_clouds.sample(points, size, torch.Generator().manual_seed(1))
    assert not torch.allclose(drawn.mean(1), other.mean(1), atol=1e-2)
    whole = point_clouds.sample(points, dict(sampled_points=60, num_points=60), torch.Generator().manual_seed(0))
    before, after = points.sort(1).values, whole.sort(1).values  # all points are in it: each axis is a line
    scale = (after[:, -1:] - after[:, :1]) / (before[:, -1:] - before[:, :1])
    move = (after - scale * before).mean(1, keepdim=True)
    torch.testing.assert_close(after, scale * before + move)
    assert 2 / 3 <= scale.min() < 0.9 < 1.1 < scale.max() <= 3 / 2
    assert -0.2001 <= move.min() < 0 < move.max() <= 0.2001
    assert len(scale.unique()) == len(move.unique()) == scale.numel()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--share-rate", "0.8"], "--share-rate must lie between 0 and 3 / 4"),
        (["--vote"], "--vote needs --size paper"),
        (["--size", "paper"], "--size paper needs clouds of at least 1024 points"),
        (["--checkpoint", "no.pth"], "--checkpoint no.pth is no file"),
    ],
)
def test_options_that_are_refused(capsys, options, sentence):
    with pytest.raises(SystemExit):
        point_clouds.main(["--data", "mnist", "--data-dir", "DIR", *options])
    assert sentence in capsys.readouterr().err


def test_too_few_clouds_and_files_of_others(tmp_path):
    options = ["--data", "mnist", "--data-dir", str(write_mnist(tmp_path)), "--output", str(tmp_path / "results.json")]
    with pytest.raises(SystemExit, match="40 clouds do not fill a batch of 64"):
        point_clouds.main(options)
    (tmp_path / "results.json").write_text('{"runs": 1}')
    with pytest.raises(SystemExit, match="is no results file of this command"):
        point_clouds.main(options)
    assert (tmp_path / "results.json").read_text() == '{"runs": 1}'


def test_a_training_that_breaks_off_is_told(tmp_path, tiny_sizes, monkeypatch):
    monkeypatch.setitem(point_clouds.SIZES["small"], "lr", 1e30)
    options = ["--data", "mnist", "--data-dir", str(write_mnist(tmp_path)), "--output", str(tmp_path / "results.json")]
    with pytest.raises(SystemExit, match="dense, seed 0: the training loss is nan"):
        point_clouds.main([*options, "--seeds", "0"])


@pytest.mark.ci
def test_as_a_script(tmp_path):
    """Bars and bars with a foot are told apart by all variants."""
    folder = write_mnist(tmp_path, 200)
    script = Path(point_clouds.__file__)
    done = run_script(script, "--data", "mnist", "--data-dir", folder, "--seeds", 0, "--epochs", 4, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [f"| {name}" for name in point_clouds.VARIANTS]
    assert all(float(row[1]) > 90 for row in rows)


# --- the page


@pytest.mark.parametrize("data", ["mnist", "modelnet10"])
def test_the_tables_of_the_page_are_what_the_command_prints(data, capsys, tmp_path):
    page, results = (DOCS / "ewa.md").read_text(), tmp_path / "results.json"
    shutil.copy(DOCS / "generated/point_clouds.json", results)
    (command,) = [line for line in page.splitlines() if f"--data {data} " in line and "--size" not in line]
    options = command.split()[2:]
    options[options.index("--output") + 1] = str(results)
    point_clouds.main(options)
    table, difference = capsys.readouterr().out.strip().split("\n\n")
    assert table in page
    assert difference.endswith(" 0.0")
