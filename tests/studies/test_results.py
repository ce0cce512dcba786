"""Results of studies: stored figures, the images, and mistakes on the command line."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
from PIL import Image
from tiny_study import DENSE, EWA, make_runs, small_study

from studies import cifar100, images, results
from studies.__main__ import main
from studies.deploy import Export
from studies.runs import Run
from studies.study import Arm, Images, Training, Use


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
        with pytest.raises(FileExistsError, match=r"results of EWA .*move"):
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


def test_figures_of_elsewhere_are_counted_and_kept_if_asked(folder, monkeypatch):
    runs = make_runs(small_study(Arm("dense", DENSE), Arm("EWA", EWA)), folder)
    kept = folder / "kept.json"
    results.write(kept, runs)
    stored = json.loads(kept.read_text())
    stored["arms"]["EWA"]["figures"]["0"], stored["cost"]["ewa"] = (
        {"top1": 2.0},
        {"0": "of elsewhere"},
    )
    kept.write_text(json.dumps(stored))
    assert results.from_elsewhere(kept, runs) == 1
    monkeypatch.setattr(
        Run,
        "results",
        lambda run: {"cost": "here", "arms": {arm.name: {"top1": 1.0} for arm in run.arms()}},
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


def test_what_another_machine_has_done_can_be_left_out(folder):
    student = Training("student", "dense", uses=(Use("of", DENSE),))
    study = small_study(Arm("dense", DENSE), Arm("EWA", EWA), Arm("student", student))
    runs = make_runs(study, folder, seeds=2)
    kept = folder / "kept.json"
    assert results.missing(kept, runs) == runs
    known = {"dense": "01", "EWA": "0", "student": "0"}
    figures = {
        arm: {"figures": {seed: {"top1": 1.0} for seed in seeds}} for arm, seeds in known.items()
    }
    kept.write_text(json.dumps({"arms": figures, "cost": {}}))
    left = [run.name for run in results.missing(kept, runs)]
    # The student begins from the dense one.
    assert left == ["dense, seed 1", "ewa, seed 1", "student, seed 1"]


def refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["studies", *map(str, arguments)])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err


def test_what_is_wrong_is_told_before_the_first_run(folder, monkeypatch, capsys):
    (folder / "studies" / "results").mkdir(parents=True)
    monkeypatch.setattr("studies.__main__.HERE", folder / "studies")
    (folder / "scripts").mkdir()
    monkeypatch.setenv("TIMM_SCRIPTS", str(folder / "scripts"))
    options = ["--data-dir", folder / "all", "--output", folder / "runs"]
    for name in ("train.py", "validate.py"):
        told = refused(["scratch", *options], monkeypatch, capsys)
        assert "TIMM_SCRIPTS names no folder with timm's train.py" in told
        (folder / "scripts" / name).write_text("")
    told = refused(["scratch", "search", *options], monkeypatch, capsys)
    assert "100 classes of images" in told
    (folder / "studies" / "results" / "scratch-small.json").write_text('{"arms": {"den')
    assert "scratch-small.json is damaged" in refused(["--report"], monkeypatch, capsys)


@pytest.mark.parametrize("option", ["--seeds", "--jobs"])
def test_numbers_below_one_are_refused(option, monkeypatch, capsys):
    told = refused([option, "-1"], monkeypatch, capsys)
    assert f"argument {option}: -1 is not" in told


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
    with pytest.raises(FileExistsError, match="holds other images"):
        images.link(Images(of=2), folder / "all", linked)
    with pytest.raises(FileNotFoundError, match="100 classes of images"):
        images.link(Images(), folder / "all", folder / "more")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nothing"):
        images.link(Images(), folder / "nothing", folder / "more")


def test_cifar_is_written_as_folders(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, (3, 3072), dtype=np.uint8)
    names = ["apple_s_000001.png", "golden_delicious_s_2.png", "whale_s_3.png"]
    cifar100.write(
        {"data": data, "fine_labels": [0, 0, 1], "filenames": names},
        ["apple", "whale"],
        tmp_path / "train",
    )
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
    with pytest.raises(SystemExit, match=r"CIFAR-100 .*no network"):
        cifar100.main()
    assert not (tmp_path / "images" / "train").exists()
