"""Studies: runs by timm's real train.py, which resume and never repeat; intervals, and the page that follows."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import timm
import torch
from common import ROOT
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

pytest.importorskip("scipy")
from scipy.stats import ttest_rel

from studies import callbacks, candidates, chart, cifar100, claims, corruptions, images, page, results
from studies.__main__ import main
from studies.catalogue import STUDIES
from studies.deploy import Export
from studies.latest_average import average
from studies.measure import Corruptions, Evaluation
from studies.runs import Place, Run
from studies.scheduler import _Clock, work_off
from studies.statistics import NOT_TOLD_APART, ONE_SEED, half_width, paired, standard_error
from studies.study import Arm, Images, Size, Study, Training, Use
from timm_moe import ExpertWeightAveraging, moe_layers
from timm_moe.analysis.data import image_folder
from timm_moe.rivals import SwitchEma

SCRIPTS = os.environ.get("TIMM_SCRIPTS")
needs_scripts = pytest.mark.skipif(not SCRIPTS, reason="needs TIMM_SCRIPTS, a folder with timm's train.py")


@pytest.fixture
def folder(tmp_path):
    """Two classes of a few images of 8 pixels."""
    for split, number in (("train", 12), ("test", 6)):
        for shade, name in enumerate(("dark", "light")):
            (tmp_path / "all" / split / name).mkdir(parents=True)
            for index in range(number):
                Image.new("RGB", (8, 8), (100 * shade + index,) * 3).save(
                    tmp_path / "all" / split / name / f"{index:02}.png"
                )
    return tmp_path


def small_study(*arms, **more):
    options = ["--img-size", "8", "--epochs", "3", "--warmup-epochs", "0", "--opt", "adamw", "--lr", "1e-3", "-b", "8"]
    kwargs = ("img_size=8", "patch_size=4", "embed_dim=16", "depth=2", "num_heads=2")
    models = {"dense": "vit_tiny_patch16_224", "ewa": "vit_tiny_ewa_moe"}
    size = Size("tiny", arms, {"images": Images(of=2, train=(0, 8))}, models, kwargs, tuple(options), range(1))
    return Study("tiny", "Tiny", "Does it run?", "nothing", {"small": size}, **more)


def make_runs(study, folder, seeds=1):
    size, root = study.sizes["small"], folder / "runs"
    root.mkdir(exist_ok=True)
    parts = {name: images.link(part, folder / "all", root / name) for name, part in size.images.items()}
    place = Place(Path(SCRIPTS or "."), root, parts)
    return [Run(study, size, training, seed, place) for seed in range(seeds) for training in size.trainings()]


DENSE = Training("dense", "dense")
EWA = Training("ewa", "ewa", ("share_rate=0.3",))


@pytest.mark.ci
@needs_scripts
def test_two_arms_from_images_to_the_page(folder):
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA))
    runs = make_runs(study, folder)
    kept = folder / "results" / "tiny-small.json"
    assert work_off(runs, 2, lambda run: results.write(kept, [run])) == []
    stored = json.loads(kept.read_text())
    assert set(stored["arms"]) == {"dense", "EWA"}
    for name in stored["arms"]:
        assert 0 <= stored["arms"][name]["figures"]["0"]["top1"] <= 100
    section = page.section(study, "small", stored)
    assert f"| EWA | {stored['arms']['EWA']['figures']['0']['top1']:.2f} |" in section
    assert "one seed, which tells nothing" in section
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}
    assert work_off(make_runs(study, folder), 1, id) == []  # nothing is done twice
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.ci
@needs_scripts
def test_a_run_that_evaluates_on_its_way_has_a_curve_and_corrupted_images(folder):
    evaluated = replace(DENSE, options=("--epochs", "4", "--val-split", "test", "--val-interval", "2"))
    study = small_study(Arm("dense", evaluated), Arm("EWA", EWA), measure=Corruptions())
    runs = make_runs(study, folder)
    assert work_off(runs, 1, id) == []
    curve = runs[0].results()["cost"]["curve"]
    assert [entry["epoch"] for entry in curve] == [1, 3]
    assert all(entry["train_loss"] > 0 and entry["eval_loss"] > 0 for entry in curve)
    assert runs[1].results()["cost"]["curve"] == []
    figures = runs[0].results()["arms"]["dense"]
    assert figures["top1"] == pytest.approx(curve[-1]["eval_top1"])
    of_each = [figures[f"top1, {name}"] for name in corruptions.CORRUPTIONS]
    assert figures["corrupted_top1"] == pytest.approx(sum(of_each) / len(of_each))


def test_corruptions_are_the_same_for_every_model_and_of_the_stated_strength(folder):
    clean = image_folder(folder / "all", "test").reader
    deviations = []
    for name, corruption in corruptions.CORRUPTIONS.items():
        reader = corruptions.CorruptedReader(clean, corruption)
        first, again = ([np.asarray(Image.open(reader[index][0])) for index in (0, 7)] for _ in range(2))
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        assert [reader[index][1] for index in (0, 7)] == [clean[index][1] for index in (0, 7)]
        if name.startswith("noise"):
            assert not np.array_equal(first[0] - first[0].mean(), first[1] - first[1].mean())  # each image has its own
            deviations.append(first[1].std())
    assert deviations[0] == pytest.approx(0.04 * 255, rel=0.3)
    assert deviations[1] == pytest.approx(0.08 * 255, rel=0.3)
    pixels = np.repeat(np.tile(np.arange(0, 192, 3, dtype=np.uint8), (8, 1))[..., None], 3, 2)
    ramp = Image.fromarray(pixels)
    for factor in (0.5, 0.25):
        assert np.std(corruptions.contrast(factor)(ramp)) == pytest.approx(np.std(ramp) * factor, rel=0.05)
    edge = Image.fromarray(200 * (pixels > 96).astype(np.uint8))
    mild, strong = (len(np.unique(corruptions.blur(deviation)(edge))) for deviation in (0.6, 1.0))
    assert 2 < mild < strong
    assert corruptions.jpeg(40)(ramp).size == ramp.size


@pytest.mark.ci
@needs_scripts
def test_a_killed_run_goes_on_from_its_last_epoch(folder):
    study = small_study(Arm("dense", replace(DENSE, options=("--epochs", "40"))))
    (run,) = make_runs(study, folder)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
    code += f"from test_studies import *; from pathlib import Path; folder = Path({str(folder)!r})\n"
    code += "study = small_study(Arm('dense', replace(DENSE, options=('--epochs', '40'))))\n"
    code += "make_runs(study, folder)[0].work()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 120
    while not (run.folder / "train" / "last.pth.tar").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not run.is_done()
    os.kill(process.pid, signal.SIGKILL)  # train.py outlives it, and holds the lock
    process.wait()
    assert work_off([run], 1, id) == ["dense, seed 0: another process works on it."]
    os.killpg(process.pid, signal.SIGKILL)
    while True:
        failed = work_off([run], 1, id)
        if failed != ["dense, seed 0: another process works on it."]:
            break
        time.sleep(0.1)
    assert failed == []
    assert "--resume" in (run.folder / "log.txt").read_text()
    assert run.progress() == 1
    assert not run.results()["cost"]["whole"]


@pytest.mark.ci
@needs_scripts
def test_an_arm_that_fails_is_told_and_the_others_go_on(folder, capfd):
    wrong = Training("wrong", "ewa", ("share_rate=2",))
    after = Training("after", "dense", uses=(Use("start", wrong),))
    study = small_study(Arm("dense", DENSE), Arm("wrong", wrong), Arm("after", after))
    runs = make_runs(study, folder)
    told = work_off(runs, 1, id)
    assert len(told) == 2
    assert "wrong, seed 0: train.py ended with 1: ValueError: share_rate must lie between 0 and" in told[0]
    assert told[1] == "after, seed 0: not begun, since what it needs is not done."
    assert [run.training.name for run in runs if run.is_done()] == ["dense"]


def test_what_others_need_comes_first_and_must_be_the_same(folder):
    teacher = Training("teacher", "ewa")
    student = Training("student", "dense", ("depth=2",), ("--epochs", "1", "--x", "{of}"), (Use("of", teacher),))
    study = small_study(Arm("student", student, beside=(DENSE,)))
    runs = {run.training.name: run for run in make_runs(study, folder)}
    assert list(runs) == ["dense", "teacher", "student"]
    command = runs["student"]._train_command({"of": Path("there.tar")})
    assert command[command.index("--x") + 1] == "there.tar"
    assert not runs["student"].can_start()
    for name in ("dense", "teacher"):
        runs[name].folder.mkdir(parents=True)
        (runs[name].folder / "stated.json").write_text(json.dumps(runs[name].stated()))
        (runs[name].folder / "trained.json").write_text("{}")
    assert runs["student"].can_start()
    (runs["teacher"].folder / "stated.json").write_text(json.dumps({**runs["teacher"].stated(), "draw": 1}))
    assert not runs["student"].can_start()
    other = replace(student, uses=(Use("of", replace(teacher, kwargs=("num_experts=2",))),))
    assert replace(runs["student"], training=other).stated() != runs["student"].stated()


def test_an_arm_that_is_deployed_otherwise_is_measured_again(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(json.dumps(run.stated()))
    (run.folder / "trained.json").write_text("{}")
    (run.folder / "dense.json").write_text(
        json.dumps({"stated": run.statement(run.arms()[0]), "figures": {"top1": 1.0}})
    )
    assert run.is_done()
    ema = small_study(Arm("dense", DENSE, Export(("--use-ema",))))
    assert not replace(run, study=ema, size=ema.sizes["small"]).is_done()
    evaluated = small_study(Arm("dense", DENSE), measure=Evaluation())
    assert not replace(run, study=evaluated, size=evaluated.sizes["small"]).is_done()


def test_results_that_were_made_otherwise_are_not_mixed(folder):
    runs = make_runs(small_study(Arm("dense", DENSE), Arm("EWA", EWA)), folder)
    kept = folder / "kept.json"
    results.write(kept, runs)
    stored = json.loads(kept.read_text())
    stored["arms"]["EWA"]["figures"]["7"] = {"top1": 2.0}  # of a seed that is not among the runs
    kept.write_text(json.dumps(stored))
    results.write(kept, runs)
    assert json.loads(kept.read_text()) == stored
    for other in (
        Arm("EWA", EWA, Export(("--method", "svd"))),
        Arm("EWA", replace(EWA, draw=1)),
        Arm("EWA", EWA, beside=(DENSE,)),
    ):
        with pytest.raises(FileExistsError, match="has results of EWA that were made otherwise: move it away"):
            results.write(kept, make_runs(small_study(Arm("dense", DENSE), other), folder))
    assert json.loads(kept.read_text()) == stored


def test_results_stay_whole_where_a_kill_comes_between(folder, monkeypatch):
    run, _ = make_runs(small_study(Arm("dense", DENSE), Arm("EWA", EWA)), folder)
    kept = folder / "kept.json"
    kept.write_text(before := json.dumps({"arms": {}, "cost": {}}))
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.write(kept, [run])
    assert kept.read_text() == before


@needs_scripts
def test_runs_on_other_images_are_others(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(json.dumps(run.stated()))
    (run.folder / "trained.json").write_text("{}")
    assert run.is_trained()
    (folder / "all" / "train" / "dark").rename(folder / "all" / "train" / "black")
    (folder / "all" / "test" / "dark").rename(folder / "all" / "test" / "black")
    with pytest.raises(FileExistsError, match="holds other images"):
        make_runs(small_study(Arm("dense", DENSE)), folder)
    (folder / "runs" / "images").rename(folder / "away")
    (again,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    assert not again.is_trained()


@needs_scripts
def test_a_training_that_was_interrupted_is_not_done(folder, monkeypatch):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    monkeypatch.setattr(Run, "_train_command", lambda self, used: [sys.executable, "-c", ""])  # ends well, as after ^C
    (told,) = work_off([run], 1, id)
    assert "train.py was interrupted after 0 of 3 epochs" in told
    assert not run.is_trained()


@needs_scripts
def test_an_epoch_that_was_not_saved_does_not_count(folder, monkeypatch):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    (run.folder / "train").mkdir(parents=True)
    (run.folder / "train" / "summary.csv").write_text("epoch,train_loss\n0,3\n1,2\n2,1\n")
    torch.save({"epoch": 1}, run.folder / "train" / "last.pth.tar")
    assert run.progress() == 1
    monkeypatch.setattr(Run, "_train_command", lambda self, used: [sys.executable, "-c", ""])
    (told,) = work_off([run], 1, id)
    assert "train.py was interrupted after 2 of 3 epochs" in told
    assert not run.is_trained()


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        ((Arm("a", DENSE), Arm("b", replace(DENSE, options=("--drop-path", "0.9")))), "Two trainings are called dense"),
        ((Arm("a", EWA, beside=(replace(EWA, draw=1),)),), "Two trainings are called ewa"),
        ((Arm("rate x4", DENSE), Arm("rate X4", DENSE)), "rate X4 needs another name: rate-x4 is taken"),
        ((Arm("Train", DENSE),), "Train needs another name: train is taken"),
        ((Arm("uses start", DENSE),), "uses start needs another name: uses-start is taken"),
        ((Arm("a", DENSE), Arm("a", EWA)), "a needs another name: a is taken"),
    ],
)
def test_names_that_make_one_of_two_are_refused(arms, told):
    with pytest.raises(ValueError, match=told):
        small_study(*arms)


def test_a_training_with_an_average_hands_on_its_own_weights():
    """Of a checkpoint that has both, timm's --initial-checkpoint takes the average."""
    sizes = [size for study in STUDIES.values() for size in study.sizes.values()]
    uses = [(size, use) for size in sizes for training in size.trainings() for use in training.uses]
    assert uses
    for size, use in uses:
        options = (*size.options, *use.training.options)
        assert isinstance(use.deployment, Export) or "--model-ema" not in options, use.training.name


