"""Runs of studies by timm's real train.py: they resume, never repeat, and report what fails."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common import ROOT
from safetensors.torch import load_file
from tiny_study import DENSE, EWA, make_runs, small_study
from train_script import needs_scripts

from studies import corruptions, page, results
from studies.deploy import Export, ExportOfCandidate, Soup
from studies.measure import Corruptions, Evaluation
from studies.outcome import Outcome
from studies.runs import Run, write_json
from studies.scheduler import _Clock, work_off
from studies.study import Arm, Training, Use


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
    section = page.section(Outcome(study, "small", stored))
    assert f"| EWA | {stored['arms']['EWA']['figures']['0']['top1']:.2f} |" in section
    assert "difference from dense, one seed" in section
    before = {
        path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*") if path.is_file()
    }
    assert work_off(make_runs(study, folder), 1, id) == []  # nothing is done twice
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.ci
@needs_scripts
def test_a_run_that_evaluates_on_its_way_has_a_curve_and_corrupted_images(folder):
    evaluated = replace(
        DENSE, options=("--epochs", "4", "--val-split", "test", "--val-interval", "2")
    )
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


@pytest.mark.ci
@needs_scripts
def test_routers_of_the_studies_and_soups_are_trained_and_exported(folder):
    of_images = Training(
        "ewa-images",
        "ewa",
        ("share_rate=0.1", "router=image_partition"),
        callback="candidate_routers every_ten drop_path_by_expert plain_attention hold_rate=0.5",
    )
    again = Training("dense-1", "dense", draw=1)
    study = small_study(
        Arm("dense", DENSE),
        Arm("soup", DENSE, Soup((again,))),
        Arm("EWA of images", of_images, ExportOfCandidate()),
        measure=Evaluation(),
    )
    assert work_off(make_runs(study, folder), 2, id) == []
    root = folder / "runs"
    trained = [
        torch.load(root / name / "0" / "train" / "last.pth.tar", weights_only=False)["state_dict"]
        for name in ("dense", "dense-1")
    ]
    soup = load_file(root / "dense" / "0" / "soup" / "model.safetensors")
    for name, weight in soup.items():
        torch.testing.assert_close(weight, (trained[0][name] + trained[1][name]) / 2)
    args = (root / "ewa-images" / "0" / "train" / "args.yaml").read_text()
    assert "router: image_partition" in args
    assert (root / "ewa-images" / "0" / "ewa-of-images" / "model.safetensors").exists()


@pytest.mark.ci
@needs_scripts
def test_a_killed_run_goes_on_from_its_last_epoch(folder):
    study = small_study(Arm("dense", replace(DENSE, options=("--epochs", "40"))))
    (run,) = make_runs(study, folder)
    code = f"import sys; sys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]\n"
    code += (
        "from dataclasses import replace\nfrom studies.study import Arm\nfrom tiny_study import *\n"
    )
    code += f"folder = Path({str(folder)!r})\n"
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
def test_a_compiled_run_of_two_threads_is_told_in_its_results(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run = replace(run, place=replace(run.place, threads=2, compiles=True))
    assert work_off([run], 1, id) == []
    assert run.results()["cost"]["versions"]["device"].endswith(", 2 threads a run, compiled")
    assert "torchcompile: inductor" in (run.folder / "train" / "args.yaml").read_text()
    assert run.place.environment().items() >= {"OMP_NUM_THREADS": "2"}.items()


@pytest.mark.ci
@needs_scripts
def test_an_arm_that_fails_is_told_and_the_others_go_on(folder, capfd):
    wrong = Training("wrong", "ewa", ("share_rate=2",))
    after = Training("after", "dense", uses=(Use("start", wrong),))
    study = small_study(Arm("dense", DENSE), Arm("wrong", wrong), Arm("after", after))
    runs = make_runs(study, folder)
    told = work_off(runs, 1, id)
    assert len(told) == 2
    assert "wrong, seed 0: train.py ended with 1: ValueError: share_rate" in told[0]
    assert told[1].startswith("after, seed 0: not begun")
    assert [run.training.name for run in runs if run.is_done()] == ["dense"]


def test_what_others_need_comes_first_and_must_be_the_same(folder):
    teacher = Training("teacher", "ewa")
    student = Training(
        "student", "dense", ("depth=2",), ("--epochs", "1", "--x", "{of}"), (Use("of", teacher),)
    )
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
    (runs["teacher"].folder / "stated.json").write_text(
        json.dumps({**runs["teacher"].stated(), "draw": 1})
    )
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
    # Ends well, as after ^C.
    monkeypatch.setattr(Run, "_train_command", lambda self, used: [sys.executable, "-c", ""])
    (told,) = work_off([run], 1, id)
    assert "interrupted after 0 of 3" in told
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
    assert "interrupted after 2 of 3" in told
    assert not run.is_trained()


@needs_scripts
def test_another_run_is_never_taken_for_this_one(folder):
    (run,) = make_runs(small_study(Arm("dense", DENSE)), folder)
    run.folder.mkdir(parents=True)
    (run.folder / "stated.json").write_text(
        json.dumps({**run.stated(), "options": ["--epochs", "1"]})
    )
    for name in ("trained", "dense"):
        (run.folder / f"{name}.json").write_text('{"top1": 99}')
    assert run.results() == {"cost": None, "arms": {}}
    (told,) = work_off([run], 1, id)
    assert "run of other options" in told


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
        monkeypatch.setattr(
            type(run.study.measure), "read", lambda *_, value=value: {"top1": value}
        )
        assert work_off([run], 1, id) == [
            "dense, seed 0: dense has no top1: its outputs are not numbers."
        ]
    assert not run.is_done()


def finish(run):
    """Write the files of a run that is over, each as a whole, since progress is read meanwhile."""
    (run.folder / "train").mkdir(parents=True, exist_ok=True)
    (run.folder / "train" / "summary.csv").write_text(f"epoch\n{run._epochs() - 1}\n")
    write_json(run.folder / "stated.json", run.stated())
    write_json(run.folder / "trained.json", {})
    for arm in run.arms():
        write_json(
            run.folder / f"{arm.name.lower()}.json",
            {"stated": run.statement(arm), "figures": {"top1": 1.0}},
        )


def test_the_rest_is_told_by_epochs_and_images(folder, capfd, monkeypatch):
    long = replace(DENSE, name="long", options=("--epochs", "6"))
    runs = make_runs(small_study(Arm("dense", DENSE), Arm("long", long)), folder)
    short, longer = (run.images_to_see() for run in runs)
    assert longer == 2 * short == 96
    now = iter([0.0, 60.0])
    monkeypatch.setattr("studies.scheduler.time.monotonic", lambda: next(now))
    clock = _Clock(runs)
    finish(runs[0])
    clock.tell([])
    assert "1 of 2 runs done, about 2 min left" in capfd.readouterr().err


def test_studies_share_trainings_and_the_machine(folder, monkeypatch):
    dense, ewa = Arm("dense", DENSE), Arm("EWA", EWA)
    runs = [
        run for arms in ((dense,), (dense, ewa)) for run in make_runs(small_study(*arms), folder)
    ]
    working, at_once = set(), []

    def work(run):
        assert run.folder not in working, "two runs in one folder"
        working.add(run.folder)
        at_once.append(len(working))
        time.sleep(0.05)
        finish(run)
        working.remove(run.folder)

    monkeypatch.setattr(Run, "work", work)
    kept = []
    assert work_off(runs, 2, kept.append) == []
    assert set(kept) == set(runs)
    assert max(at_once) == 2
    # A training of two studies counts once.
    assert sum(_Clock(runs)._images.values()) == 2 * runs[0].images_to_see()
