"""Runs of train.py compared over seeds, against scipy and by hand, and what the command says."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import OPTIONS, SMALL_VIT_KWARGS, make_model, save_as_train_py, write_images
from PIL import Image
from scipy.stats import ttest_rel
from timm.models import save_for_hf
from train_script import needs_scripts, train

import timm_moe
from studies.outcome import paired
from timm_moe.analysis import comparison
from timm_moe.analysis.comparison import Measured, Run, compare, find_runs, table
from timm_moe.analysis.data import image_folder
from timm_moe.analysis.evaluation import evaluate
from timm_moe.analysis.paired import Difference
from timm_moe.checkpoints.model_spec import ModelSpec
from timm_moe_cli import main

HERE = ("-j", "0", "--device", "cpu")
TINY = ("--model-kwargs", *SMALL_VIT_KWARGS, "--img-size", "32", "--num-classes", "3")


def measured(group, seed, accuracy=0.5, nll=1.0, ece=0.1, right=(True, False), **options):
    figures = {"accuracy": accuracy, "nll": nll, "ece": ece}
    run = Run(f"{group}-{seed}", "", group)
    recorded = {name: str(value) for name, value in options.items()}
    return Measured(run, seed, options, recorded, figures, torch.tensor(right))


def lines(runs):
    return list(table(runs, compare(runs)))


def test_differences_are_paired_by_seed_whatever_the_order():
    dense = {0: 0.50, 1: 0.55, 2: 0.53, 9: 0.1}
    ewa = {2: 0.54, 0: 0.52, 1: 0.56, 7: 0.9}
    runs = [measured("dense", seed, value, nll=2 - value) for seed, value in dense.items()]
    runs += [measured("ewa", seed, value, nll=2.5 - value) for seed, value in ewa.items()]
    (found,) = compare(runs)
    assert (found.group, found.first, found.seeds, found.only) == ("ewa", "dense", [0, 1, 2], None)
    expected = ttest_rel([ewa[seed] for seed in range(3)], [dense[seed] for seed in range(3)])
    interval = expected.confidence_interval()
    accuracy = found.differences["accuracy"]
    assert accuracy.pairs == 3
    assert accuracy.mean == pytest.approx(0.04 / 3)
    assert (accuracy.low, accuracy.high) == pytest.approx((interval.low, interval.high))
    text = "\n".join(lines(runs))
    assert "ewa - dense: +1.33 (95 % interval -0.10 to +2.77, 3 pairs), no clear differ" in text
    assert "ewa - dense: +0.4867 (95 % interval +0.4723 to +0.5010, 3 pairs), worse" in text
    assert "dense  42.00  (50.00 55.00 53.00 10.00)" in text
    assert "  ewa    63.00  (52.00 56.00 54.00 90.00)" in text
    assert "Without a partner, so in no difference: dense-9, ewa-7." in text


def test_runs_beside_a_single_pair_are_named():
    """Their figures are in the means that stand beside the difference."""
    runs = [measured("dense", 0, 0.5), measured("dense", 1, 0.6)]
    runs += [measured("ewa", 1, 0.7), measured("ewa", 7, 0.8)]
    assert "Without a partner, so in no difference: dense-0, ewa-7." in lines(runs)
    alone = "\n".join(lines([runs[0], runs[3]]))
    assert "McNemar" in alone
    assert "partner" not in alone


def test_a_single_pair_is_compared_image_by_image():
    right = [True] * 20 + [False] * 9
    other = [False] + [True] * 19 + [True] * 8 + [False]
    runs = [measured("dense", 0, right=right), measured("ewa", 5, right=other)]
    (found,) = compare(runs)
    assert found.only == (8, 1)
    p = 2 * sum(math.comb(9, k) for k in (0, 1)) / 2**9
    assert found.p == pytest.approx(p)
    assert found.differences["nll"].low == -math.inf
    text = "\n".join(lines(runs))
    assert f"only ewa got 8 images right, only dense 1, p = {p:.2g}." in text
    assert "interval" not in text
    (same,) = compare([runs[0], measured("twin", 0, right=right)])
    assert (same.only, same.p) == ((0, 0), 1.0)


def test_what_cannot_be_paired_is_said():
    runs = [measured("dense", seed) for seed in (0, 1)] + [measured("ewa", 2)]
    assert compare(runs)[0].differences == {}
    assert "ewa and dense share no seed, so they are not compared." in lines(runs)
    two = [measured(group, seed) for group in ("dense", "ewa") for seed in (0, 1)]
    note = "ewa and dense have two pairs, from which there is no verdict: train a third seed."
    assert note in lines(two)


def test_two_pairs_are_judged_as_by_the_studies():
    """Two equal differences leave no interval; a study gives no verdict either."""
    dense = {"0": 0.5, "1": 0.6}
    ewa = {"0": 0.7, "1": 0.8}
    runs = [measured("dense", int(seed), value) for seed, value in dense.items()]
    runs += [measured("ewa", int(seed), value) for seed, value in ewa.items()]
    (told,) = [line for line in lines(runs) if line.startswith("  ewa - dense: +20.00")]
    assert told.endswith(f"2 pairs), {paired(ewa, dense).verdict(1)}")
    assert told.endswith("no verdict from fewer than three pairs")


def test_options_that_differ_are_said():
    runs = [
        measured("dense", 0, model="vit", lr=1e-3, drop=0.0, initial_checkpoint=""),
        measured("dense", 1, model="vit", lr=2e-3, drop=0.0, initial_checkpoint=""),
        measured("ewa", 0, model="vit_ewa", lr=1e-3, drop=0.1, initial_checkpoint="a.pth"),
        measured("exported", 0),
    ]
    said = lines(runs)
    assert (
        "Careful: dense-0 and dense-1, both of dense, differ not only in the seed but in lr."
        in said
    )
    assert said[-1] == (
        "dense and ewa were trained with different drop (0.0, 0.1); initial_checkpoint (not set, "
        "a.pth); model (vit, vit_ewa)."
    )


def test_unfinished_runs_are_told_of():
    def run(group, seed, last):
        return measured(group, seed, epochs=20, **{comparison.LAST_EPOCH: last})

    whole = [run(group, seed, 20) for group in ("dense", "ewa") for seed in (0, 1)]
    assert "epoch" not in "".join(lines(whole)[1:])
    said = lines([*whole[:3], run("ewa", 1, 5)])
    assert "Careful: the weights of ewa-1 are of epoch 5 of 20." in said
    differ = "differ not only in the seed but in last epoch."
    assert f"Careful: ewa-0 and ewa-1, both of ewa, {differ}" in said
    said = lines([run("dense", 0, 30), run("ewa", 0, 25)])  # with 10 epochs of cooldown
    assert said[-1] == "dense and ewa were trained with different last epoch (30, 25)."
    assert "Careful" not in "".join(said)


def test_the_epochs_of_a_run_are_those_of_its_checkpoint(tmp_path):
    images = image_folder(write_images(tmp_path / "data", {"validation": 1}, list("abcde")))
    model, name = make_model("vit_tiny_patch16_224"), "vit_tiny_patch16_224"
    for seed, epochs in enumerate((2, 3)):  # after the second epoch
        file = tmp_path / f"vit-{seed}" / "last.pth.tar"
        file.parent.mkdir()
        save_as_train_py(file, model, name, seed=seed, epochs=epochs, img_size=32)
    runs = find_runs([str(tmp_path / "vit-*")])
    said = list(
        comparison.unfinished(comparison.measure_runs(runs, images, inference=_inference()))
    )
    assert said == ["Careful: the weights of vit-1 are of epoch 2 of 3."]


def test_a_run_without_a_seed_has_the_number_in_its_name(tmp_path):
    """train.py's default is 42; another program may state none."""
    images = image_folder(write_images(tmp_path / "data", {"validation": 1}, list("abcde")))
    name = "vit_tiny_patch16_224"
    for seed in (3, 4):
        file = tmp_path / f"vit-{seed}.pth.tar"
        save_as_train_py(file, make_model(name), name, seed=None, img_size=32)
    runs = find_runs([str(tmp_path / "vit-*")])
    found = comparison.measure_runs(runs, images, inference=_inference())
    assert [each.seed for each in found] == [3, 4]


