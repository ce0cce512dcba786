"""Folders of images as they are in the wild.

Some things are taken, some are left out with a word, and some are refused.
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path, PureWindowsPath

import numpy as np
import pytest
import torch
from common import OPTIONS, ROOT, make_model, save_as_train_py, write_images
from PIL import Image
from timm.data import ImageDataset, create_dataset, create_transform
from timm.models import save_for_hf

import timm_moe
from timm_moe.analysis.data import (
    Inference,
    class_names,
    image_bytes,
    image_folder,
    image_mode,
    load_classifiers,
    open_model,
    short_names,
)
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.routes.segmentation import MaskedImages, pair_files
from timm_moe.model_config import preprocessing, records_arguments
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
    save_for_hf(
        model, str(folder), dict(label_names=names), model_args=OPTIONS, safe_serialization=True
    )
    return folder


def save(model, file, **more):
    channels = model.patch_embed.proj.in_channels
    images = dict(
        img_size=32, in_chans=channels, crop_pct=1.0, mean=[0.5] * channels, std=[0.5] * channels
    )
    return save_as_train_py(file, model, "vit_tiny_patch16_224", **images, **more)


def taken(images):
    """The names of the classes and the folders of their images."""
    names = class_names(images)
    return {(names[label], Path(file).parent.name) for file, label in images.reader.samples}, len(
        images
    )


ALL = ({(name, name) for name in CLASSES}, 10)


def of_validate_py(folder, split="validation", class_map=""):
    """Make the dataset of timm's validate.py by its own call.

    Every other option has its default.
    """
    defaults = dict(
        download=False, load_bytes=False, num_samples=None, input_key=None, target_key=None
    )
    return create_dataset(
        root=str(folder),
        name="",
        split=split,
        class_map=class_map,
        input_img_mode="RGB",
        trust_remote_code=False,
        seed=42,
        **defaults,
    )


def add_nothing(val):
    pass


def add_hidden(val):
    for place in (val / ".ipynb_checkpoints", val / "class1/.ipynb_checkpoints"):
        shutil.copytree(val / "class0", place)
    shutil.copy(val / "class0/0.png", val / "class0/._0.png")


def add_other_endings(val):
    for name in (
        "a.webp",
        "b.WEBP",
        "c.tif",
        "notes",
        ".png",
        "0.png.txt",
        "d.PNG",
        "e.JpEg",
        "f.jpg",
    ):
        shutil.copy(val / "class0/0.png", val / "class0" / name)


def add_loose(val):
    shutil.copy(val / "class0/0.png", val / "overview.png")


def add_inner_classes(val):
    shutil.copytree(val / "class0", val / "group/inner")
    shutil.copytree(val / "class0", val / "group/class1")


def add_of_one_name(val):
    for place in ("class0/jar", "class1/can", "class2/jar", "class0/can"):
        shutil.copytree(val / "class4", val / place)


def add_empty(val):
    (val / "class0").rename(val / "extra")
    (val / "class0").mkdir()


def add_links(val):
    (val / "class5").symlink_to(val / "class0")
    (val / "class1/again").symlink_to(val / "class1")


def add_numbers(val):
    for number in range(5):
        (val / f"class{number}").rename(val / f"{5 * number}")


MESSES = (
    add_nothing,
    add_hidden,
    add_other_endings,
    add_loose,
    add_inner_classes,
    add_empty,
    add_links,
    add_numbers,
)


class TestAsValidatePy:
    """timm decides which files are images and which folders classes.

    It also numbers the classes.
    """

    @staticmethod
    def check(images, expected):
        assert images.reader.samples == expected.reader.samples
        names = [*expected.reader.class_to_idx]
        assert class_names(images) == names
        for (image, label), (stated, number) in zip(images, expected, strict=True):
            assert label == number
            assert image.tobytes() == stated.tobytes()

    @pytest.mark.parametrize("add", MESSES)
    def test_images_and_numbers(self, folder, add):
        add(folder / "val")
        self.check(image_folder(folder), of_validate_py(folder))
        self.check(image_folder(folder / "val", ""), of_validate_py(folder / "val", ""))

    @pytest.mark.parametrize("add", MESSES)
    def test_images_and_numbers_by_a_class_map(self, folder, add):
        add(folder / "val")
        names = [*of_validate_py(folder).reader.class_to_idx]
        (folder / "val/all.txt").write_text("".join(f"{name}\n" for name in names[::-1]))
        (folder / "some.txt").write_text("\n".join(names[3:0:-1]))
        for class_map in ("all.txt", str(folder / "some.txt")):
            images = image_folder(folder, class_map=class_map)
            self.check(images, of_validate_py(folder, class_map=class_map))

    @pytest.mark.parametrize("add", [add_hidden, add_loose])
    def test_evaluate_measures_them(self, folder, add):
        add(folder / "val")
        expected = of_validate_py(folder)
        classes = len(expected.reader.class_to_idx)
        assert classes == 6
        model = make_model("vit_tiny_patch16_224", num_classes=classes)
        expected.transform = create_transform(**preprocessing(model))
        images, labels = zip(*expected, strict=True)
        with torch.no_grad():
            outputs = model(torch.stack(images))
        nll = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels)).item()
        result = evaluate([model], image_folder(folder), inference=HERE)
        assert result["images"] == len(labels)
        assert result["nll"] == pytest.approx(nll, rel=1e-5)

    @pytest.mark.parametrize("add", [add_hidden, add_loose])
    def test_a_folder_that_is_a_class_by_mistake_does_not_fit_the_model(self, folder, model, add):
        add(folder / "val")
        with pytest.raises(ValueError, match=r"val has 6 classes, .* 5\b"):
            evaluate([model], image_folder(folder), inference=HERE)


@pytest.mark.parametrize(
    ("add", "words"),
    [
        (add_hidden, "6 classes, 15 images; among the classes are '.ipynb_checkpoints'."),
        (add_loose, "6 classes, 11 images; among the classes are ''."),
        (
            add_of_one_name,
            "7 classes, 18 images; folders of one last name are one class: 'class0/can', "
            "'class1/can', 'class0/jar' and 1 more.",
        ),
        (add_empty, "5 classes, 10 images; nothing is taken from 'class0'."),
        (
            add_other_endings,
            "5 classes, 13 images; nothing is taken from 'class0/.png', 'class0/0.png.txt', "
            "'class0/a.webp' and 3 more.",
        ),
    ],
)
def test_what_may_be_a_mistake_is_said(folder, caplog, add, words):
    add(folder / "val")
    image_folder(folder)
    assert caplog.messages == [f"{folder / 'val'}: {words}"]


def test_one_line_says_what_is_taken(folder, caplog):
    with caplog.at_level("INFO", "timm_moe"):
        image_folder(folder)
    assert caplog.messages == [f"{folder / 'val'}: 5 classes, 10 images."]


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_split_that_is_not_there_is_refused(folder, split):
    """timm takes all that there is, the training images too."""
    (folder / "val").rename(folder / "train")
    assert len(of_validate_py(folder, split)) == 10
    with pytest.raises(FileNotFoundError, match=f"no split '{split}'"):
        image_folder(folder, split)


def test_a_part_of_a_split_is_refused(folder):
    """timm cuts the name at the bracket and takes all images."""
    assert len(of_validate_py(folder, "val[:50%]")) == 10
    with pytest.raises(ValueError, match="no parts of a split"):
        image_folder(folder, "val[:50%]")


def test_a_folder_that_is_called_as_a_part_of_a_split_is_refused(tmp_path):
    """Files of val would be taken, as timm does."""
    write_images(tmp_path, {"val": 2, "val[1]": 3}, ["a", "b"])
    with pytest.raises(ValueError, match="no parts of a split"):
        image_folder(tmp_path, "val[1]")


@pytest.mark.parametrize(
    ("channels", "mode", "shown"),
    [
        (3, None, (200, 40, 30)),
        (3, "HSV", (200, 40, 30)),
        (4, "CMYK", (200, 40, 30)),
        (4, None, (200, 40, 30)),
        (1, None, (87, 87, 87)),
        (2, None, (87, 87, 87)),
    ],
)
def test_images_of_every_mode_are_shown_as_they_are(channels, mode, shown):
    model = make_model("vit_tiny_patch16_224", in_chans=channels)
    model.args_of_images = {"input_img_mode": mode}
    image = Image.new("RGB", (32, 32), (200, 40, 30)).convert(image_mode(model))
    config = preprocessing(model)
    pixels = torch.from_numpy(np.array(image).reshape(32, 32, channels)).permute(2, 0, 1) / 255
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    bytes_3HW = image_bytes(((pixels - mean) / std)[None], model)[0]
    assert bytes_3HW.shape == (3, 32, 32)
    assert (bytes_3HW.float().mean((1, 2)) - torch.tensor(shown)).abs().max() < 6


class TestClassMap:
    def images(self, folder, content, name="classes.txt"):
        (folder / name).write_bytes(
            content if isinstance(content, bytes) else "\n".join(content).encode()
        )
        return image_folder(folder, class_map=str(folder / name))

    @pytest.mark.parametrize("newline", ["\n", "\r\n"])
    def test_of_text(self, folder, newline):
        images = self.images(folder, newline.join([*CLASSES[::-1], ""]).encode())
        assert class_names(images) == CLASSES[::-1]
        assert taken(images) == ALL

    def test_of_a_pickle(self, folder):
        """timm's numbers may join classes."""
        numbers = {"class0": 1, "class1": 0, "class2": 2, "class3": 0, "class4": 2}
        images = self.images(folder, pickle.dumps(numbers), "classes.pkl")
        assert class_names(images) == ["class1, class3", "class0", "class2, class4"]
        samples = [(Path(file).parent.name, label) for file, label in images.reader.samples]
        assert all(label == numbers[name] for name, label in samples)
        model = make_model("vit_tiny_patch16_224", num_classes=3)
        assert evaluate([model], images, inference=HERE)["images"] == 10

    def test_a_pickle_runs_no_code(self, folder):
        class Code:
            def __reduce__(self):
                return os.mkdir, (str(folder / "ran"),)

        with pytest.raises(ValueError, match=r"classes\.pkl"):
            self.images(folder, pickle.dumps({"class0": Code()}), "classes.pkl")
        assert not (folder / "ran").exists()

    @pytest.mark.parametrize(
        "content",
        [
            [*CLASSES[:3], "clas3", "class4"],
            "\n".join(CLASSES).encode("utf-8-sig"),  # timm reads the mark as a part of the name
        ],
    )
    def test_a_name_that_is_none_of_a_folder_beside_a_folder_without_one_is_refused(
        self, folder, content
    ):
        with pytest.raises(ValueError, match=r"classes\.txt lacks '(class3|class0)'"):
            self.images(folder, content)

    def test_an_empty_class_beside_another_does_not_shift_the_labels(self, folder):
        add_empty(folder / "val")
        with pytest.raises(ValueError, match=r"lacks 'extra', .*'class0'"):
            self.images(folder, CLASSES)

    def test_some_folders_may_be_taken(self, folder, caplog):
        assert taken(self.images(folder, CLASSES[:2])) == (
            {(name, name) for name in CLASSES[:2]},
            4,
        )
        assert "nothing is taken from 'class2', 'class3', 'class4'." in caplog.text

    def test_it_may_name_more(self, folder):
        images = self.images(folder, ["class9", *CLASSES])
        assert taken(images) == ALL
        assert class_names(images)[0] == "class9"

    @pytest.mark.parametrize(
        ("content", "name", "error"),
        [
            ("\n".join(CLASSES).encode("utf-16"), "classes.txt", ValueError),
            (b"\n \n", "classes.txt", FileNotFoundError),  # it leaves no image
            (b"no pickle", "classes.pkl", ValueError),
            ("\n".join([*CLASSES[:3], "class0", "class4"]).encode(), "classes.txt", ValueError),
            (pickle.dumps({"class0": 0, "class1": 2}), "classes.pkl", ValueError),
            (pickle.dumps({"class0": "0", "class1": "1"}), "classes.pkl", ValueError),
            (pickle.dumps({"class0": -1, "class1": 0}), "classes.pkl", ValueError),
            (b"class0,0", "classes.csv", ValueError),
        ],
    )
    def test_a_damaged_one_is_refused(self, folder, content, name, error):
        with pytest.raises(error):
            self.images(folder, content, name)

    def test_a_line_without_a_name_is_a_class_too_many(self, folder, model):
        """It does so for train.py, too.

        The classes behind it keep the numbers that the model was trained with.
        """
        images = self.images(folder, [*CLASSES[:3], "", *CLASSES[3:]])
        assert class_names(images) == [*CLASSES[:3], "", *CLASSES[3:]]
        with pytest.raises(ValueError, match=r"has 6 classes, .* 5\b"):
            evaluate([model], images, inference=HERE)

    def test_one_that_is_not_there(self, folder):
        with pytest.raises(ValueError, match=r"nowhere\.txt"):
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

    def test_a_model_that_names_its_classes_keeps_its_order(
        self, numbered, model, tmp_path, caplog
    ):
        expected = evaluate([model], self.by_string(numbered), inference=HERE)
        assert evaluate([model], image_folder(numbered), inference=HERE)["nll"] != expected["nll"]
        save_with_names(model, tmp_path / "vit", list(self.NUMBERS))
        images = image_folder(numbered)
        assert evaluate([tmp_path / "vit"], images, inference=HERE) == expected
        # The caller's images stay as they are.
        assert class_names(images) == ["1", "2", "3", "4", "10"]
        assert not [record for record in caplog.records if "labels do not" in record.message]

    def by_string(self, folder):
        (folder / "classes.txt").write_text("\n".join(self.NUMBERS))
        return image_folder(folder, class_map=str(folder / "classes.txt"))

    def test_a_class_map_or_member_in_another_order_is_refused(self, numbered, model, tmp_path):
        by_timm = save_with_names(model, tmp_path / "a", ["1", "2", "3", "4", "10"])
        by_string = save_with_names(model, tmp_path / "b", list(self.NUMBERS))
        with pytest.raises(
            ValueError, match=r"'10' as class 1 \(by its class map\), .*class 4: .*--class-map"
        ):
            load_classifiers([by_timm], self.by_string(numbered))
        for other in (by_timm, model):  # one that names no classes has them in timm's order
            with pytest.raises(ValueError, match=r"'10' as class 1 \(.*b\), .*class 4"):
                load_classifiers([by_string, other], image_folder(numbered))
            with pytest.raises(ValueError, match=r"'2' as class 1 \(.*order.*\), .*b as class 2"):
                load_classifiers([other, by_string], image_folder(numbered))

    def test_classes_that_the_model_lacks_are_named(self, numbered, tmp_path):
        model = save_with_names(
            make_model("vit_tiny_patch16_224", num_classes=4), tmp_path / "a", ["1", "2", "3", "4"]
        )
        with pytest.raises(ValueError, match=r"val has 5 classes, .*4, without '10'\.$"):
            load_classifiers([model], image_folder(numbered))

    def test_shifted_classes_are_refused_by_name(self, numbered, model, tmp_path):
        shifted = save_with_names(model, tmp_path / "a", ["0", "1", "2", "3", "4"])
        with pytest.raises(ValueError, match=r"'1' as class 0 \(.*folders\), .*class 1"):
            load_classifiers([shifted], image_folder(numbered))

    @pytest.mark.parametrize("other", ["CLASS0", "class00"])
    def test_names_without_an_order_are_refused(self, folder, other):
        """timm sorts a set by a key that is the same for both."""
        shutil.copytree(folder / "val/class0", folder / "val" / other)
        with pytest.raises(
            ValueError, match=rf"('{other}' and 'class0'|'class0' and '{other}'), .*--class-map"
        ):
            image_folder(folder)


