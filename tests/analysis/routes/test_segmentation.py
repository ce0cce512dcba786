"""Images with masks, and which classes of patches go to which experts.

The experts are compared with the routers' weights applied by hand.
"""

import csv
import json

import numpy as np
import pytest
import torch
from common import make_model, save_as_train_py
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from timm_moe import moe_layers
from timm_moe.analysis.data import Inference, image_bytes, image_mode
from timm_moe.analysis.routes.segmentation import MaskedImages, majority_labels, pair_files
from timm_moe.analysis.routes.statistics import collect_patch_routes, summarize
from timm_moe.callbacks import export_moe
from timm_moe.checkpoints.source import load_source
from timm_moe.model_config import preprocessing
from timm_moe_cli import main

HERE = Inference(batch_size=2, workers=0, device="cpu")
NAMES = ["sky", "road", "tree"]
VOID = 9


def write(file, pixels):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file)


@pytest.fixture
def masked(tmp_path):
    """Write images of 48 x 40 pixels whose brightness is that of their labels.

    One corner of each has no class.
    """
    random = np.random.default_rng(0)
    for name in ("a", "b", "c", "city/d"):
        labels = random.integers(0, 3, (5, 6)).repeat(8, 0).repeat(8, 1)
        write(tmp_path / "images" / f"{name}.jpg", np.stack([80 * labels] * 3, 2))
        labels[:10, :12] = VOID
        write(tmp_path / "masks" / f"{name}.png", labels)
    return tmp_path


def backbone(name="vimoe_s14", **options):
    return make_model(name, **{"num_classes": 0, "num_experts": 4, **options})


def masked_images(masked, model, classes=NAMES):
    folders = masked / "images", masked / "masks"
    return MaskedImages(*folders, preprocessing(model), classes, VOID, image_mode(model))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_majority_of_a_patch(batch, rows, columns, side, data):
    numbers = st.lists(
        st.integers(0, 3), min_size=(size := batch * rows * columns * side**2), max_size=size
    )
    labels = torch.tensor(data.draw(numbers)).view(batch, rows * side, columns * side)
    rest = data.draw(st.integers(0, side - 1))  # pixels beyond the last whole patch
    labels = nn.functional.pad(labels, (0, rest, 0, rest), value=3)
    majority = majority_labels(labels, (side, side)).view(batch, rows, columns)
    for image in range(batch):
        for row in range(rows):
            for column in range(columns):
                patch = labels[
                    image, row * side : (row + 1) * side, column * side : (column + 1) * side
                ]
                assert majority[image, row, column] == patch.flatten().bincount().argmax()


def test_images_and_masks_stay_aligned(masked):
    images = masked_images(masked, backbone(img_size=(24, 64)))
    assert [image.relative_to(masked).as_posix() for image, _ in images.pairs][
        -1
    ] == "images/city/d.jpg"
    for image, labels in images:
        assert image.shape == (3, 24, 64)
        assert labels.shape == (24, 64)
        assert set(labels[:5, :15].flatten().tolist()) == {VOID}  # of 10 x 12 of 40 x 48 pixels
        brightness = (
            image[0] * images.transform.transforms[-1].std[0]
            + images.transform.transforms[-1].mean[0]
        )
        known = labels != VOID
        shown = (brightness * 255 / 80).round()
        assert (shown == labels)[known].float().mean() > 0.9


@pytest.mark.parametrize(
    ("name", "options", "members"),
    [
        ("vimoe_s14", dict(routing_unit="token"), 1),
        ("vimoe_s14", dict(routing_unit="token", reg_tokens=2, img_size=(32, 48)), 1),
        ("vimoe_s14", dict(routing_unit="image"), 1),
        ("vit_tiny_moe", dict(top_k=2), 1),
        ("vmoe_pbe_b32", dict(num_experts=4, ensemble_size=2, top_k=1), 2),
    ],
)
def test_patches_are_counted_by_their_label(masked, name, options, members):
    model = backbone(name, moe_layers="3", **options)
    ((path, layer),) = moe_layers(model).items()
    seen = []
    layer.router.register_forward_hook(
        lambda _, args, routing: seen.append(routing.experts().view(len(args[0]), -1))
    )
    images = masked_images(masked, model)
    (routes,) = collect_patch_routes(model, images, HERE)
    tokens = model.num_prefix_tokens + model.patch_embed.num_patches
    chosen = torch.cat(seen).view(len(images), members, tokens, -1)
    expected = torch.zeros(3, 4, dtype=torch.double)
    different, patches = [], 0
    for image, (_, labels) in enumerate(images):
        classes = majority_labels(labels[None], model.patch_embed.patch_size)[0]
        used = set()
        for patch, label in enumerate(classes.tolist()):
            experts = chosen[image, :, model.num_prefix_tokens + patch].flatten().tolist()
            for expert in experts if label != VOID else ():
                expected[label, expert] += 1
                used.add(expert)
            patches += label != VOID
        different.append(len(used))
    assert patches < len(images) * model.patch_embed.num_patches
    assert routes.layer == path
    assert routes.classes == NAMES
    torch.testing.assert_close(routes.load(), expected.sum(0) / expected.sum())
    torch.testing.assert_close(
        routes.share_CE(), expected / expected.sum(1, keepdim=True).clamp(min=1)
    )
    assert summarize(routes, 0.1)["experts_per_image"] == pytest.approx(np.mean(different))
    assert (routes.images(), routes.patches()) == (len(images), patches)