def test_figures_of_elsewhere_are_counted_and_kept_if_asked(folder, monkeypatch):
    runs = make_runs(small_study(Arm("dense", DENSE), Arm("EWA", EWA)), folder)
    kept = folder / "kept.json"
    results.write(kept, runs)
    stored = json.loads(kept.read_text())
    stored["arms"]["EWA"]["figures"]["0"], stored["cost"]["ewa"] = {"top1": 2.0}, {"0": "of elsewhere"}
    kept.write_text(json.dumps(stored))
    assert results.from_elsewhere(kept, runs) == 1
    monkeypatch.setattr(
        Run, "results", lambda run: {"cost": "here", "arms": {arm.name: {"top1": 1.0} for arm in run.arms()}}
    )
    assert results.from_elsewhere(kept, runs) == 0
    results.write(kept, runs, keep=True)
    read = results.read(kept)
    assert read["arms"]["EWA"]["figures"]["0"] == {"top1": 2.0}
    assert read["arms"]["dense"]["figures"]["0"] == {"top1": 1.0}
    assert read["cost"] == {"dense": {"0": "here"}, "ewa": {"0": "of elsewhere"}}
    results.write(kept, runs)
    read = results.read(kept)
    assert read["arms"]["EWA"]["figures"]["0"] == {"top1": 1.0}
    assert read["cost"]["ewa"] == {"0": "here"}


def refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["studies", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err


def test_what_is_wrong_is_told_before_the_first_run(folder, monkeypatch, capsys):
    (folder / "studies" / "results").mkdir(parents=True)
    monkeypatch.setattr("studies.__main__.HERE", folder / "studies")
    (folder / "scripts").mkdir()
    for name in ("train.py", "validate.py"):
        told = refused(["scratch", "--data-dir", folder / "all", "--scripts", folder / "scripts"], monkeypatch, capsys)
        assert "give the folder that holds timm's train.py and validate.py" in told
        (folder / "scripts" / name).write_text("")
    options = ["--data-dir", folder / "all", "--scripts", folder / "scripts", "--output", folder / "runs"]
    told = refused(["scratch", "search", *options], monkeypatch, capsys)
    assert "scratch: The study is about 100 classes of images" in told
    (folder / "studies" / "results" / "scratch-small.json").write_text('{"arms": {"den')
    assert "scratch-small.json is damaged, it is not JSON" in refused(["--report"], monkeypatch, capsys)


def test_two_processes_that_link_the_same_images_get_all_of_them(folder, monkeypatch):
    part, target = Images(of=2), folder / "linked"
    rename = Path.rename

    def another_is_faster(unfinished, to):
        monkeypatch.setattr(Path, "rename", rename)
        assert images.link(part, folder / "all", target).classes == 2
        return rename(unfinished, to)

    monkeypatch.setattr(Path, "rename", another_is_faster)
    assert images.link(part, folder / "all", target).classes == 2
    assert len(list(target.glob("*/*/*"))) == 36
    assert [path.name for path in folder.iterdir() if path.name.startswith("linked")] == ["linked"]


def test_the_page_says_what_the_intervals_allow():
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA), pairs=(("EWA", "dense"),), measure=Evaluation())
    nll = {"dense": (2.0, 2.1, 2.2), "EWA": (1.8, 1.9, 2.01)}
    top1 = {"dense": (40.0, 41.0, 42.0), "EWA": (41.0, 40.0, 42.5)}
    arms = {
        arm: {"figures": {str(seed): {"nll": nll[arm][seed], "top1": top1[arm][seed]} for seed in range(3)}}
        for arm in ("dense", "EWA")
    }
    versions = {"device": "a chip", "torch": "2"}
    cost = {"dense": (1000.0, 200.0, True), "ewa": (3000.0, 100.0, False)}
    costs = {
        name: {"0": {"seconds": seconds, "peak_mib": mib, "whole": whole, "versions": versions}}
        for name, (seconds, mib, whole) in cost.items()
    }
    section = page.section(study, "small", {"arms": arms, "cost": costs})
    assert "- top-1 % beside *dense*: not told apart: *EWA*." in section
    assert "- top-1 %: *EWA* beside *dense*: not told apart, +0.17 (-2.42 to +2.75)." in section
    assert "- NLL beside *dense*: better: *EWA*." in section
    assert "- NLL: *EWA* beside *dense*: better, -0.1967 (-0.2110 to -0.1823)." in section
    assert "ECE" not in section
    assert "| 3 |  | 1.00 | 1.00 |" in section  # dense; the one of EWA had a break
    assert "a chip; torch 2." in section
    assert (
        "Of 2 trainings 1 went on after a break. All took 1.1 hours, without what they had done before it." in section
    )
    other = replace(study, name="other")  # of the same setting: the same trainings
    known = [(which, "small", {"arms": arms, "cost": costs}) for which in (study, other)]
    assert len(page._costs_of_all(known)) == 2
    row = "| EWA | `--model vit_tiny_ewa_moe --model-kwargs share_rate=0.3` | `timm-moe export` |"
    recipe = page.recipe(study, "small", {"arms": arms, "cost": costs})
    assert row in recipe
    assert "Seeds 0, 1, 2. Of every" in recipe
    assert "EWA" not in page.recipe(study, "small", {"arms": {"dense": arms["dense"]}, "cost": costs})
    assert "In the median, an interval of top-1 % reaches 2.59 to either side." in section


