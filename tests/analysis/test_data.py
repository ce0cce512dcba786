"""Folders of images as they are in the wild: what is taken, what is left out with a word, and what is refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from common import OPTIONS, ROOT, make_model, save_as_train_py, write_images
from timm.data import ImageDataset, create_transform
from timm.models import save_for_hf

from timm_moe.analysis.data import Inference, class_names, image_folder, load_classifiers
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.routes.segmentation import MaskedImages
from timm_moe.model_config import preprocessing
from timm_moe_cli import main

pytest.importorskip("torchmetrics")

HERE = Inference(batch_size=7, workers=0, device="cpu")
CLASSES = [f"class{label}" for label in range(5)]


@pytest.fixture
def folder(tmp_path):
    """Five classes of two images."""
    return write_images(tmp_path, {"val": 2}, CLASSES)


@pytest.fixture
def model():
    return make_model("vit_tiny_patch16_224")


def save_with_names(model, folder, names):
    save_for_hf(model, str(folder), dict(label_names=names), model_args=OPTIONS, safe_serialization=True)
    return folder


def save(model, file, **more):
    channels = model.patch_embed.proj.in_channels
    images = dict(img_size=32, in_chans=channels, crop_pct=1.0, mean=[0.5] * channels, std=[0.5] * channels)
    return save_as_train_py(file, model, "vit_tiny_patch16_224", **images, **more)


def taken(images):
    """The names of the classes and the folders of their images."""
    names = class_names(images)
    return {(names[label], Path(file).parent.name) for file, label in images.reader.samples}, len(images)


ALL = ({(name, name) for name in CLASSES}, 10)


def add_hidden(val):
    for place in (val / ".ipynb_checkpoints", val / "class1/.ipynb_checkpoints"):
        shutil.copytree(val / "class0", place)
    shutil.copy(val / "class0/0.png", val / "class0/._0.png")


def add_other_endings(val):
    for name in ("a.webp", "b.WEBP", "c.tif", "notes"):
        shutil.copy(val / "class0/0.png", val / "class0" / name)


def add_loose(val):
    shutil.copy(val / "class0/0.png", val / "overview.png")


def add_circles(val):
    (val / "class0/again").symlink_to(val)
    (val / "class1/again").symlink_to(val / "class1")
    (val / "again").symlink_to(val)
    (val / "class2/loop").symlink_to("loop")


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (add_hidden, ["hidden folders (2: '.ipynb_checkpoints')", "hidden files (1: '._0.png')"]),
        (add_other_endings, ["files of other endings (4: '.tif', '.webp', 'notes')"]),
        (add_loose, ["images in no folder of a class (1: 'overview.png')"]),
        (add_circles, ["links to folders that are read already (3: 'again')"]),
    ],
)
def test_what_is_no_image_of_a_class_is_left_out_with_a_word(folder, caplog, add, words):
    add(folder / "val")
    assert taken(image_folder(folder)) == ALL
    (message,) = caplog.messages
    assert message.startswith(f"{folder / 'val'}: 5 classes, 10 images; left out are ")
    assert all(word in message for word in words), message


def test_one_line_says_what_is_taken(folder, caplog):
    with caplog.at_level("INFO", "timm_moe"):
        image_folder(folder)
    assert caplog.messages == [f"{folder / 'val'}: 5 classes, 10 images."]


def test_links_to_the_same_folder_are_classes_of_their_own(folder):
    for name in ("val2/a", "val2/b", "val2/c/inner"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(folder / "val/class0")
    assert taken(image_folder(folder, "val2"))[1] == 6
    assert class_names(image_folder(folder, "val2")) == ["a", "b", "inner"]


def test_links_that_lead_to_each_other_end(folder):
    for number in range(12):  # as links of links they would be 2^12 folders
        (folder / f"d{number}").mkdir()
        for name in ("x", "y"):
            (folder / f"d{number}" / name).symlink_to(folder / f"d{number + 1}")
    (folder / "d12").mkdir()
    shutil.copy(folder / "val/class0/0.png", folder / "d12/0.png")
    assert len(image_folder(folder, "d0")) == 2  # one of x, one of y


@pytest.mark.parametrize("with_map", [False, True])
def test_an_empty_class_beside_another_does_not_shift_the_labels(folder, tmp_path, with_map):
    (folder / "val/class0").rename(folder / "val/extra")
    (folder / "val/class0").mkdir()
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    message = "Class class0 has no images in" if not with_map else "lacks 'extra', a folder of .* and names 'class0',"
    with pytest.raises(ValueError, match=message):
        image_folder(folder, class_map=str(folder / "classes.txt") if with_map else "")


def test_a_folder_of_no_class_may_be_empty(folder):
    (folder / "val/class0/notes").mkdir()
    assert taken(image_folder(folder)) == ALL


class TestClassMap:
    def images(self, folder, content, name="classes.txt"):
        (folder / name).write_bytes(content if isinstance(content, bytes) else "\n".join(content).encode())
        return image_folder(folder, class_map=str(folder / name))

    @pytest.mark.parametrize(
        "content",
        [
            "\n".join(CLASSES[::-1]).encode("utf-8-sig"),
            "\r\n".join([*CLASSES[::-1], ""]).encode(),
            "\n".join([*CLASSES[::-1], "", " ", ""]).encode(),
        ],
    )
    def test_as_editors_write_it(self, folder, content):
        images = self.images(folder, content)
        assert class_names(images) == CLASSES[::-1]
        assert taken(images) == ALL

    def test_a_misspelt_name_is_refused(self, folder):
        with pytest.raises(ValueError, match=r"classes\.txt lacks 'class3', a folder of .* and names 'clas3', which"):
            self.images(folder, [*CLASSES[:3], "clas3", "class4"])

    def test_some_folders_may_be_taken(self, folder, caplog):
        assert taken(self.images(folder, CLASSES[:2])) == ({(name, name) for name in CLASSES[:2]}, 4)
        assert "folders that the class map lacks (3: 'class2', 'class3', 'class4')" in caplog.text

    def test_it_may_name_more(self, folder):
        images = self.images(folder, ["class9", *CLASSES])
        assert taken(images) == ALL
        assert class_names(images)[0] == "class9"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([*CLASSES[:3], "", *CLASSES[3:]], r"Line 4 of the class map .* is empty"),
            (b"\n \n", "Line 1 of the class map .* is empty"),
            ("\n".join(CLASSES).encode("utf-16"), "is no text"),
        ],
    )
    def test_a_damaged_one_is_refused(self, folder, content, message):
        with pytest.raises(ValueError, match=message):
            self.images(folder, content)

    def test_one_that_is_not_there(self, folder):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
            image_folder(folder, class_map="nowhere.txt")


class TestOrder:
    NUMBERS = ("1", "10", "2", "3", "4")  # in torchvision's order

    @pytest.fixture
    def numbered(self, tmp_path):
        return write_images(tmp_path, {"val": 3}, self.NUMBERS)

    def test_timms_order_is_taken_and_said(self, numbered, caplog):
        with caplog.at_level("INFO", "timm_moe"):
            assert class_names(image_folder(numbered)) == ["1", "2", "3", "4", "10"]
        assert "5 classes in timm's order ('2' before '10')" in caplog.text

    def test_a_model_that_names_its_classes_keeps_its_order(self, numbered, model, tmp_path, caplog):
        expected = evaluate([model], self.by_string(numbered), inference=HERE)
        assert evaluate([model], image_folder(numbered), inference=HERE)["nll"] != expected["nll"]
        save_with_names(model, tmp_path / "vit", list(self.NUMBERS))
        images = image_folder(numbered)
        assert evaluate([tmp_path / "vit"], images, inference=HERE) == expected
        assert class_names(images) == ["1", "2", "3", "4", "10"]  # the caller's images stay as they are
        assert not [record for record in caplog.records if "labels do not" in record.message]

    def by_string(self, folder):
        (folder / "classes.txt").write_text("\n".join(self.NUMBERS))
        return image_folder(folder, class_map=str(folder / "classes.txt"))

    def test_a_class_map_or_member_in_another_order_is_refused(self, numbered, model, tmp_path):
        by_timm = save_with_names(model, tmp_path / "a", ["1", "2", "3", "4", "10"])
        by_string = save_with_names(model, tmp_path / "b", list(self.NUMBERS))
        with pytest.raises(ValueError, match=r"has '10' as class 1 \(by its class map\), but .* as class 4: state"):
            load_classifiers([by_timm], self.by_string(numbered))
        for other in (by_timm, model):  # one that names no classes has them in timm's order
            with pytest.raises(ValueError, match=r"has '10' as class 1 \(by .*b\), but .* as class 4"):
                load_classifiers([by_string, other], image_folder(numbered))
            with pytest.raises(ValueError, match=r"has '2' as class 1 \(by the order of .*\), but .*b as class 2"):
                load_classifiers([other, by_string], image_folder(numbered))

    def test_classes_that_the_model_lacks_are_named(self, numbered, tmp_path):
        model = save_with_names(make_model("vit_tiny_patch16_224", num_classes=4), tmp_path / "a", ["1", "2", "3", "4"])
        with pytest.raises(ValueError, match=r"val has 5 classes, but .*a has 4, without '10'\.$"):
            load_classifiers([model], image_folder(numbered))

    def test_shifted_classes_are_refused_by_name(self, numbered, model, tmp_path):
        shifted = save_with_names(model, tmp_path / "a", ["0", "1", "2", "3", "4"])
        with pytest.raises(ValueError, match=r"has '1' as class 0 \(by the order of its folders\), but .* as class 1"):
            load_classifiers([shifted], image_folder(numbered))

    @pytest.mark.parametrize("other", ["CLASS0", "class00"])
    def test_names_without_an_order_are_refused(self, folder, other):
        """timm sorts a set by a key that is the same for both."""
        shutil.copytree(folder / "val/class0", folder / "val" / other)
        with pytest.raises(ValueError, match=rf"has the classes '{other}' and 'class0'|'class0' and '{other}'"):
            image_folder(folder)


@pytest.mark.parametrize("target", ["/dev/zero", "nowhere"])
@pytest.mark.timeout(20)
def test_a_link_to_what_is_no_image_is_refused(folder, model, target):
    file = folder / "val/class3/1.png"
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(ValueError, match=r"^The image .*class3/1\.png cannot be read: [^\n]+$"):
        evaluate([model], image_folder(folder), inference=HERE)


#: PostScript, for which Pillow starts Ghostscript.
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program of its name that leaves a trace."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin/gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    plugin = pytest.importorskip("PIL.EpsImagePlugin")
    monkeypatch.setattr(plugin, "gs_binary", None)  # what it has found
    return tmp_path / "started"


@pytest.mark.parametrize("road", ["evaluate", "dataset", "masks"])
def test_no_image_starts_a_program(folder, model, ghostscript, road):
    file = folder / "val/class3/1.png"
    file.write_bytes(POSTSCRIPT)
    images = image_folder(folder)
    if road == "masks":
        images = MaskedImages(folder / "val/class3", folder / "val/class3", preprocessing(model))
        images.pairs = [images.pairs[1]]
    with pytest.raises(ValueError, match=r"^The image .*class3/1\.png cannot be read: cannot identify image file"):
        evaluate([model], images, inference=HERE) if road == "evaluate" else list(images)
    assert not ghostscript.exists()


class TestModes:
    @pytest.mark.parametrize(("mode", "channels"), [("HSV", 3), ("YCbCr", 3), ("RGBA", 4), ("CMYK", 4), ("LA", 2)])
    def test_images_have_the_mode_of_the_training(self, folder, tmp_path, mode, channels):
        model = make_model("vit_tiny_patch16_224", in_chans=channels)
        checkpoint = save(model, tmp_path / "a.pth.tar", input_img_mode=mode)
        (loaded,), images = load_classifiers([checkpoint], image_folder(folder), inference=HERE)
        timms = ImageDataset(
            str(folder / "val"), input_img_mode=mode, transform=create_transform(**preprocessing(loaded))
        )
        x, labels = zip(*(timms[index] for index in range(10)), strict=True)
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(model(torch.stack(x)), torch.tensor(labels)).item()
        assert evaluate([checkpoint], images, inference=HERE)["nll"] == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize(("channels", "mode"), [(4, None), (3, "CMYK"), (3, "L"), (1, "RGB"), (3, "a mode")])
    def test_a_mode_of_other_channels_is_an_error(self, folder, tmp_path, channels, mode):
        """Raised by torch or Pillow: no images are taken for others."""
        model = make_model("vit_tiny_patch16_224", in_chans=channels)
        checkpoint = save(model, tmp_path / "a.pth.tar", input_img_mode=mode)
        with pytest.raises((ValueError, RuntimeError)):
            evaluate([checkpoint], image_folder(folder), inference=HERE)

    def test_a_class_map_of_the_training_is_told(self, folder, model, tmp_path, caplog):
        checkpoint = save(model, tmp_path / "a.pth.tar", class_map="names.txt")
        load_classifiers([checkpoint], image_folder(folder), inference=HERE)
        assert "was trained with the class map 'names.txt': without it (--class-map) the labels may" in caplog.text
        caplog.clear()
        (folder / "names.txt").write_text("\n".join(CLASSES))
        images = image_folder(folder, class_map=str(folder / "names.txt"))
        load_classifiers([checkpoint], images, inference=HERE)
        assert "class map" not in caplog.text


#: Names in Latin and Greek letters, in UTF-8, and one in Latin-1.
NAMES = ["café", "Ωmega", b"\xe9t\xe9"]


@pytest.fixture
def foreign_names(folder):
    for old, new in zip(CLASSES, NAMES, strict=False):
        os.rename(folder / "val" / old, os.path.join(os.fsencode(folder / "val"), os.fsencode(new)))
    return ["café", "class3", "class4", "Ωmega", r"\xe9t\xe9"]


def test_names_are_text(folder, foreign_names):
    assert class_names(image_folder(folder)) == foreign_names


@pytest.mark.ci
def test_names_are_text_in_every_locale(folder, foreign_names):
    code = """
import json, sys
from timm_moe.analysis.data import class_names, image_folder
print(json.dumps(class_names(image_folder(sys.argv[1]))))
"""
    env = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, str(folder)], env=env, capture_output=True, check=True)
    assert json.loads(done.stdout) == foreign_names


def test_the_results_of_fewshot_are_printed_in_every_locale(tmp_path, monkeypatch, model):
    write_images(tmp_path, {"train": 3, "val": 2}, CLASSES)
    save_with_names(model, tmp_path / "vit", CLASSES)
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        options = ["--data-dir", str(tmp_path), "--shots", "1", "-j", "0", "--device", "cpu"]
        assert main(["fewshot", str(tmp_path / "vit"), *options]) == 0
    assert r"\xb1" in (tmp_path / "out").read_text()
