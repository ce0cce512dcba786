"""Few-shot evaluation.

The regression is compared with its definition, and the command runs on folders of images.
"""

import json
import os

import numpy as np
import pytest
import timm
import torch
from common import SMALL_VIT, make_model, save_as_train_py
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torch.optim.swa_utils import AveragedModel

from timm_moe.analysis.data import Inference, image_folder
from timm_moe.analysis.fewshot import PENALTIES, Folder, Ridge, _best_penalty, _results, fewshot
from timm_moe.model_config import preprocessing
from timm_moe_cli import main

HERE = Inference(batch_size=7, workers=0, device="cpu")
CLASSES, TRAIN, TEST = 3, 8, 5


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """Classes of colours that are hard to tell apart."""
    return write_colours(tmp_path_factory.mktemp("colours"), distance=20)


def write_colours(folder, distance):
    random = np.random.default_rng(0)
    for split, number in (("train", TRAIN), ("test", TEST)):
        for label in range(CLASSES):
            (folder / split / f"class{label}").mkdir(parents=True)
            for index in range(number):
                colour = 100 + distance * np.eye(3)[label] + random.normal(0, 20, 3)
                pixels = np.clip(colour + random.normal(0, 30, (32, 32, 3)), 0, 255).astype(
                    np.uint8
                )
                Image.fromarray(pixels).save(folder / split / f"class{label}" / f"{index}.png")
    return folder


def folder_of(colours):
    return Folder("colours", image_folder(colours, "train"), image_folder(colours, "test"))


@settings(max_examples=30)
@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(2, 4),
    st.sampled_from(PENALTIES),
    st.integers(0, 99),
)
def test_the_regression_is_its_definition(images, width, num_classes, penalty, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, width, generator=generator, dtype=torch.float64)
    label = torch.randint(num_classes, (images,), generator=generator)
    others = torch.randn(5, width, generator=generator, dtype=torch.float64)
    mean, std = x.mean(0), x.std(0, correction=0) + 1e-5

    def whitened(rows):
        return torch.cat(
            [(rows - mean) / std, torch.full((len(rows), 1), 100.0, dtype=torch.float64)], 1
        )

    y = torch.where(label[:, None] == torch.arange(num_classes), 1.0, -1.0).double()
    design = whitened(x)
    weights = torch.linalg.solve(
        design.T @ design + penalty * torch.eye(width + 1, dtype=torch.float64), design.T @ y
    )
    ridge = Ridge(x, label, num_classes)
    torch.testing.assert_close(
        ridge.scores(others, penalty), whitened(others) @ weights, rtol=1e-6, atol=1e-5
    )