def test_the_cost_of_an_arm_is_that_of_all_it_takes_on_one_machine():
    student = Training("student", "dense", uses=(Use("of", DENSE),))
    arm = Arm("student", student, beside=(EWA,))

    def cost(seconds, device="here", whole=True):
        return {"seconds": seconds, "peak_mib": seconds, "whole": whole, "versions": {"device": device}}

    costs = {
        "dense": {"0": cost(1.0), "1": cost(2.0), "2": cost(3.0, "there"), "3": cost(4.0)},
        "ewa": {"0": cost(10.0), "1": cost(20.0, "there"), "2": cost(30.0, "there"), "3": cost(40.0, whole=False)},
        "student": {"0": cost(100.0), "1": cost(200.0), "2": cost(300.0, "there"), "3": cost(4.0)},
    }
    known = page._cost({"cost": costs}, arm)
    assert known == {
        "0": {"seconds": 111.0, "peak_mib": 100.0, "device": "here"},
        "2": {"seconds": 333.0, "peak_mib": 300.0, "device": "there"},
    }
    base = {"0": {"seconds": 10.0, "device": "here"}, "2": {"seconds": 1.0, "device": "elsewhere"}}
    assert page._ratio(known, base, "seconds") == "11.10"
    assert page._ratio(known, {}, "seconds") == ""


def test_what_another_machine_has_done_can_be_left_out(folder):
    student = Training("student", "dense", uses=(Use("of", DENSE),))
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA), Arm("student", student))
    runs = make_runs(study, folder, seeds=2)
    kept = folder / "kept.json"
    assert results.missing(kept, runs) == runs
    known = {"dense": "01", "EWA": "0", "student": "0"}
    figures = {arm: {"figures": {seed: {"top1": 1.0} for seed in seeds}} for arm, seeds in known.items()}
    kept.write_text(json.dumps({"arms": figures, "cost": {}}))
    left = [run.name for run in results.missing(kept, runs)]
    assert left == ["dense, seed 1", "ewa, seed 1", "student, seed 1"]  # the student begins from the dense one


@needs_scripts
def test_another_run_is_never_taken_for_this_one(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(json.dumps({**run.stated(), "options": ["--epochs", "1"]}))
    for name in ("trained", "dense"):
        (run.folder / f"{name}.json").write_text('{"top1": 99}')
    assert run.results() == {"cost": None, "arms": {}}
    (told,) = work_off([run], 1, id)
    assert "holds a run of other options: move it away" in told


def test_a_difference_is_the_paired_interval():
    first, second = {"0": 40.1, "1": 42.3, "2": 39.0}, {"0": 39.0, "1": 40.2, "2": 38.8, "3": 99.0}
    got = paired(first, second)
    test = ttest_rel(list(first.values()), [second[seed] for seed in first]).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((test.low, test.high))
    assert got.mean == pytest.approx((1.1 + 2.1 + 0.2) / 3)
    assert got.seeds == 3
    assert paired(first, {"9": 1.0}) is None
    assert paired({"0": 1.0}, {"0": 2.0}).verdict(1) == ONE_SEED
    assert paired(first, {"0": 40.0, "1": 42.4, "2": 39.0}).verdict(1) == NOT_TOLD_APART
    assert standard_error([1.0]) == float("inf")


def test_what_a_study_states_can_be_run(folder):
    for study in STUDIES.values():
        arms = [{arm.name for arm in size.arms} for size in study.sizes.values()]
        assert all(any(set(pair) <= of_size for of_size in arms) for pair in study.pairs)
        for size in study.sizes.values():
            names = [arm.name for arm in size.arms]
            assert len(set(names)) == len(names)
            place = Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(2, "")))
            for training in size.trainings():
                run = Run(study, size, training, 0, place)
                assert run.progress() == 0
                assert training.callback.partition("=")[0] in ("", *callbacks.CALLBACKS)
                assert run.stated()
                used = {use.name: Path("used") for use in training.uses}
                assert "{" not in " ".join(run._train_command(used))


