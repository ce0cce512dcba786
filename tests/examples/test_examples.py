"""The examples run as their first line says."""

import json
import runpy

import numpy as np
import pytest
from common import EXAMPLES
from PIL import Image
from processes import run_script


@pytest.mark.ci  # tests/training has quick loops
def test_custom_loop(tmp_path):
    for split, label in [(split, label) for split in ("train", "validation") for label in range(2)]:
        (tmp_path / split / str(label)).mkdir(parents=True)
        for index in range(8):
            pixels = np.full((32, 32, 3), 255 * label, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / str(label) / f"{index}.png")
    done = run_script(EXAMPLES / "custom_loop.py", tmp_path, 2, 8, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "largest_difference=0.0" in done.stdout
    assert (tmp_path / "exported/model.safetensors").is_file()


@pytest.mark.ci
def test_routed_loop(tmp_path):
    done = run_script(EXAMPLES / "routed_loop.py", 3, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("share of an expert min/mean/max") == 6
    accuracies = [
        float(line.split()[-2]) for line in done.stdout.splitlines() if line.startswith("epoch")
    ]
    assert accuracies[2] > max(30, accuracies[0])


def camvid(folder):
    """Write a folder like CamVid's, with three images in each split."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, shape in ((split, (18, 24, 3)), (f"{split}annot", (18, 24))):
            (folder / name).mkdir(parents=True)
            for index in range(3):
                pixels = random.integers(0, 256 if len(shape) == 3 else 12, shape, dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{index}.png")


@pytest.mark.ci
def test_segmentation(tmp_path, capsys):
    camvid(tmp_path / "data")
    example = runpy.run_path(str(EXAMPLES / "segmentation.py"))

    def run(*arguments):
        example["main"](example["parse"](list(map(str, arguments))))
        return capsys.readouterr().out

    command = [tmp_path / "data", "--output", tmp_path / "out", "--start-epochs", 1, "--epochs", 1]
    command += ["--img-size", 16, 16, "--variants", "dense", "L12-one"]
    run(*command)
    out = run(*command, "L1-shared")
    assert [line for line in out.splitlines() if "finished" in line] == [
        f"{name}-0: finished before" for name in ("dense", "L12-one")
    ]
    results = json.loads((tmp_path / "out/results.json").read_text())
    runs = {run["variant"]: run for run in results["runs"]}
    assert runs["L12-one"]["before"] == runs["dense"]["before"] != runs["L1-shared"]["before"]
    assert (
        f"| L1-shared | 1 | {runs['L1-shared']['before']:.2f} | "
        f"{runs['L1-shared']['mean_iou']:.2f} |" in out
    )
    assert out.endswith(run("--table", tmp_path / "out/results.json"))
    for option, message in (
        ("--lr", r"lr 0\.0005, not 1\.0"),
        ("--start-lr", r"start_lr 0\.002"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*command, option, 1)
    write_mask = Image.fromarray(np.full((18, 24), 12, dtype=np.uint8)).save
    write_mask(tmp_path / "data/testannot/0.png")
    with pytest.raises(ValueError, match=r"label 12, .*11 classes"):
        run(*command)


@pytest.mark.ci
def test_segmentation_says_what_is_wrong_in_one_sentence(tmp_path):
    done = run_script(EXAMPLES / "segmentation.py", tmp_path, "--output", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {tmp_path}/train has no image")