@settings(max_examples=30)
@given(
    st.integers(2, 12),
    st.integers(1, 9),
    st.integers(2, 4),
    st.sampled_from(PENALTIES),
    st.integers(0, 99),
)
def test_the_left_out_error_is_that_of_regressions_without_the_image(
    images, width, num_classes, penalty, seed
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(images, width, generator=generator, dtype=torch.float64)
    label = torch.randint(num_classes, (images,), generator=generator)
    design = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    design = torch.cat([design, torch.full((images, 1), 100.0, dtype=torch.float64)], 1)
    y = torch.where(label[:, None] == torch.arange(num_classes), 1.0, -1.0).double()
    squares = []
    for left_out in range(images):
        rows, targets = (torch.cat([part[:left_out], part[left_out + 1 :]]) for part in (design, y))
        gram = rows.T @ rows + penalty * torch.eye(width + 1, dtype=torch.float64)
        squares.append(
            (design[left_out] @ torch.linalg.solve(gram, rows.T @ targets) - y[left_out]).square()
        )
    error = Ridge(x, label, num_classes).left_out_error(penalty)
    assert error == pytest.approx(torch.stack(squares).mean().item(), rel=1e-4)


def test_the_penalty_is_of_the_best_mean_rank():
    # Ranks 0 2 1, 0 1 2, 0 2 1.
    accuracy = torch.tensor([[0.1, 0.5, 0.4], [0.2, 0.3, 0.9], [0.1, 0.3, 0.2]])
    assert _best_penalty(accuracy) == 1
    assert _best_penalty(torch.full((2, 4), 0.5)) == 0


def test_the_penalty_is_ranked_in_every_draw():
    accuracies = torch.zeros(1, 3, 1, 1, len(PENALTIES))  # the mean over the draws prefers 7
    accuracies[0, :, 0, 0, 5] = torch.tensor([0.5, 0.5, 0.1])
    accuracies[0, :, 0, 0, 7] = torch.tensor([0.4, 0.4, 0.9])
    (result,) = _results([Folder("a", None, None)], (1,), accuracies)
    assert result.penalty == PENALTIES[5]


def test_the_penalties_are_those_of_the_paper():
    assert (len(PENALTIES), PENALTIES[0], PENALTIES[-1]) == (30, 2**-10, 2**19)


def test_each_folder_has_draws_of_its_own(colours, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "timm_moe.analysis.fewshot._folder_accuracies",
        lambda named, folder, chosen, *_: (
            drawn.append(chosen) or torch.zeros(1, 1, 1, len(PENALTIES))
        ),
    )
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    fewshot([model], [folder_of(colours)] * 2, (3,), 1, inference=HERE)
    assert not torch.equal(*drawn)


def test_accuracies_are_those_of_a_loop_by_hand(colours):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
    results = fewshot([model], [folder_of(colours)], (1, 4), draws=2, inference=HERE)
    assert [(result.shots, result.members) for result in results] == [(1, "joint"), (4, "joint")]
    # The draws repeat.
    assert results == fewshot([model], [folder_of(colours)], (1, 4), draws=2, inference=HERE)

    def features(split):
        images = image_folder(colours, split)
        images.transform = timm.data.create_transform(**preprocessing(model))
        x, label = zip(*(images[index] for index in range(len(images))), strict=True)
        with torch.no_grad():
            return model.forward_features(torch.stack(x))[:, 0], torch.tensor(label)

    (x, label), (others, expected) = features("train"), features("test")
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(2):
        of_class = [(label == number).nonzero().flatten() for number in range(CLASSES)]
        drawn.append([images[torch.randperm(TRAIN, generator=generator)] for images in of_class])
    for result in results:
        accuracy = []
        for order in drawn:
            chosen = torch.cat([images[: result.shots] for images in order])
            scores = Ridge(x[chosen], label[chosen], CLASSES).scores(others, result.penalty)
            accuracy.append((scores.argmax(1) == expected).double().mean().item())
        assert result.accuracy == pytest.approx(np.mean(accuracy))
        assert result.standard_error == pytest.approx(np.std(accuracy, ddof=1) / 2**0.5)


def test_members_are_joined_or_take_part_one_by_one(colours):
    ensemble = timm.create_model("vmoe_pbe_s32", num_experts=4, **SMALL_VIT).eval()
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        members = ensemble.forward_member_features(x)
        assert members.shape == (4, 2, 32)
        torch.testing.assert_close(
            members.mean(1), ensemble.forward_head(ensemble.forward_features(x), pre_logits=True)
        )
        torch.testing.assert_close(ensemble.head(members), ensemble.forward_members(x))
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).eval()
    results = fewshot([ensemble, dense], [folder_of(colours)], (2,), draws=1, inference=HERE)
    assert [result.members for result in results] == ["joint", "disjoint", "weighted"]
    assert results[0].standard_error is None
    alone = fewshot([dense], [folder_of(colours)], (2,), draws=1, inference=HERE)
    twice = fewshot([dense, dense], [folder_of(colours)], (2,), draws=1, inference=HERE)
    # The mean of two equal regressions.
    assert twice[1].accuracy == twice[2].accuracy == alone[0].accuracy


def test_a_wrapped_model_in_half_precision(colours):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).bfloat16()
    folders = [folder_of(colours)]
    expected = fewshot([model], folders, (2,), draws=1, inference=HERE)
    assert fewshot([AveragedModel(model)], folders, (2,), draws=1, inference=HERE) == expected


class Brightness(nn.Module):
    """Features that tell the colours apart, or nothing but noise."""

    num_classes = CLASSES

    def __init__(self, noise):
        super().__init__()
        self.noise = noise
        self.pretrained_cfg = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT).pretrained_cfg

    def forward_features(self, x):
        mean = x.mean((2, 3))
        return (mean * 1e3).sin() if self.noise else mean  # a function of the image alone

    def forward_head(self, x, pre_logits):
        return x