@pytest.mark.parametrize("target", ["/dev/zero", "nowhere"])
@pytest.mark.timeout(20)
def test_a_link_to_what_is_no_image_is_refused(folder, model, target):
    file = folder / "val/class3/1.png"
    file.unlink()
    file.symlink_to(target)
    with pytest.raises(ValueError, match=r"^.*class3/1\.png cannot be read: .+$"):
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
    with pytest.raises(ValueError, match=r"^.*class3/1\.png cannot be read: .*identify"):
        evaluate([model], images, inference=HERE) if road == "evaluate" else list(images)
    assert not ghostscript.exists()


class TestModes:
    @pytest.mark.parametrize(
        ("mode", "channels"), [("HSV", 3), ("YCbCr", 3), ("RGBA", 4), ("CMYK", 4), ("LA", 2)]
    )
    def test_images_have_the_mode_of_the_training(self, folder, tmp_path, mode, channels):
        model = make_model("vit_tiny_patch16_224", in_chans=channels)
        checkpoint = save(model, tmp_path / "a.pth.tar", input_img_mode=mode)
        (loaded,), images = load_classifiers([checkpoint], image_folder(folder), inference=HERE)
        timms = ImageDataset(
            str(folder / "val"),
            input_img_mode=mode,
            transform=create_transform(**preprocessing(loaded)),
        )
        x, labels = zip(*(timms[index] for index in range(10)), strict=True)
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(
                model(torch.stack(x)), torch.tensor(labels)
            ).item()
        assert evaluate([checkpoint], images, inference=HERE)["nll"] == pytest.approx(
            expected, rel=1e-5
        )
        if channels == 3 or records_arguments():  # Earlier timm changes weights of other channels.
            exported = timm_moe.export_dense(checkpoint, tmp_path / "exported").path
            assert evaluate([exported], images, inference=HERE)["nll"] == pytest.approx(
                expected, rel=1e-5
            )

    def test_a_model_of_four_channels_in_memory_sees_transparency(self, folder):
        model = make_model("vit_tiny_patch16_224", in_chans=4)
        opaque = evaluate([model], image_folder(folder), inference=HERE)["nll"]
        for file in folder.glob("val/*/*.png"):
            image = Image.open(file).convert("RGBA")
            image.putalpha(100)
            image.save(file)
        assert evaluate([model], image_folder(folder), inference=HERE)["nll"] != opaque

    def test_more_than_eight_bits_are_refused(self, folder):
        """Pillow would make them white, and timm's loader would take their lowest bits."""
        file = folder / "val/class1/0.png"
        model = make_model("vit_tiny_patch16_224", in_chans=1)
        Image.new("I;16", (32, 32), 255).save(file)
        evaluate([model], image_folder(folder), inference=HERE)
        Image.new("I;16", (32, 32), 256).save(file)
        for mode in ("L", "I;16"):  # train.py --input-img-mode
            model.args_of_images = {"input_img_mode": mode}
            with pytest.raises(
                ValueError, match=r"class1/0\.png cannot be read: .*more than 8 bits"
            ):
                evaluate([model], image_folder(folder), inference=HERE)

    @pytest.mark.parametrize(
        ("channels", "mode"), [(6, None), (3, "CMYK"), (3, "L"), (1, "RGB"), (3, "a mode")]
    )
    def test_a_mode_of_other_channels_is_an_error(self, folder, tmp_path, channels, mode):
        """Raised by torch or Pillow: no images are taken for others."""
        model = make_model("vit_tiny_patch16_224", in_chans=channels)
        checkpoint = save(model, tmp_path / "a.pth.tar", input_img_mode=mode)
        with pytest.raises((ValueError, RuntimeError)):
            evaluate([checkpoint], image_folder(folder), inference=HERE)

    def test_a_class_map_of_the_training_is_told(self, folder, model, tmp_path, caplog):
        checkpoint = save(model, tmp_path / "a.pth.tar", class_map=r"C:\me\names.txt")
        load_classifiers([checkpoint], image_folder(folder), inference=HERE)
        assert "class map 'names.txt'" in caplog.text
        exported = timm_moe.export_dense(checkpoint, tmp_path / "exported").path
        assert r"\me" not in (exported / "config.json").read_text()
        assert "--class-map" in caplog.text
        caplog.clear()
        (folder / "names.txt").write_text("\n".join(CLASSES))
        images = image_folder(folder, class_map=str(folder / "names.txt"))
        load_classifiers([checkpoint], images, inference=HERE)
        assert "class map" not in caplog.text

    def test_a_training_whose_data_set_numbered_the_classes_is_told(
        self, folder, model, tmp_path, caplog
    ):
        """Such as torchvision's image_folder, which has 10 before 2."""
        names = class_names(image_folder(folder))
        for dataset, is_told in (("torch/image_folder", True), ("a/folder", False)):
            caplog.clear()
            checkpoint = save(model, tmp_path / "a.pth.tar", dataset=dataset)
            timm_moe.export_dense(checkpoint, tmp_path / "named", label_names=names, overwrite=True)
            assert ("names must be in that order" in caplog.text) == is_told
            timm_moe.export_dense(checkpoint, tmp_path / "exported", overwrite=True)
            told = "trained with timm's reader 'torch', which numbers the classes itself: without"
            for source in (checkpoint, tmp_path / "exported"):
                caplog.clear()
                load_classifiers([source], image_folder(folder), inference=HERE)
                assert (told in caplog.text) == is_told
                assert ("labels may not mean the same" in caplog.text) == is_told
            caplog.clear()
            load_classifiers([tmp_path / "named"], image_folder(folder), inference=HERE)
            assert "labels may not mean the same" not in caplog.text


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
    env = {
        **os.environ,
        "PYTHONUTF8": "0",
        "LC_ALL": "C",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], env=env, capture_output=True, check=True
    )
    assert json.loads(done.stdout) == foreign_names