@pytest.mark.parametrize("size", STUDIES["students"].sizes.values(), ids=STUDIES["students"].sizes)
def test_a_teacher_sees_the_images_that_its_student_sees(size):
    """timm turns them from the mean and deviation of the student's config to those of the teacher's."""
    taught = [training for training in size.trainings() if "--kd-model-name" in training.options]
    assert taught
    for training in taught:
        student = timm.get_pretrained_cfg(size.models[training.model])
        (teacher,) = [use.deployment for use in training.uses if use.name == "teacher"]
        for option, values in {"--mean": student.mean, "--std": student.std}.items():
            begin = teacher.options.index(option) + 1
            assert teacher.options[begin : begin + 3] == tuple(map(str, values))


@pytest.mark.ci
@needs_scripts
def test_train_py_takes_the_options_and_timm_makes_the_models(folder):
    parser = load_script("train.py").parser
    made = set()
    for study in STUDIES.values():
        for size in study.sizes.values():
            place = Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(20, "")))
            for training in size.trainings():
                command = Run(study, size, training, 0, place)._train_command(
                    {use.name: Path() for use in training.uses}
                )
                args = parser.parse_args(command[command.index("scripts/train.py") + 1 :])
                key = (args.model, str(args.model_kwargs))
                if key not in made:
                    made.add(key)
                    with torch.device("meta"):
                        timm.create_model(args.model, num_classes=20, **args.model_kwargs)


def load_script(name):
    spec = importlib.util.spec_from_file_location("script_of_timm", Path(SCRIPTS) / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trainings_of_one_name_in_one_setting_are_the_same(folder):
    stated = {}
    for study in STUDIES.values():
        for size in study.sizes.values():
            for training in size.trainings():
                run = Run(
                    study,
                    size,
                    training,
                    0,
                    Place(Path("scripts"), folder, dict.fromkeys(size.images, images.Part(2, ""))),
                )
                assert stated.setdefault((size.setting, training.name), run.stated()) == run.stated(), training.name


def test_images_are_those_that_are_asked_for(folder):
    part, linked = Images(of=2, classes=(1, None), train=(0, 3), held_out=(3, 5)), folder / "linked"
    first = images.link(part, folder / "all", linked)
    assert first.classes == 1
    files = {str(path.relative_to(linked)): path.resolve() for path in linked.glob("*/*/*")}
    of_class = folder / "all" / "train" / "light"
    assert files == {
        **{f"train/light/0{number}.png": of_class / f"0{number}.png" for number in range(3)},
        **{f"test/light/0{number}.png": of_class / f"0{number}.png" for number in range(3, 5)},
    }
    assert images.link(part, folder / "all", linked) == first
    with pytest.raises(FileExistsError, match="holds other images than the study's of"):
        images.link(Images(of=2), folder / "all", linked)
    with pytest.raises(FileNotFoundError, match="The study is about 100 classes of images"):
        images.link(Images(), folder / "all", folder / "more")
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        images.link(Images(), folder / "nothing", folder / "more")


def test_the_divided_learning_rate_is_that_of_the_networks_that_ewa_converts():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=24, num_heads=2)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    callbacks._divide(optimizer, model, "every-2", 4)
    scale = {
        id(parameter): group.get("lr_scale", 1) for group in optimizer.param_groups for parameter in group["params"]
    }
    for group in optimizer.param_groups:
        assert all(group["weight_decay"] == decay[id(parameter)] for parameter in group["params"])
    for name, parameter in model.named_parameters():
        assert scale[id(parameter)] == (0.25 if name.startswith(("blocks.1.mlp.", "blocks.3.mlp.")) else 1), name
    with pytest.raises(ValueError, match="does not train all parameters"):
        callbacks._divide(torch.optim.SGD(model.head.parameters(), lr=1e-3), model, "every-2", 4)


def test_the_divided_weights_are_those_of_the_networks_that_ewa_converts():
    model = timm.create_model("vit_tiny_patch16_224", depth=4, embed_dim=24, num_heads=2)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    callbacks._divide_weights(model, "every-2", 2)
    for name, parameter in model.named_parameters():
        divisor = 2 if name.startswith(("blocks.1.mlp.", "blocks.3.mlp.")) else 1
        assert torch.equal(parameter * divisor, before[name]), name
        assert parameter.requires_grad


def _without_images(stated):
    """What is stated, but for the images and device that a run was made with."""
    if isinstance(stated, dict):
        return {name: _without_images(part) for name, part in stated.items() if name not in ("images", "device")}
    return [_without_images(part) for part in stated] if isinstance(stated, (list, tuple)) else stated


def test_the_page_follows_from_the_results():
    for study, size, stored in page.stored(ROOT / "studies" / "results"):
        assert set(stored["arms"]) <= {arm.name for arm in study.sizes[size].arms}  # else the page would leave it out
        place = Place(Path("scripts"), Path("runs"), dict.fromkeys(study.sizes[size].images, images.Part(0, "")))
        for training in study.sizes[size].trainings():
            for arm in (run := Run(study, study.sizes[size], training, 0, place)).arms():
                kept = stored["arms"].get(arm.name, {}).get("stated")
                assert kept is None or _without_images(kept) == _without_images(run.statement(arm)), arm.name
    assert (ROOT / "docs" / "results.md").read_text() == page.text(ROOT / "studies" / "results")


