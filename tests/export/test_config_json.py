"""Entries of an export's config.json.

They are names of the classes, the licence, and the history of the weights.
"""

import json
import tempfile
from pathlib import Path

import pytest
import timm
import torch
from common import OPTIONS, edit, save_as_train_py, write_images
from PIL import Image
from safetensors.torch import load_file, save_file

import timm_moe
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.evaluation import evaluate
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe.export import export as export_module
from timm_moe.export.push import push_dense
from timm_moe_cli import main

NAMES = ["ant", "bee", "cat", "dog", "emu"]


def _names_in(folder):
    config = json.loads((folder / "config.json").read_text())
    assert not {"label_names", "label_descriptions"} & config["pretrained_cfg"].keys()
    return config.get("label_names"), config.get("label_descriptions")


def test_names_of_classes_go_along(ewa_vit, tmp_path):
    told = {"ant": "an insect"}
    export_module.export_moe(
        ewa_vit,
        tmp_path / "moe",
        model_args=OPTIONS,
        label_names=NAMES,
        label_descriptions=told,
    )
    timm_moe.export_dense(tmp_path / "moe", tmp_path / "vit")
    timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
    for name in ("moe", "vit", "again"):
        assert _names_in(tmp_path / name) == (NAMES, told)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'moe'}", pretrained=True)
    assert timm_moe.to_dense(loaded).pretrained_cfg["label_names"] == NAMES
    timm_moe.export_dense(loaded, tmp_path / "renamed", label_names=tuple(NAMES[::-1]))
    assert _names_in(tmp_path / "renamed") == (NAMES[::-1], None)
    timm_moe.export_dense(ewa_vit, tmp_path / "unnamed")
    assert _names_in(tmp_path / "unnamed") == (None, None)


@pytest.mark.parametrize("command", ["export", "push"])
def test_a_folder_keeps_its_numbers_of_the_classes(
    ewa_vit, tmp_path, monkeypatch, capsys, caplog, command
):
    monkeypatch.chdir(tmp_path)
    timm_moe.export_dense(ewa_vit, "vit", label_names=NAMES[::-1])
    write_images(Path("same"), {"train": 1}, NAMES)
    write_images(Path("other"), {"train": 1}, ["ant", "bull", "cow", "dove", "elk"])
    write_images(Path("foreign"), {"train": 1}, ["asp", "bull", "cow", "dove", "elk"])
    Path("names.txt").write_text("\n".join(NAMES[::-1]))
    told = {"export": ["out", "--overwrite"], "push": ["user/vit", "--dry-run"]}[command]
    for images in ("same", "other"):
        assert main([command, "vit", *told, "--data-dir", images]) == 1
        assert (
            "have 'ant' as class 0, but vit as class 4: leave out --data-dir (label_names=)"
            in capsys.readouterr().err
        )
    assert not Path("out").exists()
    caplog.clear()
    ordered = ["--data-dir", "same", "--class-map", "names.txt"]
    for options in ([], ordered):
        assert main([command, "vit", *told, *options]) == 0
        assert "names of classes" not in caplog.text
    assert str(Path(tempfile.gettempdir(), "tmp")) not in caplog.text  # of a push's own copy
    if command == "export":
        assert _names_in(Path("out"))[0] == NAMES[::-1]
    assert main([command, "vit", *told, "--data-dir", "foreign"]) == 0
    assert "vit has other names of classes than you state: its class 0 is emu and becomes asp" in (
        caplog.text
    )


def test_names_of_a_model_in_memory_may_be_those_of_its_start(ewa_vit, tmp_path, caplog):
    """A new classifier of as many classes leaves them in timm's config."""
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=NAMES)
    model = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True)
    model.reset_classifier(5)
    timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
    timm_moe.export_dense(model, tmp_path / "stated", label_names=NAMES[::-1])
    assert "names of classes" not in caplog.text
    timm_moe.export_dense(model, tmp_path / "unstated")
    assert "['ant', 'bee', 'cat', 'dog', 'emu']: state label_names" in caplog.text