def test_the_results_of_fewshot_are_printed_in_every_locale(tmp_path, monkeypatch, model):
    write_images(tmp_path, {"train": 3, "val": 2}, CLASSES)
    save_with_names(model, tmp_path / "vit", CLASSES)
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        options = ["--data-dir", str(tmp_path), "--shots", "1", "-j", "0", "--device", "cpu"]
        assert main(["fewshot", str(tmp_path / "vit"), *options]) == 0
    assert r"\xb1" in (tmp_path / "out").read_text()


def test_a_name_that_timm_cannot_sort_is_told_of(tmp_path):
    write_images(tmp_path, {"val": 1})
    (tmp_path / "val" / "class0" / "0.png").rename(tmp_path / "val" / "class0" / "1²3.png")
    with pytest.raises(ValueError, match=r"cannot list .*'²'"):
        image_folder(tmp_path)
    with pytest.raises(ValueError, match=r"cannot list .*'²'"):
        pair_files(tmp_path / "val", tmp_path / "val")


@pytest.mark.parametrize("command", ["evaluate", "fewshot", "routes", "report", "masks"])
def test_no_output_goes_where_images_are_read(tmp_path, capsys, command):
    write_images(tmp_path, {"val": 2, "train": 2})
    place = tmp_path / "val" / "class0"
    common = ["a.pth", f"--data-dir={tmp_path}", "--overwrite"]
    folder = str(tmp_path / "val" / "new")
    arguments = {
        "evaluate": [*common, f"--json={place}/0.png"],
        "fewshot": [*common, f"--json={place}/0.png"],
        "routes": [*common, folder],
        "report": [*common, folder],
        "masks": [*common, str(tmp_path / "masks"), f"--segmentation={tmp_path}/masks"],
    }[command]
    assert main([command.replace("masks", "routes"), *arguments]) == 1
    assert "whose images are read" in capsys.readouterr().err