@pytest.fixture
def experiments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("dense-0", "dense-1", "ewa-seed0", "ewa-seed1"):
        folder = Path("output/train", name)
        folder.mkdir(parents=True)
        (folder / "last.pth.tar").touch()
    Path("my-vit").mkdir()
    return tmp_path


def test_runs_are_found_by_name_by_folder_and_by_file(experiments, caplog):
    caplog.set_level("INFO")
    names = [(run.name, run.group) for run in find_runs(["dense-*", "ewa-*", "my-vit"])]
    assert names == [
        ("dense-0", "dense"),
        ("dense-1", "dense"),
        ("ewa-seed0", "ewa"),
        ("ewa-seed1", "ewa"),
        ("my-vit", "my-vit"),
    ]
    folders = ["output/train/dense-0", str(experiments / "output/train/ewa-seed1/last.pth.tar")]
    assert [(run.name, run.group) for run in find_runs(folders)] == [
        ("dense-0", "dense"),
        ("ewa-seed1", "ewa"),
    ]
    assert find_runs(folders)[0].source == "output/train/dense-0/last.pth.tar"
    two = [(run.name, run.group) for run in find_runs(["dense-0", "dense-1"])]
    assert two == [("dense-0", "dense-0"), ("dense-1", "dense-1")]
    (told,) = caplog.messages
    assert told.startswith("All runs are of dense,")
    assert find_runs(["hf-hub:a/b-1", "my-vit"])[0].group == "hf-hub:a/b"


