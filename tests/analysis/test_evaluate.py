"""Evaluation of classifiers and ensembles on folders of images, against computations by hand."""

import csv
import json
import os
import re
import shutil
import sys
from itertools import combinations

import numpy as np
import pytest
import timm
import torch
from common import (
    OPTIONS,
    ROOT,
    SMALL_VIT,
    SMALL_VIT_KWARGS,
    make_model,
    save_as_train_py,
    write_images,
)
from PIL import Image
from safetensors.torch import save_file
from timm.layers import Mlp
from timm.models import save_for_hf
from timm.utils import ModelEmaV3
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from timm_moe.analysis import evaluation
from timm_moe.analysis.data import Inference, image_folder, in_eval_mode
from timm_moe.analysis.evaluation import LABELS, evaluate
from timm_moe.layers import MoeMlp, RandomPartition
from timm_moe_cli import main

pytest.importorskip("torchmetrics")

HERE = Inference(batch_size=7, workers=0, device="cpu")
CLASSES = 5


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    classes = [f"class{label}" for label in range(CLASSES)]
    return write_images(tmp_path_factory.mktemp("data"), {"val": 6, "other": 4}, classes)


@pytest.fixture
def model():
    return seeded_model("vit_tiny_patch16_224", 1)


def seeded_model(name, seed, **options):
    torch.manual_seed(seed)
    return make_model(name, **options)


def save(model, name, file, mean=0.5, **stated):
    """A checkpoint of a run that kept images as they are and normalised them by ``mean``."""
    images = dict(img_size=32, crop_pct=1.0, mean=[mean] * 3, std=[0.5] * 3)
    return save_as_train_py(file, model, name, **images, **stated)


@torch.no_grad()
def probabilities_and_labels(model, folder, mean=0.5):
    files = sorted(folder.glob("*/*.png"))
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file in files]).permute(
        0, 3, 1, 2
    )
    labels = np.array([int(file.parent.name[-1]) for file in files])
    return model((pixels / 255 - mean) / 0.5).softmax(1).double().numpy(), labels


def nll(p, labels):
    return -np.log(p[np.arange(len(labels)), labels]).mean()


def test_the_page_shows_the_names_of_the_figures():
    page = ROOT.joinpath("docs/evaluate.md").read_text(encoding="utf-8")
    block = page.partition("$ timm-moe evaluate")[2].partition("```")[0]
    shown = re.findall(r"^  (.+?)  +\S+$", block, re.MULTILINE)
    assert shown == [label for label, _ in LABELS.values()]


def test_one_classifier(splits, model, tmp_path):
    checkpoint = save(model, "vit_tiny_patch16_224", tmp_path / "a.pth.tar")
    result = evaluate([checkpoint], image_folder(splits), inference=HERE)
    p, labels = probabilities_and_labels(model, splits / "val")
    right = p.argmax(1) == labels
    bins = np.ceil(p.max(1) * 15).astype(int)
    gaps = [abs((right[bins == b] - p.max(1)[bins == b]).sum()) for b in range(16)]
    assert (result.pop("images"), result.pop("members")) == (30, 1)
    assert (result.pop("error"), result.pop("accuracy")) == (
        (~right).mean(),
        pytest.approx(right.mean()),
    )
    assert result == pytest.approx(
        {
            "nll": nll(p, labels),
            "ece": sum(gaps) / 30,
            "brier": ((p - np.eye(5)[labels]) ** 2).sum(1).mean(),
        },
        rel=1e-5,
    )


