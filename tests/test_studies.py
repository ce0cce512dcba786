"""Studies: runs by timm's real train.py, which resume and never repeat; intervals, and the page that follows."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("scipy")
from scipy.stats import ttest_rel

from studies import images, page, results
from studies.catalogue import STUDIES
from studies.latest_average import average
from studies.runs import Place, Run
from studies.scheduler import work_off
from studies.statistics import paired, standard_error
from studies.study import Arm, Images, Size, Study, Training
from timm_moe.callbacks.switch_ema import SwitchEma

SCRIPTS = os.environ.get("TIMM_SCRIPTS")
needs_scripts = pytest.mark.skipif(not SCRIPTS, reason="needs TIMM_SCRIPTS, a folder with timm's train.py")
HERE = Path(__file__).parents[1]


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


def small_study(*arms):
    options = ["--img-size", "8", "--epochs", "3", "--warmup-epochs", "0", "--opt", "adamw", "--lr", "1e-3", "-b", "8"]
    kwargs = ("img_size=8", "patch_size=4", "embed_dim=16", "depth=2", "num_heads=2")
    models = {"dense": "vit_tiny_patch16_224", "ewa": "vit_tiny_ewa_moe"}
    size = Size(Images(train=(0, 8)), models, kwargs, tuple(options), seeds=1)
    return Study("tiny", "Tiny", "Does it run?", arms, {"small": size}, "nothing")


def make_runs(study, folder, seeds=1):
    size, root = study.sizes["small"], folder / "runs"
    root.mkdir(exist_ok=True)
    classes = images.link(size.images, folder / "all", root / "images")
    place = Place(Path(SCRIPTS or "."), root / "images", root, classes)
    return [Run(study, size, training, seed, place) for seed in range(seeds) for training in study.trainings()]


DENSE = Training("dense", "dense")
EWA = Training("ewa", "ewa", ("share_rate=0.3",))


@pytest.mark.ci
@needs_scripts
def test_two_arms_from_images_to_the_page(folder):
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA))
    runs = make_runs(study, folder)
    kept = folder / "results" / "tiny-small.json"
    assert work_off(runs, 2, lambda: results.write(kept, runs)) == []
    stored = json.loads(kept.read_text())
    assert set(stored["arms"]) == {"dense", "EWA"}
    for name in stored["arms"]:
        assert 0 <= stored["arms"][name]["0"] <= 100
    section = page.section(study, "small", stored)
    assert f"| EWA | {stored['arms']['EWA']['0']:.2f} |" in section
    assert "one seed, which tells nothing" in section
    before = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()}
    assert work_off(make_runs(study, folder), 1, list) == []  # nothing is done twice
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.ci
@needs_scripts
def test_a_killed_run_goes_on_from_its_last_epoch(folder):
    study = small_study(Arm("dense", replace(DENSE, options=("--epochs", "40"))))
    (run,) = make_runs(study, folder)
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); sys.path.insert(0, {str(HERE / 'tests')!r})\n"
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
    assert work_off([run], 1, list) == ["dense, seed 0: another process works on it."]
    os.killpg(process.pid, signal.SIGKILL)
    while True:
        failed = work_off([run], 1, list)
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
    after = Training("after", "dense", start=wrong)
    study = small_study(Arm("dense", DENSE), Arm("wrong", wrong), Arm("after", after))
    runs = make_runs(study, folder)
    told = work_off(runs, 1, list)
    assert len(told) == 2
    assert "wrong, seed 0: train.py ended with 1: ValueError: share_rate must lie between 0 and" in told[0]
    assert told[1] == "after, seed 0: not begun, since what it starts from has failed."
    assert [run.training.name for run in runs if run.is_done()] == ["dense"]


@needs_scripts
def test_another_run_is_never_taken_for_this_one(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(json.dumps({**run.stated(), "options": ["--epochs", "1"]}))
    for name in ("trained", "dense"):
        (run.folder / f"{name}.json").write_text('{"top1": 99}')
    assert run.results() == {"cost": None, "arms": {}}
    (told,) = work_off([run], 1, list)
    assert "holds a run of other options: move it away" in told


def test_a_difference_is_the_paired_interval():
    first, second = {"0": 40.1, "1": 42.3, "2": 39.0}, {"0": 39.0, "1": 40.2, "2": 38.8, "3": 99.0}
    got = paired(first, second)
    test = ttest_rel(list(first.values()), [second[seed] for seed in first]).confidence_interval(0.95)
    assert (got.low, got.high) == pytest.approx((test.low, test.high))
    assert got.mean == pytest.approx((1.1 + 2.1 + 0.2) / 3)
    assert got.seeds == 3
    assert paired(first, {"9": 1.0}) is None
    assert paired({"0": 1.0}, {"0": 2.0}).verdict == "not told apart"  # a single pair tells nothing
    assert standard_error([1.0]) == float("inf")


def test_what_a_study_states_can_be_run(folder):
    for study in STUDIES.values():
        names = [arm.name for arm in study.arms]
        assert len(set(names)) == len(names)
        for size in study.sizes.values():
            place = Place(Path("scripts"), Path("images"), folder, 2)
            for training in study.trainings():
                assert training.model in size.models
                assert Run(study, size, training, 0, place).progress() == 0
    with pytest.raises(FileNotFoundError, match="No images"):
        images.link(Images(), folder / "nothing", folder / "linked")


def test_the_page_follows_from_the_results():
    assert (HERE / "docs" / "results.md").read_text() == page.text(HERE / "studies" / "results")


def test_the_latest_average_is_the_mean(tmp_path):
    for epoch in (1, 2, 10):
        torch.save(
            {"epoch": epoch, "state_dict": {"w": torch.tensor([float(epoch)])}},
            tmp_path / f"checkpoint-{epoch}.pth.tar",
        )
    assert average(tmp_path, 2)["state_dict"]["w"].item() == 6
    with pytest.raises(ValueError, match="holds 3 checkpoints of epochs, 4 are asked for"):
        average(tmp_path, 4)


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
    for wrong in (dict(decay=1.0, interval=1), dict(decay=0.5, interval=0)):
        with pytest.raises(ValueError, match="must"):
            SwitchEma(optimizer, **wrong)