def test_a_run_in_the_users_home_is_found(experiments, monkeypatch):
    monkeypatch.setenv("HOME", str(experiments))
    runs = find_runs(["~/output/train/dense-0", "~/my-vit"])
    assert [run.name for run in runs] == ["dense-0", "my-vit"]


@pytest.mark.parametrize(
    ("folders", "groups"),
    [
        (["dense/seed0", "dense/seed1", "ewa/seed0"], ["dense", "dense", "ewa"]),
        (["dense/seed0", "ewa/seed1"], ["dense", "ewa"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["x/y/a/run-0", "x/z/a/run-0"], ["y/a/run", "z/a/run"]),
        (["ewa 0", "ewa seed 1", "dense 0"], ["ewa", "ewa", "dense"]),
        (  # as train.py names them
            [f"20261128-08020{n}-{name}" for n in (1, 2) for name in ("vit-32", "vit_moe-32")],
            ["vit-32", "vit_moe-32", "vit-32", "vit_moe-32"],
        ),
        (["20261128-080201-vit-32", "20261128-080202-vit-224"], ["vit-32", "vit-224"]),
        (["a/20261128-080201-vit-32", "b/20261128-080201-vit-32"], ["a/vit-32", "b/vit-32"]),
    ],
)
def test_runs_of_equal_names_are_told_apart_by_the_folders_above(tmp_path, folders, groups):
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "last.pth.tar").touch()
    for arguments in (folders, [f"{folder}/last.pth.tar" for folder in folders]):
        runs = find_runs([str(tmp_path / argument) for argument in arguments])
        assert [run.group for run in runs] == groups
        assert len({run.name for run in runs}) == len(runs)


def test_two_checkpoints_of_a_run_have_the_names_of_their_files(experiments):
    folder = Path("output/train/dense-0")
    (folder / "model_best.pth.tar").touch()
    runs = find_runs([str(folder), str(folder / "model_best.pth.tar")])
    assert [run.group for run in runs] == ["last", "model_best"]


