"""The examples run as their first line says."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_custom_loop(tmp_path):
    for split, label in [(split, label) for split in ("train", "test") for label in range(2)]:
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
    accuracies = [float(line.split()[-2]) for line in done.stdout.splitlines() if line.startswith("epoch")]
    assert accuracies[2] > max(30, accuracies[0])


@pytest.mark.ci
def test_segmentation(tmp_path):
    done = run_script(EXAMPLES / "segmentation.py", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = [line.split()[-4:] for line in done.stdout.splitlines()[-3:]]
    parameters, accuracies, ious = ([float(row[column].replace(",", "")) for row in table] for column in range(3))
    assert parameters == sorted(parameters)
    assert all(iou < accuracy < 100 for iou, accuracy in zip(ious, accuracies, strict=True))
    assert max(ious) > 8  # a model that finds the background alone has 82 / 11