def test_names_that_are_not_those_of_the_model(ewa_vit, tmp_path, caplog):
    for names, descriptions, message in (
        (NAMES[:4], None, "4 names .*5 classes"),
        ("ants!", None, "1 names .*5 classes"),
        ([*NAMES[:4], 3], None, r"name of a class .*3\."),
        ([*NAMES[:4], ""], None, "name of a class .*''"),
        (NAMES, {"cow": "a mammal"}, "label_descriptions .*'cow'"),
        (None, {"ant": "an insect"}, "label_descriptions .*label_names"),
    ):
        with pytest.raises(ValueError, match=message):
            timm_moe.export_dense(
                ewa_vit, tmp_path / "vit", label_names=names, label_descriptions=descriptions
            )
    assert not (tmp_path / "vit").exists()
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=NAMES)
    finetuned = timm.create_model(f"local-dir:{tmp_path / 'vit'}", num_classes=3)
    timm_moe.export_dense(finetuned, tmp_path / "other", model_args=OPTIONS)
    assert "There are 5 names" in caplog.text
    assert _names_in(tmp_path / "other") == (None, None)


def test_a_checkpoint_names_no_classes(ewa_vit, tmp_path):
    """Those of the folder that training began from may be others."""
    timm_moe.export_dense(ewa_vit, tmp_path / "vit", label_names=NAMES)
    student = timm.create_model(f"local-dir:{tmp_path / 'vit'}", pretrained=True)
    file = save_as_train_py(
        tmp_path / "last.pth.tar", student, f"local-dir:{tmp_path / 'vit'}", model_kwargs={}
    )
    spec = ModelSpec(f"local-dir:{tmp_path / 'vit'}")  # no file may lead there by itself
    timm_moe.export_dense(file, tmp_path / "student", spec=spec)
    assert _names_in(tmp_path / "student") == (None, None)


def test_names_from_the_training_images(checkpoint, tmp_path, capsys, caplog):
    for split, names in (("train", ["x10", "x9", "a", "b", "c"]), ("validation", ["a", "c"])):
        for name in names:
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "images" / split / name / "1.png")
    (tmp_path / "classes.txt").write_text("c\nb\na\nx9\nx10\n")
    command = ["export", str(checkpoint), "--data-dir", str(tmp_path / "images")]
    assert main([*command, str(tmp_path / "vit")]) == 0
    told = "validation has other classes than the training, and train.py numbers them"
    assert told in caplog.text
    caplog.clear()
    # As train.py numbers them.
    assert _names_in(tmp_path / "vit")[0] == ["a", "b", "c", "x9", "x10"]
    assert (
        main([*command, str(tmp_path / "mapped"), "--class-map", str(tmp_path / "classes.txt")])
        == 0
    )
    assert told not in caplog.text
    assert _names_in(tmp_path / "mapped")[0] == ["c", "b", "a", "x9", "x10"]
    assert main([*command, "--moe", str(tmp_path / "moe")]) == 0
    assert _names_in(tmp_path / "moe")[0] == ["a", "b", "c", "x9", "x10"]
    capsys.readouterr()
    for options, message in (
        (["--split", "validation"], "There are 2 names"),
        (["--split", "none"], "has no split 'none'"),
    ):
        for moe in ([], ["--moe"]):
            assert main([*command, str(tmp_path / "wrong"), *options, *moe]) == 1
            assert message in capsys.readouterr().err
    assert (
        main(["export", str(checkpoint), str(tmp_path / "wrong"), "--class-map", "classes.txt"])
        == 1
    )
    assert "folders of --data-dir" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


# --- the licence and the history


def test_the_licence_is_that_of_weights_that_training_began_from(checkpoint, ewa_vit, tmp_path):
    assert ewa_vit.pretrained_cfg["license"] == "apache-2.0"  # of weights that it never held
    content = torch.load(checkpoint, weights_only=False)
    content["args"].pretrained = True
    torch.save(content, tmp_path / "finetuned.pth.tar")
    content["args"].initial_checkpoint = "/home/somebody/mine.pth"
    torch.save(content, tmp_path / "mine.pth.tar")
    for source, license in (
        (ewa_vit, None),
        (checkpoint, None),
        (tmp_path / "mine.pth.tar", None),
        (tmp_path / "finetuned.pth.tar", "apache-2.0"),
    ):
        timm_moe.export_dense(source, tmp_path / "vit", overwrite=True)
        export_module.export_moe(source, tmp_path / "moe", model_args=OPTIONS, overwrite=True)
        timm_moe.export_dense(tmp_path / "moe", tmp_path / "again", overwrite=True)
        for name in ("vit", "moe", "again"):
            config = json.loads((tmp_path / name / "config.json").read_text())
            assert config["pretrained_cfg"].get("license") == license
            assert "somebody" not in json.dumps(config)