def test_grey_images(masked):
    """The config of the weights has a mean for each of three channels; timm averages them."""
    model = backbone(routing_unit="token", in_chans=1)
    config = preprocessing(model)
    assert config["mean"] == pytest.approx([np.mean(model.pretrained_cfg["mean"])])
    images = masked_images(masked, model)
    assert collect_patch_routes(model, images, HERE)[0].images() == 4
    image, labels = images[0]
    known = labels != VOID
    shown = image_bytes(image[None], model)[0]
    assert shown.shape[0] == 3
    for channel in shown:
        assert ((channel / 80).round() == labels)[known].float().mean() > 0.9


def command(masked, model, *options):
    export_moe(model, masked / "model", overwrite=True)
    return [*command_for(masked, masked / "model"), *options]


def command_for(masked, source):
    where = ["--data-dir", str(masked / "images"), "--segmentation", str(masked / "masks")]
    return ["routes", str(source), str(masked / "out"), *where, "-j", "0", "--device", "cpu"]


def test_the_command(masked, capsys):
    (masked / "classes.txt").write_text("\n".join(NAMES))
    model = backbone(routing_unit="token")
    options = ["--ignore-index", str(VOID), "--class-map", str(masked / "classes.txt")]
    assert main(command(masked, model, *options)) == 0
    routes = collect_patch_routes(model, masked_images(masked, model), HERE)
    assert (
        f"images 4, patches {routes[0].patches()}, experts of an image" in capsys.readouterr().out
    )
    written = json.loads((masked / "out/routes.json").read_text())
    assert (written["images"], written["patches"]) == (4, routes[0].patches())
    assert (written["segmentation"], written["ignore_index"], written["split"]) == (
        str(masked / "masks"),
        VOID,
        None,
    )
    with open(masked / "out/routes.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["layer"] == routes[1].layer]
    assert [float(row["share"]) for row in rows] == pytest.approx(
        routes[1].share_CE().flatten().tolist(), rel=1e-6
    )
    assert [row["class"] for row in rows[::4]] == NAMES


def test_the_number_of_what_has_no_class_may_be_zero(masked):
    assert main(command(masked, backbone(), "--ignore-index", "0")) == 0
    with open(masked / "out/routes.csv") as file:
        assert {row["class"] for row in csv.DictReader(file)} == {"1", "2", str(VOID)}


def test_the_command_takes_the_ema_weights_that_are_asked_for(masked):
    name = "vit_tiny_moe"
    plain, ema = (backbone(name) for _ in range(2))
    file = save_as_train_py(masked / "a.pth", plain, name, ema=ema, num_classes=0, img_size=32)
    assert main([*command_for(masked, file), "--use-ema", "--ignore-index", str(VOID)]) == 0
    expected = collect_patch_routes(ema, masked_images(masked, ema, None), HERE)
    written = json.loads((masked / "out/routes.json").read_text())["layers"]
    assert [layer["load"] for layer in written] == [each.load().tolist() for each in expected]


def test_without_names_classes_are_their_numbers(masked):
    model = backbone(routing_unit="token")
    assert collect_patch_routes(model, masked_images(masked, model, classes=None), HERE)[
        0
    ].classes == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("file", "pixels", "message"),
    [
        (
            "masks/a.png",
            np.zeros((20, 48)),
            "images/a.jpg and its mask differ in size: 48 x 40 and 48 x 20 pixels.",
        ),
        (
            "masks/a.png",
            np.full((40, 48), 3),
            "has the label 3, but there are 3 classes, 0 to 2, and 9 for pixels",
        ),
        ("masks/a.png", np.zeros((40, 48, 3)), "masks/a.png has 3 channels; it must have one"),
        ("masks/a.png", b"no image", "masks/a.png cannot be read: "),
        ("masks/e.png", np.zeros((40, 48)), "1 of 5 masks have no image of the same name, as "),
        ("images/e.png", np.zeros((40, 48)), "1 of 5 images have no mask of the same name, as "),
        (
            "masks/a.bmp",
            np.zeros((40, 48)),
            "masks/a.png differ by their ending alone, so no mask is theirs for certain.",
        ),
        ("classes.txt", b"sky\nroad\nsky", "classes.txt names a class twice."),
        ("classes.txt", b"\n", "Line 1 of the class map"),
        ("classes.txt", b"\xff", "classes.txt is no text: "),
    ],
)
@pytest.mark.parametrize("workers", ["0", "1"])
@pytest.mark.first_case
def test_bad_data(masked, capsys, workers, file, pixels, message):
    (masked / "classes.txt").write_text("\n".join(NAMES))
    if isinstance(pixels, bytes):
        (masked / file).write_bytes(pixels)
    else:
        write(masked / file, pixels)
    options = [
        "--ignore-index",
        str(VOID),
        "--class-map",
        str(masked / "classes.txt"),
        "-j",
        workers,
    ]
    assert main(command(masked, backbone(routing_unit="token"), *options)) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in error
    assert not (masked / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "test"], "so --split has no place."),
        (["--crop-pct", "0.9"], "so --crop-pct has no place."),
        (["--crop-mode", "center"], "so --crop-mode has no place."),
        (["--segmentation", "nowhere"], "nowhere has no image: their names end in .png, "),
        (["--data-dir", "."], "has no image: their names end in .png, "),
    ],
)
@pytest.mark.first_case
def test_bad_options(masked, monkeypatch, capsys, options, message):
    (masked / "empty").mkdir()
    monkeypatch.chdir(masked / "empty")
    assert main(command(masked, backbone(routing_unit="token"), *options)) == 1
    assert message in capsys.readouterr().err