def test_names_by_number_are_in_the_order_of_the_numbers(tmp_path, model):
    """Numbers in a config.json may have been sorted as words."""
    numbers = ("1", "10", "2", "3", "4")
    folder = write_images(tmp_path, {"val": 3}, numbers)
    (folder / "classes.txt").write_text("\n".join(numbers))
    by_string = image_folder(folder, class_map=str(folder / "classes.txt"))
    named = {str(number): numbers[number] for number in (3, 1, 0, 4, 2)}
    save_with_names(model, tmp_path / "vit", named)
    expected = evaluate([model], by_string, inference=HERE)
    assert evaluate([tmp_path / "vit"], image_folder(folder), inference=HERE) == expected


def test_a_class_without_images_keeps_the_numbers_of_the_others(tmp_path, model, caplog):
    """timm numbers the folders that there are, so train.py measures other labels."""
    folder = write_images(tmp_path, {"val": 3}, CLASSES)
    checkpoint = save(model, tmp_path / "a.pth.tar")
    save_with_names(model, tmp_path / "vit", CLASSES)
    shutil.rmtree(folder / "val/class1")
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    by_map = image_folder(folder, class_map=str(folder / "classes.txt"))
    expected = evaluate([tmp_path / "vit"], by_map, inference=HERE)
    assert evaluate([tmp_path / "vit"], image_folder(folder), inference=HERE) == expected
    for other, number in ((checkpoint, 5), (make_model("vit_tiny_patch16_224", num_classes=4), 4)):
        with pytest.raises(ValueError, match=rf"{number} classes|has {number}"):
            evaluate([tmp_path / "vit", other], image_folder(folder), inference=HERE)
    message = "has 4 classes, but .*a.pth.tar has 5: if one has no images .* --class-map"
    with pytest.raises(ValueError, match=message):
        evaluate([checkpoint], image_folder(folder), inference=HERE)