#: What is said elsewhere of the results.
SAID = {
    "README.md": (
        "it is {scratch: EWA, linear < dense} points below dense training",
        "EWA is {confirmation: linear > dense} points better (interval {confirmation: interval of linear > dense})",
        "Experts in every block lose {vimoe: no shared expert, in every block < dense, trained on} points without",
        "are {students: average, trained on; topk, trained on > random, trained on} points better than those with new",
        "is {students: the student's network, trained as long as the teacher > average, distilled; sum, distilled; "
        "topk, distilled; svd, distilled; random, distilled} points better than the distilled students",
        "NLL is {ensembles: NLL: V-MoE, K 1 < ViT} worse than that of a dense ViT, accuracy is "
        "{ensembles: V-MoE, K 1 = ViT}",
        "with one they are {vimoe: shared expert, in every block = dense, trained on} from dense training",
        "but {confirmation: linear = dense, dropout 0.1; dense, initial weights / 2 in the converted networks; dense, "
        "learning rate / 4 in the converted networks} from dense training with dropout, with smaller initial weights "
        "or with a smaller learning rate in those networks",
        "With a constant rate the two are {scratch: EWA, constant = dense}",
        "{routing: naive MoE; MoE, Early EWA = dense} from dense training, with averages or without",
        "A dense ViT is {ensembles: top-1 %; NLL; ECE: pBE, M 2, K 1 = ViT} from it",
    ),
    "docs/ewa.md": (
        "it was {confirmation: dense, initial weights / 2, dropout 0.1 > dense} points better than plain dense "
        "training. EWA was {confirmation: linear > dense} points better; those two are "
        "{confirmation: linear = dense, initial weights / 2, dropout 0.1}",
    ),
}


def test_what_is_said_of_the_results_is_borne_out():
    whole = page.text(folder := ROOT / "studies" / "results")
    assert claims.NOT_BORNE_OUT not in whole
    prose = re.sub(r"```.*?```|`[^`]*`", "", whole, flags=re.DOTALL)
    assert "{" not in prose  # what is no claim is left as it was
    for name, sentences in SAID.items():
        said = " ".join((ROOT / name).read_text().split())
        for sentence in sentences:
            assert page.summary(sentence, folder) in said, name


def test_what_is_claimed_of_two_arms_stands_on_the_page():
    for study in STUDIES.values():
        for size, reading in study.readings.items():
            baseline = study.sizes[size].arms[0].name
            shown = {frozenset(pair) for pair in study.pairs}
            shown |= {frozenset((arm.name, baseline)) for arm in study.sizes[size].arms}
            found = list(claims.CLAIM.finditer(reading))
            assert found, study.name
            assert {frozenset(pair) for claim in found for pair in claims.pairs(claim)} <= shown, study.name


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("{EWA > dense} points", "1.00 points"),
        ("{EWA; late > dense}", "0.50 to 1.00"),
        ("{dense < EWA}", "1.00"),
        ("{interval of EWA > dense}", "0.50 to 1.50"),
        ("{interval of dense < EWA}", "0.50 to 1.50"),
        ("{EWA - dense}, {dense - EWA}", "+1.00, -1.00"),
        ("{again = dense} from it", "not told apart from it"),
        ("{interval of again = dense}", "-2.48 to +2.48"),
        ("{NLL: EWA < dense}", "0.1000"),
        ("{top-1 %; NLL: again = dense}", "not told apart"),
        ("{EWA < dense}", "**[not borne out: *EWA* beside *dense* in top-1 %: better]**"),
        ("{NLL: EWA > dense}", "**[not borne out: *EWA* beside *dense* in NLL: worse]**"),
        ("{EWA; again > dense}", "**[not borne out: *again* beside *dense* in top-1 %: not told apart]**"),
        ("{EWA = dense}", "**[not borne out: *EWA* beside *dense* in top-1 %: better]**"),
        ("{once = dense}", "**[not borne out: *once* beside *dense* in top-1 %: one seed, which tells nothing]**"),
        ("{once - dense}", "+3.00"),
        (
            "{interval of once - dense}",
            "**[not borne out: *once* beside *dense* in top-1 %: one seed, which tells nothing]**",
        ),
        ("{interval of EWA - dense}", "+0.50 to +1.50"),
        (
            "{top-1 %; NLL: EWA - dense}",
            "**[not borne out: top-1 %; NLL: EWA - dense: a number is of one figure]**",
        ),
        (
            "{top1: EWA > dense}",
            "**[not borne out: top1: EWA > dense: the figures are top-1 %, NLL, ECE, KL of the members]**",
        ),
        ("{ewa > dense}", "**[not borne out: *ewa* beside *dense* in top-1 %: not measured]**"),
        ("`{start}/model`, {a}", "`{start}/model`, {a}"),
    ],
)
def test_a_claim_is_what_the_intervals_say(text, filled):
    beside_dense = {
        "dense": [(0.0, 0.0)] * 3,
        "EWA": [(0.8, 0.09), (1.0, 0.10), (1.2, 0.11)],
        "late": [(0.4, 0.0), (0.5, 0.0), (0.6, 0.0)],
        "again": [(-1.0, -0.1), (1.0, 0.1), (0.0, 0.0)],
        "once": [(3.0, 0.0)],
    }
    stored = {
        name: {seed: {"top1": 20.0 + seed + top1, "nll": 3.0 - seed + nll} for seed, (top1, nll) in enumerate(figures)}
        for name, figures in beside_dense.items()
    }
    results = {"arms": {name: {"figures": figures} for name, figures in stored.items()}}
    study = small_study(Arm("dense", DENSE), measure=Evaluation())
    assert claims.fill(text, study, results) == filled