def test_a_damaged_history(ewa_vit, tmp_path):
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    weights = json.loads((tmp_path / "vit/config.json").read_text())["timm_moe"]["weights"]
    for entry in (
        3,
        {"nonsense": 1},
        {"file": 3},
        {"options": {"a": []}},
        {"epoch": "1"},
        {"metrics": {"top1": "high"}},
        {"metrics": {"top1": float("nan")}},
        {"metrics": {"[x](http://)": 1.0}},
        {"base": "a\n---"},
        {"experts": {}},
    ):
        record = {**entry, "weights": weights} if isinstance(entry, dict) else entry
        edit(tmp_path / "vit", lambda config, record=record: config.update(timm_moe=record))
        refused = (
            "it holds NaN"
            if "NaN" in json.dumps(entry)
            else r"timm_moe in .*config\.json is damaged"
        )
        with pytest.raises(ValueError, match=refused):
            timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
        with pytest.raises(ValueError, match=refused):
            card_of(tmp_path / "vit")
    assert not (tmp_path / "again").exists()


def card_of(folder):
    return push_dense(folder, "user/vit", dry_run=True).card


def test_a_card_that_is_no_utf_8_is_named(ewa_vit, tmp_path):
    folder = timm_moe.export_dense(ewa_vit, tmp_path / "vit").path
    (folder / "README.md").write_text("Mine.", encoding="utf-16")
    with pytest.raises(ValueError, match=r"README\.md is no text in UTF-8"):
        card_of(folder)


def test_a_history_is_that_of_its_weights_alone(ewa_vit, tmp_path):
    """Other libraries keep the entry when they write what they trained further."""
    save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, opt="adamw")
    timm_moe.export_dense(tmp_path / "last.pth.tar", tmp_path / "vit")
    timm_moe.export_dense(tmp_path / "vit", tmp_path / "again")
    said = ("adamw", "last.pth.tar", "vit_tiny_ewa_moe")
    assert [word in card_of(tmp_path / "again") for word in said] == [True, True, True]
    weights = load_file(tmp_path / "vit/model.safetensors")
    save_file(
        {**weights, "head.bias": weights["head.bias"] + 1}, tmp_path / "vit/model.safetensors"
    )
    assert [word in card_of(tmp_path / "vit") for word in said] == [False, False, False]


def test_names_by_number_need_not_be_in_order(ewa_vit, tmp_path):
    """A writer of JSON may have sorted the numbers as words."""
    by_number = {str(number): NAMES[number] for number in (3, 1, 0, 4, 2)}
    ewa_vit.pretrained_cfg = {**ewa_vit.pretrained_cfg, "label_names": by_number}
    timm_moe.export_dense(ewa_vit, tmp_path / "vit")
    assert _names_in(tmp_path / "vit")[0] == NAMES


def test_several_labels_for_an_image_stay_sigmoids(ewa_vit, tmp_path, monkeypatch):
    """config.json's problem_type is the one place that says so, whoever wrote it there."""
    monkeypatch.chdir(tmp_path)

    def problem_type(folder):
        return json.loads((Path(folder) / "config.json").read_text()).get("problem_type")

    multi_label = "multi_label_classification"
    timm_moe.export_dense(ewa_vit, "stated", problem_type=multi_label)
    file = save_as_train_py(tmp_path / "last.pth.tar", ewa_vit, task="multilabel")
    timm_moe.export_dense(file, "of train.py")
    timm_moe.export_dense(ewa_vit, "by hand")
    assert problem_type("by hand") is None
    edit(Path("by hand"), lambda config: config.update(problem_type=multi_label))
    write_images(Path("images"), {"validation": 1}, list("abcde"))
    for folder in ("stated", "of train.py", "by hand"):
        timm_moe.export_dense(folder, "again", overwrite=True)
        assert (problem_type(folder), problem_type("again")) == (multi_label, multi_label)
        with pytest.raises(ValueError, match="several labels for an image"):
            evaluate([folder], image_folder("images"))
    timm_moe.export_dense("stated", "other", problem_type="single_label_classification")
    evaluate(["other"], image_folder("images"))
    edit(Path("by hand"), lambda config: config.update(problem_type=["sigmoid"]))
    with pytest.raises(ValueError, match=r"problem_type must be one of .*got \['sigmoid'\]"):
        timm_moe.export_dense("by hand", "again", overwrite=True)
    with pytest.raises(ValueError, match=r"problem_type must be one of .*got 'multilabel'"):
        timm_moe.export_dense(ewa_vit, "again", overwrite=True, problem_type="multilabel")