@pytest.mark.parametrize("ending", [".pth.tar", ".pth", ".ckpt", ".safetensors", ".bin"])
def test_files_that_are_called_alike_but_for_a_number_are_one_method(tmp_path, ending):
    files = [tmp_path / "runs" / f"{name}-{seed}{ending}" for name in ("a", "b") for seed in (0, 1)]
    files += [tmp_path / f"c-{seed}" / f"checkpoint{ending}" for seed in (0, 1)]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    runs = find_runs([*map(str, files)])
    assert [run.name for run in runs] == ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]
    assert [run.group for run in runs] == ["a", "a", "b", "b", "c", "c"]
    assert [run.source for run in runs] == [*map(str, files)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense-*", "moe-*"], r"moe-\* is no run"),
        (["dense-0", "dense-*"], r"dense-0/last\.pth\.tar is named twice"),
        (["dense-0", "output/train/../train/dense-0"], "is named twice"),
        (["dense-0"], r"Two runs .*got 1\."),
    ],
)
def test_runs_that_are_not_there(experiments, arguments, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        find_runs(arguments)


def save_experiments(seed_of_run):
    """Write images, and the last checkpoint of runs of train.py; their names begin with a model."""
    write_images(Path("data"), {"validation": 4}, [f"class{label}" for label in range(5)])
    for name, seed in seed_of_run.items():
        model = "vit_tiny_ewa_moe" if "ewa" in name else "vit_tiny_patch16_224"
        file = Path("output/train", name, "last.pth.tar")
        save_as_train_py(file, make_model(model), model, seed=seed, img_size=32)


def test_two_runs_of_a_method_with_one_seed_are_refused(experiments, capsys):
    """Runs of train.py have --seed 42 unless another is stated."""
    save_experiments({"dense-0": 42, "dense-1": 42, "ewa-seed0": 42})
    assert main(["compare", "dense-*", "ewa-seed0", "--data-dir", "data", *HERE]) == 1
    error = capsys.readouterr().err
    assert "dense-0 and dense-1, runs of dense, " in error
    assert "same seed, 42" in error


def test_an_exported_folder_keeps_its_seed_and_options(experiments):
    """Its name may have another number, or that of something else than a seed."""
    save_experiments({"dense-0": 3, "dense-1": 4, "ewa-seed0": 3, "ewa-seed1": 4})
    images = image_folder("data")
    for number, seed in enumerate((3, 4)):
        source = f"output/train/ewa-seed{number}/last.pth.tar"
        timm_moe.export_dense(source, f"exported-{seed + 1}")
    runs = find_runs(["dense-*", "exported-*"])
    found = comparison.measure_runs(runs, images, inference=_inference())
    assert [run.seed for run in found] == [3, 4, 3, 4]
    same = comparison.measure_runs(find_runs(["dense-*", "ewa-*"]), images, inference=_inference())
    for name, difference in compare(found)[0].differences.items():
        assert difference.mean == pytest.approx(compare(same)[0].differences[name].mean, abs=1e-6)
    assert "dense and exported were trained with different model (" in lines(found)[-1]
    assert not lines([found[0], same[2]])[-1].startswith("Careful")


def test_the_command_writes_the_figures_of_evaluate(experiments, capsys):
    save_experiments({"dense-0": 3, "dense-1": 4, "ewa-seed0": 3, "ewa-seed1": 4})
    arguments = ["compare", "dense-*", "ewa-*", "--data-dir", "data", *HERE]
    assert main([*arguments, "--json", "a.json", "--plot", "a.png"]) == 0
    assert "20 images; mean over runs (one by one)" in capsys.readouterr().out
    written = json.loads(Path("a.json").read_text())
    assert [(run["group"], run["seed"]) for run in written["runs"]] == [
        *(("dense", 3), ("dense", 4)),
        *(("ewa", 3), ("ewa", 4)),
    ]
    for run in written["runs"]:
        own = evaluate([run["source"]], image_folder("data"), inference=_inference())
        assert {name: run[name] for name in ("accuracy", "nll", "ece")} == pytest.approx(
            {name: own[name] for name in ("accuracy", "nll", "ece")}
        )
    dense, ewa = (
        [run["nll"] for run in written["runs"] if run["group"] == group]
        for group in ("dense", "ewa")
    )
    (found,) = written["comparisons"]
    expected = (sum(ewa) - sum(dense)) / 2
    assert found["differences"]["nll"]["mean"] == pytest.approx(expected)
    assert expected != 0
    assert Image.open("a.png").size[0] > 900
    assert main([*arguments, "--plot", "a.png"]) == 1
    assert "a.png exists; pass --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--json", "b.png", "--plot", "./b.png"]) == 1
    assert "--json and --plot are one file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_checkpoint_that_is_read_is_not_written_over(experiments, capsys, option):
    """The experiments are named, not their files."""
    write_images(Path("data"), {"validation": 1})
    file = Path("output/train/dense-0/last.pth.tar")
    before = file.read_bytes()
    arguments = ["dense-*", "ewa-*", "--data-dir", "data", *HERE]
    assert main(["compare", *arguments, option, str(file), "--overwrite"]) == 1
    assert "which is read" in capsys.readouterr().err
    assert file.read_bytes() == before


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_in_the_current_folder_is_written_over(experiments, capsys, option):
    """No class map is stated; its empty name is not that of the current folder."""
    Path("a.png").touch()
    arguments = ["dense-*", "ewa-*", "--data-dir", "nowhere", *HERE]
    assert main(["compare", *arguments, option, "a.png", "--overwrite"]) == 1
    assert "No such folder of images: 'nowhere'" in capsys.readouterr().err  # what is checked next