@pytest.mark.parametrize("stated", [{"bce_loss": True}, {"loss": "bce"}])
def test_a_training_by_bce_is_told_of(folder, model, tmp_path, caplog, stated):
    """Its exported folder is told of too."""
    checkpoint = save(model, tmp_path / "a.pth.tar", **stated)
    exported = timm_moe.export_dense(checkpoint, tmp_path / "exported").path
    for source in (checkpoint, exported):
        caplog.clear()
        evaluate([source], image_folder(folder), inference=HERE)
        assert "binary cross-entropy, so that each class has a probability" in caplog.text


def test_benefits_load_a_model_once_and_tell_of_its_accuracy_alone(
    folder, model, tmp_path, caplog, capsys
):
    save(model, tmp_path / "a.pth.tar", bce_loss=True)
    command = ["benefits", "--student", str(tmp_path / "a.pth.tar"), "--teacher", "90"]
    command += ["--dense", "20", "--data-dir", str(folder), "-j", "0", "--device", "cpu"]
    main(command)
    told = [text for text in caplog.messages if text.startswith("Images for")]
    assert len(told) == 1
    assert "NLL" not in caplog.text


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_images_that_are_not_square_are_cropped_as_stated(folder, model, mode):
    for file in folder.glob("val/*/*.png"):
        Image.open(file).resize((48, 32)).save(file)
    model.pretrained_cfg = {**model.pretrained_cfg, "crop_mode": mode}
    timms = ImageDataset(str(folder / "val"), transform=create_transform(**preprocessing(model)))
    x, labels = zip(*(timms[index] for index in range(10)), strict=True)
    with torch.no_grad():
        outputs = model(torch.stack(x))
    nll = torch.nn.functional.cross_entropy(outputs, torch.tensor(labels)).item()
    found = evaluate([model], image_folder(folder), inference=HERE)["nll"]
    assert found == pytest.approx(nll, rel=1e-5)