def test_an_ignored_label_needs_masks(masked, capsys):
    assert main(["routes", "model", "out", "--data-dir", str(masked), "--ignore-index", "9"]) == 1
    assert "--segmentation" in capsys.readouterr().err


def test_other_files_are_left_out_and_one_line_says_what_is_taken(masked, caplog):
    before = pair_files(masked / "images", masked / "masks")
    (masked / "images/readme.txt").touch()
    with caplog.at_level("INFO", "timm_moe"):
        assert masked_images(masked, backbone()).pairs == before
    assert caplog.messages == [f"{masked / 'images'}: 4 images with masks."]


def test_an_empty_line_of_a_class_map_does_not_shift_the_classes(masked, capsys):
    (masked / "classes.txt").write_text("sky\n\nroad\ntree\n")
    assert main(command(masked, backbone(), "--class-map", str(masked / "classes.txt"))) == 1
    assert "Line 2 of the class map" in capsys.readouterr().err


def test_masks_without_classes(masked):
    for _, mask in pair_files(masked / "images", masked / "masks"):
        write(mask, np.full((40, 48), VOID))
    model = backbone(routing_unit="token")
    with pytest.raises(ValueError, match=r"label 9, .*patch"):
        collect_patch_routes(model, masked_images(masked, model), HERE)


def test_models_whose_tokens_are_no_patches(masked):
    model = backbone("vit_tiny_moe")
    model.num_prefix_tokens = 0
    with pytest.raises(ValueError, match=r"mlp routes 17 rows .*16 patches and 0 "):
        collect_patch_routes(model, masked_images(masked, model), HERE)


def test_models_that_do_not_say_where_their_patches_are(masked):
    model = backbone("vit_tiny_moe")
    images = masked_images(masked, model)
    del model.num_prefix_tokens
    with pytest.raises(ValueError, match="lacks num_prefix_tokens"):
        collect_patch_routes(model, images, HERE)


def test_a_folder_of_a_backbone_is_opened_without_a_classifier(tmp_path):
    model = backbone()
    export_moe(model, tmp_path / "model")
    loaded = load_source(tmp_path / "model")
    assert loaded.num_classes == 0
    assert loaded.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("size", [(16, 64), (64, 16), (64, 64)])
def test_the_patches_are_those_of_the_images_and_not_of_the_size_that_the_model_is_built_for(
    masked, size
):
    model = backbone(dynamic_img_size=True, img_size=32)
    config = {**preprocessing(model), "input_size": (3, *size)}
    images = MaskedImages(masked / "images", masked / "masks", config, NAMES, VOID)
    routes = collect_patch_routes(model, images, HERE)
    expected = torch.stack([majority_labels(labels[None], (8, 8))[0] for _, labels in images])
    known = routes[0].labels >= 0
    assert torch.equal(routes[0].labels[known], expected[known])