@pytest.mark.parametrize(("seeds", "label"), [(1, "top-1 % beside dense, one seed"), (3, "95 % interval")])
def test_each_study_with_a_difference_has_a_chart(folder, monkeypatch, seeds, label):
    from matplotlib import axes

    labels, bars = [], []
    monkeypatch.setattr(axes.Axes, "set_xlabel", lambda _, text: labels.append(text))
    errorbar = axes.Axes.errorbar
    monkeypatch.setattr(axes.Axes, "errorbar", lambda *a, **k: bars.append(k["xerr"]) or errorbar(*a, **k))
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA), Arm("not measured", EWA))
    figures = {
        name: {seed: {"top1": seed * factor} for seed in range(seeds)} for name, factor in (("dense", 1), ("EWA", 2))
    }
    results = {"arms": {name: {"figures": by_seed} for name, by_seed in figures.items()}}
    chart.draw(study, "small", {"arms": {"dense": results["arms"]["dense"]}}, folder)
    assert not list(folder.glob("*.png"))
    chart.draw(study, "small", results, folder)
    assert Image.open(folder / "study-tiny-small.png").size[0] > 300
    assert labels[0].endswith(label)
    assert bars == [[pytest.approx(half_width(range(seeds)) if seeds > 1 else float("nan"), nan_ok=True)]]


@pytest.mark.parametrize(("claim", "told"), [("linear > dense", 0), ("linear < dense", 1)])
def test_a_claim_that_is_not_borne_out_is_told(claim, told, folder, monkeypatch, capsys):
    monkeypatch.setattr(page, "PAGE", folder / "results.md")
    monkeypatch.setattr(page, "TEMPLATE", folder / "template.md")
    page.TEMPLATE.write_text(f"{{confirmation: {claim}}} points")
    monkeypatch.setattr(page, "draw", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["studies", "--report"])
    main()
    assert (f"that the results do not bear out: {told}. " in capsys.readouterr().err) == bool(told)
    assert (claims.NOT_BORNE_OUT in page.PAGE.read_text()) == bool(told)


def test_the_intervals_of_the_page_are_those_of_the_results():
    """Computed anew, by other code, from the files."""
    text = (ROOT / "docs" / "results.md").read_text()
    compared = 0
    for study, size, stored in page.stored(ROOT / "studies" / "results"):
        (section,) = re.findall(rf"^## {re.escape(study.title)}$.*?(?=^## )", text, re.DOTALL | re.MULTILINE)
        rows = dict(re.findall(r"^\| ([^|]+) \| (.*)$", section, re.MULTILINE))
        baseline = stored["arms"][study.sizes[size].arms[0].name]["figures"]
        for name, arm in stored["arms"].items():
            for figure in study.measure.figures:
                both = [seed for seed in arm["figures"] if figure.key in arm["figures"][seed] and seed in baseline]
                if len(both) < 2 or arm["figures"] is baseline or any(figure.key not in baseline[s] for s in both):
                    continue
                mine, other = ([of[seed][figure.key] for seed in both] for of in (arm["figures"], baseline))
                test = ttest_rel(mine, other).confidence_interval(0.95)
                cells = (np.mean(mine) - np.mean(other), test.low, test.high)
                middle, low, high = (f"{value:+.{figure.decimals}f}" for value in cells)
                assert f"{middle} ({low} to {high})" in rows[name], (study.name, name)
                compared += 1
    assert compared > 70


@needs_scripts
def test_what_runs_ends_with_the_command(folder, monkeypatch):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(Run, "_train_command", lambda self, used: sleep)
    started = time.monotonic()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as the command has it
    threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            work_off([run], 1, id)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert time.monotonic() - started < 30
    assert not run.is_trained()


@needs_scripts
def test_figures_that_are_no_numbers_are_refused(folder, monkeypatch):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(json.dumps(run.stated()))
    (run.folder / "trained.json").write_text("{}")
    monkeypatch.setattr(Run, "_call", lambda *_: {})
    for value in (None, float("nan")):
        monkeypatch.setattr(type(run.study.measure), "read", lambda *_, value=value: {"top1": value})
        assert work_off([run], 1, id) == ["dense, seed 0: dense has no top1: its outputs are not numbers."]
    assert not run.is_done()


def test_the_latest_average_is_the_mean(tmp_path):
    for epoch in (1, 2, 10):
        torch.save(
            {"epoch": epoch, "state_dict": {"w": torch.tensor([float(epoch)])}},
            tmp_path / f"checkpoint-{epoch}.pth.tar",
        )
    assert average(tmp_path, 2)["state_dict"]["w"].item() == 6
    with pytest.raises(ValueError, match="holds 3 checkpoints of epochs, 4 are asked for"):
        average(tmp_path, 4)