@pytest.mark.parametrize("name", ["compare", "compare.bmp", ".png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_the_runs_are_read(
    experiments, capsys, name
):
    assert main(["compare", "dense-*", "--data-dir", "nowhere", *HERE, "--plot", name]) == 1
    error = capsys.readouterr().err
    assert f"cannot be drawn to {name}: its name must end in " in error
    assert ".png, " in error
    assert not Path(name).exists()


@pytest.mark.ci
@needs_scripts
def test_trained_runs_are_compared_by_their_names(tmp_path, monkeypatch, capsys):
    images = write_images(tmp_path / "data", {"train": 24, "test": 16})
    for name, model in (("dense", "vit_tiny_patch16_224"), ("ewa", "vit_tiny_ewa_moe")):
        for seed in (3, 4):
            options = ("--model", model, *TINY, "--seed", seed, "--experiment", f"{name}-{seed}")
            train(tmp_path, images, *options, epochs=3)
    monkeypatch.chdir(tmp_path)
    arguments = ["dense-*", "ewa-*", "--data-dir", str(images), "--split", "test", *HERE]
    assert main(["compare", *arguments, "--json", "a.json"]) == 0
    said = capsys.readouterr().out
    assert "48 images; mean over runs (one by one)" in said
    assert "ewa and dense have two pairs" in said
    assert (
        "dense and ewa were trained with different model (vit_tiny_patch16_224, vit_tiny_ewa_moe)."
        in said
    )
    assert "Careful" not in said
    written = json.loads(Path("a.json").read_text())
    assert [(run["group"], run["seed"]) for run in written["runs"]] == [
        *(("dense", 3), ("dense", 4)),
        *(("ewa", 3), ("ewa", 4)),
    ]
    assert main(["compare", "dense-3", "ewa-3", *arguments[2:]]) == 0
    said = capsys.readouterr().out
    assert "McNemar's exact test: only ewa got" in said


def _inference():
    return comparison.Inference(batch_size=7, workers=0, device="cpu")


@pytest.mark.parametrize("kind", ["EMA weights", "a stated model", "names of its own"])
def test_a_run_is_measured_as_by_evaluate(tmp_path, kind):
    """Figures are of the weights and the model that are asked for, in its order of classes."""
    torch.manual_seed(0)
    images = image_folder(write_images(tmp_path / "data", {"validation": 6}, list("abcde")))
    name, options = "vit_tiny_patch16_224", {}
    model, file = make_model(name), tmp_path / "run-0.pth"
    if kind == "a stated model":
        torch.save(model.state_dict(), file)
        options = dict(spec=ModelSpec(name, 5, OPTIONS))
    elif kind == "names of its own":
        file = tmp_path / "run-0"
        stated = dict(label_names=list("badce"))
        save_for_hf(model, str(file), stated, model_args=OPTIONS, safe_serialization=True)
    else:
        save_as_train_py(file, model, name, ema=make_model(name), img_size=32)
        options = dict(use_ema=True)
    runs = [Run("run-0", str(file), "run")]
    (found,) = comparison.measure_runs(runs, images, inference=_inference(), **options)
    expected = evaluate([str(file)], images, inference=_inference(), **options)
    assert found.figures == {figure: expected[figure] for figure in ("accuracy", "nll", "ece")}
    assert found.right.double().mean().item() == pytest.approx(expected["accuracy"])


def test_a_run_by_bce_is_told_of(tmp_path, caplog):
    images = image_folder(write_images(tmp_path / "data", {"validation": 1}, list("abcde")))
    name = "vit_tiny_patch16_224"
    file = save_as_train_py(tmp_path / "a.pth", make_model(name), name, img_size=32, bce_loss=True)
    comparison.measure_runs([Run("run-0", str(file), "run")], images, inference=_inference())
    assert "binary cross-entropy" in caplog.text


def test_an_ensemble_gets_right_what_the_mean_of_its_members_does(tmp_path):
    torch.manual_seed(0)
    images = image_folder(write_images(tmp_path / "data", {"validation": 12}, list("abcde")))
    ensemble, *members = (make_model("vit_tiny_patch16_224") for _ in range(4))
    ensemble.forward_members = lambda x: torch.stack([member(x) for member in members], 1)
    runs = [Run("run-0", ensemble, "run")]
    (found,) = comparison.measure_runs(runs, images, inference=_inference())
    expected, first = (
        evaluate([model], images, inference=_inference())["accuracy"]
        for model in (ensemble, members[0])
    )
    assert found.right.double().mean().item() == pytest.approx(expected)
    assert expected != first


def test_the_picture_has_the_intervals_of_the_table(tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn = []
    monkeypatch.setattr(Axes, "errorbar", lambda self, x, y, xerr, **_: drawn.append((x, xerr)))
    values = {"dense": (0.5, 0.55, 0.53), "ewa": (0.52, 0.56, 0.54)}
    runs = [measured(group, seed, v) for group in values for seed, v in enumerate(values[group])]
    comparison.plot(runs, compare(runs), tmp_path / "a.png")
    accuracy = compare(runs)[0].differences["accuracy"]
    half = accuracy.high - accuracy.mean
    assert drawn[0] == pytest.approx((100 * accuracy.mean, 100 * half))


def test_runs_whose_seeds_are_unknown_are_no_pair():
    runs = [measured(group, seed) for group in ("dense", "ewa") for seed in (None, 1, 2)]
    (found,) = comparison.compare(runs)
    assert found.seeds == [1, 2]


def test_the_picture_has_the_runs_and_names_of_the_table(tmp_path, drawn):
    values = {"moe": (0.5, 0.55, 0.53), "dense": (0.1, 0.1), "ewa": (0.52, 0.56, 0.54)}
    runs = [measured(group, s, v) for group in values for s, v in enumerate(values[group])]
    comparison.plot(runs, compare(runs), tmp_path / "a.png")
    shown, gaps = drawn[0].axes[0], drawn[0].axes[3]
    points = [[*zip(*map(list, line.get_data()), strict=True)] for line in shown.lines]
    assert points == [
        [(pytest.approx(100 * v), place) for v in of_group]
        for place, of_group in enumerate(values.values())
    ]
    assert [text.get_text() for text in shown.get_yticklabels()] == [*values]
    assert shown.get_title() == "top-1, %, more is better"
    assert drawn[0].axes[1].get_title() == "NLL, less is better"
    names = [text.get_text() for text in gaps.get_yticklabels()]
    assert names == ["dense - moe", "ewa - moe"]
    means = [box.lines[0].get_xydata()[0].tolist() for box in gaps.containers]
    expected = [100 * each.differences["accuracy"].mean for each in compare(runs)]
    assert means == [[pytest.approx(mean), place] for place, mean in enumerate(expected)]


def test_methods_without_a_pair_are_left_out_of_the_picture(tmp_path):
    runs = [measured("dense", 0, 0.5), measured("dense", 1, 0.5), measured("ewa", 2, 0.5)]
    comparison.plot(runs, compare(runs), tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()


def test_less_ece_is_better():
    values = {"dense": (0.5, 0.55, 0.53), "ewa": (0.2, 0.26, 0.24)}
    runs = [measured(group, s, ece=v) for group in values for s, v in enumerate(values[group])]
    written = lines(runs)
    assert written[written.index("ECE, 15 bins") + 3].endswith("3 pairs), better")


def test_each_run_is_compared_with_the_first_of_its_method():
    runs = [measured("dense", s, 0.5, lr=lr) for s, lr in enumerate((0.1, 0.1, 0.2))]
    (told,) = comparison.differing_options({"dense": runs})
    assert "dense-0 and dense-2, both of dense" in told


def test_what_runs_of_one_method_may_differ_in_is_not_told(tmp_path):
    """Their folders and machines; what else differs is told."""
    images = image_folder(write_images(tmp_path / "data", {"validation": 1}, list("abcde")))
    name = "vit_tiny_patch16_224"
    of_a_run = ("experiment", "output", "workers", "device", "data_dir", "data", "log_interval")
    for seed in (0, 1):
        stated = {option: f"{option}{seed}" for option in of_a_run}
        stated |= dict(resume="" if seed else "a.pth", seed=seed, lr=0.1 + seed, img_size=32)
        save_as_train_py(tmp_path / f"vit-{seed}.pth.tar", make_model(name), name, **stated)
    runs = [replace(run, group="vit") for run in find_runs([str(tmp_path / "vit-*")])]
    found = comparison.measure_runs(runs, images, inference=_inference())
    (told,) = comparison.differing_options(comparison.by_group(found))
    assert told.endswith("differ not only in the seed but in lr.")
    assert all(each.options[comparison.LAST_EPOCH] == 2 for each in found)


def test_equal_differences_are_certain():
    assert Difference.of([0.25] * 3).p == 0
    assert Difference.of([0.25] * 3).verdict(1) == "better"
    assert Difference.of([0.0] * 3).verdict(1) == "no clear difference"


def test_a_single_pair_has_no_p_value():
    assert math.isnan(Difference.of([0.25]).p)