def test_an_ensemble_of_models_with_preprocessings_of_their_own(splits, model, tmp_path):
    routed = seeded_model("vit_tiny_moe", 2)
    checkpoints = [
        save(model, "vit_tiny_patch16_224", tmp_path / "a.pth.tar"),
        save(routed, "vit_tiny_moe", tmp_path / "b.pth.tar", mean=0.3),
    ]
    result = evaluate(checkpoints, image_folder(splits), inference=HERE)
    p, labels = probabilities_and_labels(model, splits / "val")
    q, _ = probabilities_and_labels(routed, splits / "val", mean=0.3)
    error = ((p + q).argmax(1) != labels).mean()
    apart = (p.argmax(1) != q.argmax(1)).mean()
    cosine = (p * q).sum(1) / np.linalg.norm(p, axis=1) / np.linalg.norm(q, axis=1)
    expected = {
        "members": 2,
        "nll": nll((p + q) / 2, labels),
        "error": error,
        "mean_member_nll": (nll(p, labels) + nll(q, labels)) / 2,
        "mean_member_error": ((p.argmax(1) != labels).mean() + (q.argmax(1) != labels).mean()) / 2,
        "pairwise_kl": (p * np.log(p / q)).sum(1).mean(),
        "cosine_similarity": cosine.mean(),
        "disagreement": apart,
        "normalized_disagreement": apart / error,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert apart > 0


def test_members_of_ensembles_and_other_models_stand_side_by_side(splits):
    images = image_folder(splits)
    models = [seeded_model("vit_tiny_patch16_224", seed) for seed in (1, 2, 3)]
    single = [evaluate([model], images, inference=HERE) for model in models]
    pairs = [evaluate(pair, images, inference=HERE) for pair in combinations(models, 2)]
    one, two, three = models
    ensemble = seeded_model("vit_tiny_patch16_224", 4)
    ensemble.forward_members = lambda x: torch.stack([one(x), two(x)], 1)
    result = evaluate([ensemble, three], images, inference=HERE)
    assert result["members"] == 3
    for name in ("nll", "error"):
        assert result[f"mean_member_{name}"] == pytest.approx(
            sum(values[name] for values in single) / 3
        )
    for name in ("pairwise_kl", "cosine_similarity", "disagreement"):
        assert result[name] == pytest.approx(sum(values[name] for values in pairs) / 3)


def test_stated_preprocessing_is_what_images_go_through(splits, model, tmp_path, capsys):
    """As under validate.py with the same flags."""
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    spec = [
        "--model",
        "vit_tiny_patch16_224",
        "--num-classes",
        "5",
        "--model-kwargs",
        *SMALL_VIT_KWARGS,
    ]
    images = [
        "--mean",
        "0.3",
        "--std",
        "0.5",
        "0.5",
        "0.5",
        "--crop-pct",
        "1",
        "--interpolation",
        "bicubic",
    ]
    arguments = [
        "evaluate",
        str(tmp_path / "a.safetensors"),
        "--data-dir",
        str(splits),
        "-j",
        "0",
        "--device",
        "cpu",
    ]
    assert main([*arguments, *spec, *images, "--json", str(tmp_path / "a.json")]) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    p, labels = probabilities_and_labels(model, splits / "val", mean=0.3)
    assert written["metrics"]["nll"] == pytest.approx(nll(p, labels), rel=1e-5)
    assert (written["mean"], written["crop_pct"]) == ([0.3], 1.0)


def test_other_data_are_told_by_confidence(splits, model, tmp_path):
    checkpoint = save(model, "vit_tiny_patch16_224", tmp_path / "a.pth.tar")
    result = evaluate(
        [checkpoint], image_folder(splits), image_folder(splits, "other"), inference=HERE
    )
    inside, outside = (
        probabilities_and_labels(model, splits / name)[0].max(1) for name in ("val", "other")
    )
    assert result["ood_images"] == 20
    assert result["auroc"] == pytest.approx((inside[:, None] > outside).mean())
    threshold = np.sort(inside)[::-1][28]  # lets 29 of 30 pass, the first share of at least 95 %
    assert result["fpr_at_95"] == pytest.approx((outside >= threshold).mean())


def test_autocast(splits, model):
    precise, coarse = (
        evaluate([model], image_folder(splits), inference=Inference(30, 0, "cpu", dtype))
        for dtype in (None, torch.bfloat16)
    )
    assert 0 < abs(precise["nll"] - coarse["nll"]) < 0.1


@pytest.mark.parametrize("wrap", [ModelEmaV3, AveragedModel])
def test_a_model_in_memory_is_taken_out_of_its_wrapper(splits, model, wrap):
    images = image_folder(splits)
    expected = evaluate([model], images, inference=HERE)
    assert evaluate([wrap(model)], images, inference=HERE) == expected


def test_a_model_of_another_kind_is_refused(splits):
    with pytest.raises(ValueError, match="This Sequential does not state its num_classes"):
        evaluate([nn.Sequential(nn.Flatten(), nn.LazyLinear(5))], image_folder(splits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_in_memory_sees_images_of_its_type(splits, model, dtype):
    images = image_folder(splits)
    expected = evaluate([model], images, inference=HERE)["nll"]
    found = evaluate([model.to(dtype)], images, inference=HERE)["nll"]
    assert 0 < abs(found - expected) < 0.1


def test_a_model_in_memory_stays_on_its_device_unless_one_is_stated(splits, model, monkeypatch):
    """Pretend that there is a GPU, so that moving the model would fail."""
    expected = evaluate([model], image_folder(splits), inference=HERE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here = Inference(batch_size=7, workers=0)
    assert here.torch_device().type == "cuda"
    assert evaluate([model], image_folder(splits), inference=here) == expected


def written_by_the_command(checkpoint, splits, *options):
    file = checkpoint.with_suffix(".json")
    arguments = [
        "evaluate",
        str(checkpoint),
        "--data-dir",
        str(splits),
        "-j",
        "0",
        "--device",
        "cpu",
        *options,
    ]
    assert main([*arguments, "--json", str(file), "--overwrite"]) == 0
    return json.loads(file.read_text())


def test_the_command_in_mixed_precision(splits, model, tmp_path):
    checkpoint = save(model, "vit_tiny_patch16_224", tmp_path / "a.pth.tar")
    precise = written_by_the_command(checkpoint, splits)
    coarse = written_by_the_command(checkpoint, splits, "--amp", "--amp-dtype", "bfloat16")
    assert 0 < abs(precise["metrics"]["nll"] - coarse["metrics"]["nll"]) < 0.1
    assert ("amp_dtype" in precise, coarse["amp"], coarse["amp_dtype"]) == (False, True, "bfloat16")


def test_the_command(splits, model, tmp_path, capsys, monkeypatch):
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    spec = [
        "--model",
        "vit_tiny_patch16_224",
        "--num-classes",
        "5",
        "--model-kwargs",
        *SMALL_VIT_KWARGS,
    ]
    arguments = [
        "evaluate",
        str(tmp_path / "a.safetensors"),
        "--data-dir",
        str(splits),
        "-j",
        "0",
        "--device",
        "cpu",
    ]
    arguments += [
        "--ood-data-dir",
        str(splits / "other"),
        "--ood-split",
        "",
        "--json",
        str(tmp_path / "a.json"),
        *spec,
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "a.json").read_text())
    assert f"NLL                      {written['metrics']['nll']:.4f}" in out
    assert f"error                    {written['metrics']['error']:.2%}" in out
    assert f"top-1 accuracy           {1 - written['metrics']['error']:.2%}" in out
    assert written["metrics"]["ood_images"] == 20
    assert written["sources"] == [str(tmp_path / "a.safetensors")]
    assert written["data_dir"] == str(splits)
    assert set(written["versions"]) == {"timm_moe", "timm", "torch"}
    assert main(arguments) == 1
    assert "a.json exists; pass --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    file = tmp_path / "b.json"
    arguments[arguments.index("--json") + 1] = str(file)
    monkeypatch.setattr(
        evaluation, "evaluate", lambda *_, **__: file.write_text("another's") and written["metrics"]
    )
    capsys.readouterr()
    assert main(arguments) == 1  # another process has written it meanwhile
    assert f"NLL                      {written['metrics']['nll']:.4f}" in capsys.readouterr().out
    assert file.read_text() == "another's"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data-dir", "nowhere"], "'nowhere'"),
        (
            ["--data-dir", "{splits}", "--split", "test"],
            "has no split 'test'; its folders begin with other, val: name one",
        ),
        (
            ["--data-dir", "{splits}/val/class0", "--split", ""],
            "val/class0 has 1 classes, but a.pth.tar has 5: if one has no images here, name all "
            "with --class-map (class_map=).",
        ),
        (["--data-dir", "empty", "--split", ""], "empty has no image of a class in its split ''"),
        (["b.pth.tar", "--data-dir", "{splits}"], "val has 5 classes, but b.pth.tar has 3."),
        (["c.pth.tar", "--data-dir", "{splits}"], "c.pth.tar is neither a file nor a folder"),
        (["--data-dir", "{splits}", "--ood-data-dir", "nowhere"], "'nowhere'"),
        (
            ["--data-dir", "{splits}", "--ood-data-dir", "{splits}/val"],
            "name one with --ood-split, or --ood-split . if they are the classes.",
        ),
        (
            ["--data-dir", "{splits}", "--ood-data-dir", "flat"],
            "flat has no split 'validation'; it has no folders: --ood-split . takes its images as "
            "one class.",
        ),
        (
            ["--data-dir", "{splits}", "--class-map", "map.txt"],
            "has no image of a class that map.txt names in its split 'validation'",
        ),
        (
            ["--data-dir", "{splits}", "--json", "a.pth.tar/a.json"],
            "a.pth.tar is a file, so a.pth.tar/a.json",
        ),
        (["--data-dir", "{splits}", "--json", "empty"], "empty is a folder"),
        (["--data-dir", "{splits}", "--use-ema"], "a.pth.tar has no state_dict_ema"),
    ],
)
def test_errors_are_one_sentence_before_any_forward(
    splits, model, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "flat/0.png")
    (tmp_path / "map.txt").write_text("of none of the folders\n")
    save(model, "vit_tiny_patch16_224", "a.pth.tar")
    model.reset_classifier(3)
    checkpoint = torch.load(save(model, "vit_tiny_patch16_224", "b.pth.tar"), weights_only=False)
    checkpoint["args"].num_classes = 3
    torch.save(checkpoint, "b.pth.tar")
    monkeypatch.setattr(
        timm.models.VisionTransformer, "forward", lambda *_: pytest.fail("A model was run.")
    )
    files = [argument for argument in arguments if argument.endswith(".pth.tar")]
    options = [argument.format(splits=splits) for argument in arguments[len(files) :]]
    assert main(["evaluate", "a.pth.tar", *files, *options, "-j", "0", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("workers", [0, 2])  # whose end takes torch 10 seconds
@pytest.mark.parametrize("keep", [0.5, 0])
@pytest.mark.first_case
def test_an_image_that_cannot_be_read_is_named(splits, model, tmp_path, workers, keep):
    """timm's own dataset would take the next image in its place."""
    shutil.copytree(splits / "val", tmp_path / "val")
    file = tmp_path / "val/class1/3.png"
    os.truncate(file, int(keep * file.stat().st_size))
    inference = Inference(batch_size=7, workers=workers, device="cpu")
    with pytest.raises(ValueError, match=rf"^.*{re.escape(str(file))} cannot be read: .+$"):
        evaluate([model], image_folder(tmp_path, "val"), inference=inference)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.txt", b"class0\nclass1\nclass1\nclass3\nclass4\n"),
        ("classes.txt", b"class0\n\xff\n"),
        ("classes.pkl", b"cos\nsystem\n(S'touch it_ran'\ntR."),
    ],
)
def test_damaged_class_maps(splits, tmp_path, monkeypatch, name, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        image_folder(splits, "val", str(tmp_path / name))
    assert os.listdir(tmp_path) == [name]


def test_outputs_that_are_not_finite(splits, model):
    nn.init.constant_(model.head.bias, float("nan"))
    with pytest.raises(ValueError, match=r"VisionTransformer .*outputs .*NaN"):
        evaluate([model], image_folder(splits), inference=HERE)


def test_an_output_that_is_not_finite_for_one_image_is_of_the_model_that_gave_it(splits, model):
    other = make_model("vit_tiny_moe")

    def spoil(module, images, outputs):
        return outputs.index_fill(0, torch.tensor([len(outputs) - 1]), float("inf"))

    other.register_forward_hook(spoil)
    with pytest.raises(ValueError, match=r"MoeVisionTransformer .*outputs .*NaN"):
        evaluate([model, other], image_folder(splits), inference=HERE)


def test_without_torchmetrics(splits, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    monkeypatch.delitem(sys.modules, "timm_moe.analysis.metrics", raising=False)
    monkeypatch.delitem(sys.modules, "timm_moe.analysis.evaluation", raising=False)
    monkeypatch.delattr("timm_moe.analysis.metrics", raising=False)
    assert main(["evaluate", "a.pth.tar", "--data-dir", str(splits)]) == 1
    assert "pip install 'timm_moe[evaluate]'" in capsys.readouterr().err


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.first_case
def test_other_classes_of_the_same_number_are_warned_of(splits, model, tmp_path, caplog, by_number):
    """By the names that the folder of the model states, wherever it was trained."""
    names = [f"class{label}" for label in range(CLASSES)]
    labels = {str(number): name for number, name in enumerate(names)} if by_number else names
    save_for_hf(
        model,
        str(tmp_path / "vit"),
        dict(label_names=labels),
        model_args=OPTIONS,
        safe_serialization=True,
    )
    evaluate([tmp_path / "vit"], image_folder(splits, "val"), inference=HERE)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    (tmp_path / "val").mkdir()
    for name in (*names[:4], "elk"):
        (tmp_path / "val" / name).symlink_to(splits / "val" / "class0")
    evaluate([tmp_path / "vit"], image_folder(tmp_path, "val"), inference=HERE)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "class 4 is class4 and not elk" in warning


def test_progress_is_told(splits, model, tmp_path, monkeypatch, caplog):
    checkpoint = save(model, "vit_tiny_patch16_224", tmp_path / "a.pth.tar")
    monkeypatch.setattr("timm_moe.analysis.data.PROGRESS_INTERVAL", -1.0)
    written_by_the_command(checkpoint, splits, "-b", "7")
    assert f"{splits / 'val'}: 7 of 30 images ..." in caplog.messages


#: Ends of the commands, and the file that holds what a command does not print.
NUMBERED = {
    "evaluate": ("{file}", None),
    "benefits": ("--teacher={file} --student=5 --dense=1", None),
    "compare": ("{file} {other}", None),
    "report": ("{file} {out}", "index.html"),
    "routes": ("{file} {out}", "routes.csv"),
}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=pytest.mark.ci if name == "report" else [])  # its import is slow
        for name in NUMBERED
    ],
)
def test_a_class_map_numbers_the_classes(splits, tmp_path, capsys, command):
    """Commands number the classes by the order of the map, here the reverse."""
    class_map = tmp_path / "classes.txt"
    class_map.write_text("\n".join(f"class{label}" for label in reversed(range(CLASSES))))
    model = seeded_model("vit_tiny_moe", 1)
    file, other = (save(model, "vit_tiny_moe", tmp_path / f"{name}.pth.tar") for name in ("a", "b"))
    words, written = NUMBERED[command]
    words = words.format(file=file, other=other, out=tmp_path / "out").split()
    images = [f"--data-dir={splits}", f"--class-map={class_map}"]
    assert main([command, *words, *images, "-j", "0", "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    if written is not None:
        told = (tmp_path / "out" / written).read_text()
    if command == "routes":
        order = dict.fromkeys(row["class"] for row in csv.DictReader(told.splitlines()))
        assert [*order] == ["class4", "class3", "class2", "class1", "class0"]
        return
    mapped, unmapped = (
        100 * evaluate([file], image_folder(splits, class_map=each), inference=HERE)["accuracy"]
        for each in (str(class_map), "")
    )
    assert f"{mapped:.2f}" in told
    assert f"{unmapped:.2f}" not in told


def test_benefits_of_the_papers_table_2(capsys):
    """OneS, arXiv 2201.10890, tables 1 and 2: students of WideNet-B (77.5 %, dense 72.8 %)."""
    for accuracy, benefit in ((73.8, 21.3), (74.8, 42.6), (75.2, 51.1), (75.3, 53.2), (75.7, 61.7)):
        assert (
            main(["benefits", "--student", str(accuracy), "--teacher", "77.5", "--dense", "72.8"])
            == 0
        )
        assert f"MoE benefits kept by the student: {benefit}%" in capsys.readouterr().out
    assert main(["benefits", "--student", "a.pth", "--teacher", "77.5", "--dense", "72.8"]) == 1
    error = capsys.readouterr().err
    assert "a.pth" in error
    assert "--data-dir" in error
    for accuracy in ("nan", "757", "-1", "0.757"):
        assert (
            main(["benefits", f"--student={accuracy}", "--teacher", "77.5", "--dense", "72.8"]) == 1
        )
        assert f"between 1 and 100, got {accuracy}" in capsys.readouterr().err
    assert main(["benefits", "--student", "70", "--teacher", "72.8", "--dense", "72.8"]) == 1
    assert "its experts bring nothing" in capsys.readouterr().err


def test_a_student_has_no_experts(splits, tmp_path, capsys):
    for name, kept in (("vit_tiny_moe", "student"), ("vit_tiny_ewa_moe", None)):
        experts = timm.create_model(name, **SMALL_VIT)
        file = save_as_train_py(tmp_path / f"{name}.pth", experts, name)
        command = ["benefits", f"--student={file}", "--teacher=77.5", "--dense=72.8"]
        options = [f"--data-dir={splits}", "--split=val", "-j", "0", "--device=cpu"]
        assert main([*command, *options]) == (kept is not None)
        out, err = capsys.readouterr()
        told = "has routed experts: --student is a dense model" in err
        assert told == (kept is not None)
    accuracy = evaluate([file], image_folder(splits), inference=HERE)["accuracy"]
    assert re.search(rf"student +top-1 +{accuracy:.2%}", out)


def test_a_process_of_several_evaluates_by_itself(splits, model, monkeypatch):
    """Evaluate in one of several processes; to wait for the others would be for ever."""
    monkeypatch.setattr("torchmetrics.metric.jit_distributed_available", lambda: True)
    images = image_folder(splits, "val")
    result = evaluate([model, model], images, images, inference=HERE)
    assert (result["images"], result["ood_images"], result["auroc"]) == (30, 30, 0.5)


class FunctionalDropout(Mlp):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


def test_experts_are_put_back_into_their_mode():
    layer = MoeMlp(FunctionalDropout(8), RandomPartition(2))
    with in_eval_mode([layer]):
        assert torch.equal(layer(x := torch.randn(4, 8)), layer(x))
    assert not torch.equal(layer(x), layer(x))


def test_a_layer_that_blocks_share_is_put_back_into_its_mode():
    model = timm.create_model("widenet_b", num_experts=2, **SMALL_VIT).train()
    model.blocks[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    with in_eval_mode([model]):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == modes


def test_logits_that_float32_would_make_equal_probabilities(splits, model):
    model.forward = lambda x: torch.tensor([[0.0, 1e-8, -9.0, -9.0, -9.0]]).expand(len(x), 5)
    batches = evaluation.predictions([model], ["model"], image_folder(splits), HERE)
    for _, log_p_BMC, _ in batches:
        assert (log_p_BMC.argmax(2) == 1).all()


def test_every_figure_is_written_by_its_layout():
    result = dict(normalized_disagreement=0.5, disagreement=0.25, ood_images=1234, fpr_at_95=0.125)
    written = [line.split()[-1] for line in evaluation.table(result)]
    assert written == ["0.5000", "25.00%", "1,234", "12.50%"]


def test_the_member_that_learnt_by_bce_is_named(caplog, monkeypatch):
    monkeypatch.setattr(evaluation, "took_bce", lambda model: model == 1)
    evaluation.warn_of_bce([1, 0, 0], ["a", "b", "c"])
    (told,) = caplog.messages
    assert told.startswith("a was trained by binary cross-entropy")


def test_other_data_have_the_split_of_the_images(splits, model, tmp_path):
    file = save(model, "vit_tiny_patch16_224", tmp_path / "a.pth")
    options = ["--split=other", f"--ood-data-dir={splits}"]
    found = written_by_the_command(file, splits, *options)["metrics"]
    assert (found["images"], found["ood_images"]) == (20, 20)


def test_a_dense_model_has_no_experts(splits, tmp_path, capsys):
    experts = make_model("vit_tiny_moe")
    file = save(experts, "vit_tiny_moe", tmp_path / "a.pth")
    command = ["benefits", "--student=75", "--teacher=77.5", f"--dense={file}"]
    assert main([*command, f"--data-dir={splits}", "-j=0", "--device=cpu"]) == 1
    assert "has routed experts: --dense is a dense model" in capsys.readouterr().err