def test_a_member_counts_by_what_it_says_of_images_left_out(tmp_path):
    colours = write_colours(tmp_path, distance=80)
    members = [Brightness(noise=False), *(Brightness(noise=True) for _ in range(9))]
    results = fewshot(members, [folder_of(colours)], (6,), draws=2, inference=HERE)
    _, disjoint, weighted = results
    assert weighted.members == "weighted"
    features, labels = [], []
    for split in ("train", "test"):
        images = image_folder(colours, split)
        images.transform = timm.data.create_transform(**preprocessing(members[0]))
        x, label = zip(*(images[index] for index in range(len(images))), strict=True)
        features.append([member.forward_features(torch.stack(x)) for member in members])
        labels.append(torch.tensor(label))
    generator = torch.Generator().manual_seed(0)
    accuracy = []
    for _ in range(2):
        of_class = [(labels[0] == number).nonzero().flatten() for number in range(CLASSES)]
        chosen = torch.cat(
            [rows[torch.randperm(TRAIN, generator=generator)[:6]] for rows in of_class]
        )
        scores = 0
        for x, others in zip(*features, strict=True):
            ridge = Ridge(x[chosen], labels[0][chosen], CLASSES)
            scores = scores + ridge.scores(others, weighted.penalty) / ridge.left_out_error(
                weighted.penalty
            )
        accuracy.append((scores.argmax(1) == labels[1]).double().mean().item())
    assert weighted.accuracy == pytest.approx(np.mean(accuracy))
    telling, noise = (
        Ridge(x[chosen], labels[0][chosen], CLASSES).left_out_error(1) for x in features[0][:2]
    )
    assert telling < 0.5 * noise
    assert weighted.accuracy > disjoint.accuracy + 0.1


def test_the_command_writes_what_it_prints(colours, tmp_path, capsys):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    timm.models.save_for_hf(
        model, str(tmp_path / "model"), model_args=SMALL_VIT, safe_serialization=True
    )
    options = [
        "--split",
        "test",
        "--shots",
        "1",
        "2",
        "--draws",
        "2",
        "-j",
        "0",
        "--json",
        str(tmp_path / "out.json"),
    ]
    folders = ["--data-dir", str(colours), str(colours)]
    assert main(["fewshot", str(tmp_path / "model"), *folders, *options]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert "debug" not in written
    assert [result["shots"] for result in written["results"]] == [1, 1, 2, 2]
    for result in written["results"]:
        assert f"{result['accuracy']:.2%} ± {result['standard_error']:.2%}" in printed


def test_the_seed_repeats_the_draws(colours, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    timm.models.save_for_hf(
        model, str(tmp_path / "model"), model_args=SMALL_VIT, safe_serialization=True
    )
    options = [
        "--data-dir",
        str(colours),
        "--split",
        "test",
        "--shots",
        "1",
        "--draws",
        "3",
        "-j",
        "0",
        "--overwrite",
    ]
    results = []
    for seed in ("1", "1", "2"):
        command = [
            "fewshot",
            str(tmp_path / "model"),
            *options,
            "--seed",
            seed,
            "--json",
            str(tmp_path / "out.json"),
        ]
        assert main(command) == 0
        results.append(json.loads((tmp_path / "out.json").read_text())["results"])
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(shots=(9,)), "9 shots .*class0 of colours .*8 images"),
        (dict(shots=(0,)), r"shots and draws .*\[0\] and 3"),
        (dict(draws=0), r"shots and draws .*\[1\] and 0"),
    ],
)
def test_what_is_not_possible_is_said(colours, options, message):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    with pytest.raises(ValueError, match=message):
        fewshot([model], [folder_of(colours)], **{"shots": (1,), **options}, inference=HERE)


def test_a_class_without_images_is_named(colours, tmp_path, capsys):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for name in ("class0", "class1"):
            (tmp_path / split / name).symlink_to(colours / split / name)
    (tmp_path / "map.txt").write_text("class0\nclass1\nclass2\n")
    options = ["--data-dir", str(tmp_path), "--split", "test", "--shots", "1", "-j", "0"]
    assert (
        main(["fewshot", "no-such-model", *options, "--class-map", str(tmp_path / "map.txt")]) == 1
    )
    message = (
        f"timm-moe: error: 1 shots are asked for, but class class2 of {tmp_path} has 0 images.\n"
    )
    assert capsys.readouterr().err == message