def test_candidates_average_as_they_say():
    model = timm.create_model("vit_tiny_ewa_moe", depth=4, embed_dim=24, num_heads=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    candidates.follow("last", model)
    candidates.rate_by_depth(model)
    averaging = ExpertWeightAveraging(model, optimizer, total_updates=20)
    experts = [layer.fc1.weight for layer in moe_layers(model).values()]
    for step in range(1, 21):
        before = [stacked.detach().clone() for stacked in experts]
        optimizer.step()
        for stacked, old, rate in zip(experts, before, (0.15, 0.3), strict=True):
            beta = rate if step > 18 else 0.0
            expected = torch.lerp(old, old.mean(0, keepdim=True), beta * 4 / 3)
            torch.testing.assert_close(stacked.detach(), expected)
    averaging.remove()
    assert candidates.annealed(1.0, 0.3) == pytest.approx(0.3)
    assert candidates.annealed(0.0, 0.3) == 0
    averaged = [step for step in range(1, 101) if candidates.cyclic(step / 100, 0.3)]
    assert len(averaged) in range(1, 12)
    assert averaged[-1] == 100


def test_the_rest_is_told_by_epochs_and_images(folder, capfd, monkeypatch):
    long = replace(DENSE, name="long", options=("--epochs", "6"))
    runs = make_runs(small_study(Arm("dense", DENSE), Arm("long", long)), folder)
    short, longer = (run.images_to_see() for run in runs)
    assert longer == 2 * short == 96
    now = iter([0.0, 60.0])
    monkeypatch.setattr("studies.scheduler.time.monotonic", lambda: next(now))
    clock = _Clock(runs, len(runs))
    clock.see(runs[0], is_done=True)
    clock.tell([])
    assert "1 of 2 runs done, about 2 min left" in capfd.readouterr().err


def test_studies_share_trainings_and_the_machine(folder, monkeypatch):
    dense, ewa = Arm("dense", DENSE), Arm("EWA", EWA)
    runs = [run for arms in ((dense,), (dense, ewa)) for run in make_runs(small_study(*arms), folder)]
    working, at_once = set(), []

    def work(run):
        assert run.folder not in working, "two runs in one folder"
        working.add(run.folder)
        at_once.append(len(working))
        time.sleep(0.05)
        run.folder.mkdir(parents=True, exist_ok=True)
        (run.folder / "stated.json").write_text(json.dumps(run.stated()))
        (run.folder / "trained.json").write_text("{}")
        for arm in run.arms():
            figures = {"stated": run.statement(arm), "figures": {"top1": 1.0}}
            (run.folder / f"{arm.name.lower()}.json").write_text(json.dumps(figures))
        working.remove(run.folder)

    monkeypatch.setattr(Run, "work", work)
    kept = []
    assert work_off(runs, 2, kept.append) == []
    assert set(kept) == set(runs)
    assert max(at_once) == 2
    assert sum(_Clock(runs, 0)._images.values()) == 2 * runs[0].images_to_see()  # a training of two studies counts once


@given(images=st.integers(1, 13), rows=st.integers(1, 6), experts=st.integers(1, 5))
def test_whole_images_are_partitioned(images, rows, experts):
    routing = candidates.ImagePartition(experts)(torch.zeros(images, rows, 3))
    assert torch.equal(routing.token_indices[routing.slots.squeeze(1)], torch.arange(images * rows))
    expert_BN = routing.experts().view(images, rows)
    assert (expert_BN == expert_BN[:, :1]).all()
    parts = expert_BN[:, 0].bincount(minlength=experts)
    assert parts.max() - parts.min() <= 1


def test_each_image_is_one_experts():
    model = timm.create_model("vit_tiny_ewa_moe", depth=2, embed_dim=24, num_heads=2, num_experts=3).train()
    candidates.whole_images(model)
    (layer,) = moe_layers(model).values()
    for _, stacked in layer.named_expert_parameters():
        torch.nn.init.normal_(stacked)
    x = torch.randn(6, 4, 24)
    outputs_E = torch.stack([expert(x) for expert in layer.each()])
    alike_EB = (outputs_E - layer(x)).abs().amax((2, 3)) < 1e-4
    assert (alike_EB.sum(0) == 1).all()
    assert (alike_EB.sum(1) == 2).all()


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_numbers_below_one_are_refused(option, monkeypatch, capsys):
    told = refused([option, "-1"], monkeypatch, capsys)
    assert f"argument {option}: -1 is not a whole number of at least 1" in told


def test_cifar_is_written_as_folders(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    names = ["apple_s_000001.png", "golden_delicious_s_2.png", "whale_s_3.png"]
    cifar100.write({"data": data, "fine_labels": [0, 0, 1], "filenames": names}, ["apple", "whale"], tmp_path / "train")
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    assert written == [
        "train/apple/apple_s_000001.png",
        "train/apple/golden_delicious_s_2.png",
        "train/whale/whale_s_3.png",
    ]
    image = np.asarray(Image.open(tmp_path / written[1]))
    assert image[5, 7].tolist() == [data[1][1024 * channel + 32 * 5 + 7] for channel in range(3)]


def test_a_download_that_fails_is_told_in_a_sentence(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(cifar100.CIFAR100, "download", unreachable)
    monkeypatch.setattr(sys, "argv", ["cifar100", str(tmp_path / "images")])
    with pytest.raises(SystemExit, match=r"cannot be downloaded from .*no network"):
        cifar100.main()
    assert not (tmp_path / "images" / "train").exists()


def test_switch_ema_is_its_definition():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    switch = SwitchEma(optimizer, decay=0.75, interval=2)
    average, expected = 1.0, 1.0
    for step in range(4):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        expected -= 1.0
        average = 0.75 * average + 0.25 * expected
        if step % 2:
            expected = average
        assert weight.item() == pytest.approx(expected)
    switch.remove()
    optimizer.step()
    assert weight.item() == pytest.approx(expected - 1)
    lookahead = timm.optim.create_optimizer_v2([weight], opt="lookahead_sgd", lr=0.0)
    followed = SwitchEma(lookahead, decay=0.5, interval=1)
    lookahead.step()
    assert followed.steps == 1
    followed.remove()
    narrow = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([narrow], lr=0.0)
    switch = SwitchEma(optimizer, decay=0.999, interval=10_000)
    narrow.data.fill_(1.25)
    for _ in range(2000):
        optimizer.step()
    assert switch._averages[narrow].item() == pytest.approx(1.25 - 0.25 * 0.999**2000, rel=1e-3)
    with pytest.raises(TypeError, match="so its steps cannot be followed"):
        SwitchEma(object(), decay=0.5, interval=1)
    for wrong in (dict(decay=1.0, interval=1), dict(decay=0.5, interval=0)):
        with pytest.raises(ValueError, match="must"):
            SwitchEma(optimizer, **wrong)