def test_classes_that_transformers_gave_no_names_are_those_of_the_folders(
    folder, model, tmp_path, caplog
):
    save_with_names(model, tmp_path / "vit", [f"LABEL_{number}" for number in range(5)])
    load_classifiers([tmp_path / "vit"], image_folder(folder), inference=HERE)
    assert "labels do not mean the same" not in caplog.text


def test_names_of_several_parts_are_written_alike_on_windows(monkeypatch):
    monkeypatch.setattr("timm_moe.analysis.data.Path", PureWindowsPath)
    paths = [("runs", "dense", "0"), ("runs", "ewa", "0")]
    assert short_names(paths) == ["dense/0", "ewa/0"]
    assert short_names([("runs", "dense")] * 2) == ["1: runs/dense", "2: runs/dense"]


def test_images_that_are_no_squares_are_shown_as_they_are(model):
    config, shown = preprocessing(model), torch.arange(30).reshape(3, 2, 5) * 5
    mean, std = (torch.tensor(config[name]).view(-1, 1, 1) for name in ("mean", "std"))
    (found,) = image_bytes(((shown / 255 - mean) / std)[None], model)
    assert torch.equal(found, shown.byte())


def test_a_model_in_memory_is_moved_to_a_stated_device(model):
    moved = open_model(model, None, False, Inference(device="meta"))
    assert all(parameter.is_meta for parameter in moved.parameters())