def test_a_model_is_named_once(colours):
    with pytest.raises(ValueError, match="a is named twice"):
        fewshot(["a", "a"], [folder_of(colours)], (1,), inference=HERE)


def test_a_hard_link_is_no_other_model(colours, tmp_path):
    """train.py makes some of its checkpoints by them."""
    last, best = tmp_path / "last.pth.tar", tmp_path / "model_best.pth.tar"
    last.touch()
    os.link(last, best)
    with pytest.raises(ValueError, match=r"model_best\.pth\.tar is named twice, as .*last\.pth"):
        fewshot([last, best], [folder_of(colours)], (1,), inference=HERE)


def test_other_classes_and_features_that_are_not_finite_are_refused(colours, tmp_path):
    for name in ("class0", "class1"):
        (tmp_path / "train").mkdir(exist_ok=True)
        (tmp_path / "train" / name).symlink_to(colours / "train" / name)
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    other = Folder("two", image_folder(tmp_path, "train"), image_folder(colours, "test"))
    with pytest.raises(ValueError, match=r"two .*other classes"):
        fewshot([model], [other], (1,), inference=HERE)

    nn.init.constant_(model.norm.weight, float("nan"))
    with pytest.raises(ValueError, match=r"VisionTransformer .*features .*NaN"):
        fewshot([model], [folder_of(colours)], (1,), inference=HERE)


@pytest.mark.parametrize("use_ema", [False, True])
def test_features_are_of_the_weights_that_are_asked_for(colours, tmp_path, monkeypatch, use_ema):
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224"
    plain, ema = make_model(name), make_model(name)
    file = save_as_train_py(tmp_path / "a.pth", plain, name, ema=ema, num_classes=5, img_size=32)
    seen = []
    monkeypatch.setattr(
        "timm_moe.analysis.fewshot._accuracies",
        lambda train, *_: seen.append(train[0]) or torch.zeros(1, len(PENALTIES)),
    )
    fewshot([file], [folder_of(colours)], (2,), 1, inference=HERE, use_ema=use_ema)
    fewshot([ema if use_ema else plain], [folder_of(colours)], (2,), 1, inference=HERE)
    torch.testing.assert_close(*seen)


def test_a_number_of_shots_has_one_penalty_by_all_folders():
    accuracies = torch.zeros(2, 1, 2, 1, len(PENALTIES))  # folders, draws, numbers of shots, kind
    accuracies[0, 0, 0, 0, [3, 5]] = torch.tensor([0.5, 0.4])
    accuracies[1, 0, 0, 0, 5] = 0.9
    accuracies[:, 0, 1, 0, 7] = 0.8
    folders = [Folder(name, None, None) for name in "ab"]
    results = _results(folders, (1, 4), accuracies)
    found = [(each.folder, each.shots, each.penalty, each.accuracy) for each in results]
    assert [(*each[:3], round(each[3], 4)) for each in found] == [
        ("a", 1, PENALTIES[5], 0.4),
        ("b", 1, PENALTIES[5], 0.9),
        ("a", 4, PENALTIES[7], 0.8),
        ("b", 4, PENALTIES[7], 0.8),
    ]


def test_features_in_mixed_precision(colours):
    model = timm.create_model("vit_tiny_patch16_224", **SMALL_VIT)
    seen = set()
    model.blocks[0].mlp.fc1.register_forward_hook(lambda _, x, y: seen.add(y.dtype))
    inference = Inference(7, 0, "cpu", torch.bfloat16)
    fewshot([model], [folder_of(colours)], (2,), 1, inference=inference)
    assert seen == {torch.bfloat16}


def test_the_command_draws_as_often_as_stated(colours, tmp_path):
    name = "vit_tiny_patch16_224"
    file = save_as_train_py(tmp_path / "a.pth", make_model(name), name, img_size=32)
    images = [f"--data-dir={colours}", "--split=test", "--shots=1"]
    options = ["--draws=1", f"--json={tmp_path}/a.json", "-j=0"]
    assert main(["fewshot", str(file), *images, *options]) == 0
    (result,) = json.loads((tmp_path / "a.json").read_text())["results"]
    assert result["standard_error"] is None
