"""examples/point_clouds.py: the command, and its tables in docs/generated/studies.md."""

import json
import shutil
from pathlib import Path

import point_clouds
import pytest
import torch
from common import ROOT
from point_cloud_files import TINY, write_mnist, write_modelnet40
from processes import run_script

DOCS = ROOT / "docs"


@pytest.fixture
def tiny_sizes(monkeypatch):
    short = dict(
        model={**TINY, "group_widths": (4, 8, 8, 8), "width": 12},
        epochs=2,
        warmup_epochs=1,
        batch_size=8,
    )
    for name, size in point_clouds.SIZES.items():
        sampled = dict(num_points=16, sampled_points=24) if name == "paper" else {}
        monkeypatch.setitem(point_clouds.SIZES, name, {**size, **short, **sampled})


def test_runs_are_kept_and_not_run_again(tmp_path, capsys, tiny_sizes):
    folder, output = write_mnist(tmp_path), tmp_path / "new/results.json"
    options = [
        "--data",
        "mnist",
        "--data-dir",
        str(folder),
        "--output",
        str(output),
        "--train-clouds",
        "32",
    ]
    point_clouds.main([*options, "--seeds", "0", "--variants", "dense", "ewa"])
    first = capsys.readouterr().out
    assert "ewa, seed 0, epoch 2 of 2: training loss" in first
    assert first.endswith("logits of EWA's experts and its dense classifier: 0.0\n")
    (folder / "train-images-idx3-ubyte").rename(folder / "away")
    point_clouds.main([*options, "--seeds", "0", "--variants", "dense", "ewa"])
    assert first.endswith(capsys.readouterr().out)  # the table alone, without data
    with pytest.raises(SystemExit, match="has no train-images-idx3-ubyte"):
        point_clouds.main([*options, "--seeds", "0", "--share-rate", "0.2"])
    (folder / "away").rename(folder / "train-images-idx3-ubyte")
    point_clouds.main([*options, "--seeds", "0", "1", "--variants", "dense", "naive"])
    assert "dense, seed 0, epoch" not in capsys.readouterr().out
    runs = [(run["variant"], run["seed"]) for run in json.loads(output.read_text())]
    assert runs == [("dense", 0), ("ewa", 0), ("naive", 0), ("dense", 1), ("naive", 1)]
    point_clouds.main([*options, "--seeds", "0", "0", "--variants", "dense", "--epochs", "1"])
    assert len(json.loads(output.read_text())) == 6
    assert capsys.readouterr().out.count("| dense |") == 1


def test_votes_draw_the_clouds_again(tmp_path, capsys, tiny_sizes, monkeypatch):
    seeds, sample = [], point_clouds.sample

    def keep_seed(points, size, generator):
        seeds.append(generator.initial_seed())
        return sample(points, size, generator)

    monkeypatch.setattr(point_clouds, "sample", keep_seed)
    folder = write_modelnet40(tmp_path, 8)
    where = ["--data-dir", str(folder), "--output", str(tmp_path / "results.json")]
    point_clouds.main(
        [
            "--data",
            "modelnet40",
            "--size",
            "paper",
            "--vote",
            "--seeds",
            "0",
            "--variants",
            "early-ewa",
            *where,
        ]
    )
    out = capsys.readouterr().out
    assert "modelnet40, test: 16 clouds of 30 points" in out
    assert "With 10 votes:" in out
    assert out.count("| early-ewa |") == 2
    assert seeds[-20:] == [vote for vote in range(10) for _ in range(2)]  # two batches each


def test_differences_are_paired_by_seed():
    accuracies = {
        "dense": {0: 90.0, 1: 92.0, 2: 94.0},
        "ewa": {2: 95.5, 0: 91.0},
        "naive": {7: 90.0},
    }
    runs = [
        {"variant": variant, "seed": seed, "accuracy": accuracy, "parameters": 1000}
        for variant, by_seed in accuracies.items()
        for seed, accuracy in by_seed.items()
    ]
    assert point_clouds.table(runs).splitlines()[2:] == [
        "| dense | 92.00 ± 1.15 | 90.00, 92.00, 94.00 |  | 1,000 |",
        "| ewa | 93.25 ± 2.25 | 91.00, 95.50 | +1.25 ± 0.25 | 1,000 |",
        "| naive | 90.00 | 90.00 |  | 1,000 |",
    ]


def test_clouds_are_drawn_scaled_and_moved():
    size, points = dict(sampled_points=40, num_points=30), torch.rand(4, 50, 3) + 1
    drawn = point_clouds.sample(points, size, torch.Generator().manual_seed(0))
    assert drawn.shape == (4, 30, 3)
    assert torch.equal(drawn, point_clouds.sample(points, size, torch.Generator().manual_seed(0)))
    other = point_clouds.sample(points, size, torch.Generator().manual_seed(1))
    assert not torch.allclose(drawn.mean(1), other.mean(1), atol=1e-2)
    whole = point_clouds.sample(
        points, dict(sampled_points=60, num_points=60), torch.Generator().manual_seed(0)
    )
    # All points are in it: each axis is a line.
    before, after = points.sort(1).values, whole.sort(1).values
    scale = (after[:, -1:] - after[:, :1]) / (before[:, -1:] - before[:, :1])
    move = (after - scale * before).mean(1, keepdim=True)
    torch.testing.assert_close(after, scale * before + move)
    assert 2 / 3 <= scale.min() < 0.9 < 1.1 < scale.max() <= 3 / 2
    assert -0.2001 <= move.min() < 0 < move.max() <= 0.2001
    assert len(scale.unique()) == len(move.unique()) == scale.numel()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--share-rate", "0.8"], "--share-rate must lie between 0 and 3 / 4"),
        (["--vote"], "--vote needs --size paper"),
        (["--size", "paper"], "--size paper needs clouds of at least 1024 points"),
        (["--checkpoint", "no.pth"], "--checkpoint no.pth is no file"),
    ],
)
def test_options_that_are_refused(capsys, options, sentence):
    with pytest.raises(SystemExit):
        point_clouds.main(["--data", "mnist", "--data-dir", "DIR", *options])
    assert sentence in capsys.readouterr().err


def test_too_few_clouds_and_files_of_others(tmp_path):
    options = [
        "--data",
        "mnist",
        "--data-dir",
        str(write_mnist(tmp_path)),
        "--output",
        str(tmp_path / "results.json"),
    ]
    with pytest.raises(SystemExit, match=r"40 clouds .*64"):
        point_clouds.main(options)
    (tmp_path / "results.json").write_text('{"runs": 1}')
    with pytest.raises(SystemExit, match=r"results\.json .*--output"):
        point_clouds.main(options)
    assert (tmp_path / "results.json").read_text() == '{"runs": 1}'


def test_a_training_that_breaks_off_is_told(tmp_path, tiny_sizes, monkeypatch):
    monkeypatch.setitem(point_clouds.SIZES["small"], "lr", 1e30)
    options = [
        "--data",
        "mnist",
        "--data-dir",
        str(write_mnist(tmp_path)),
        "--output",
        str(tmp_path / "results.json"),
    ]
    with pytest.raises(SystemExit, match=r"dense, seed 0: .*nan"):
        point_clouds.main([*options, "--seeds", "0"])


@pytest.mark.ci
def test_as_a_script(tmp_path):
    """Bars and bars with a foot are told apart by all variants."""
    folder = write_mnist(tmp_path, 200)
    script = Path(point_clouds.__file__)
    done = run_script(
        script, "--data", "mnist", "--data-dir", folder, "--seeds", 0, "--epochs", 4, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == [f"| {name}" for name in point_clouds.VARIANTS]
    assert all(float(row[1]) > 90 for row in rows)


@pytest.mark.parametrize("data", ["mnist", "modelnet10"])
def test_the_tables_of_the_page_are_what_the_command_prints(data, capsys, tmp_path):
    page, results = (DOCS / "generated/studies.md").read_text(), tmp_path / "results.json"
    shutil.copy(DOCS / "generated/point_clouds.json", results)
    (command,) = [
        line for line in page.splitlines() if f"--data {data} " in line and "--size" not in line
    ]
    options = command.split()[2:]
    options[options.index("--output") + 1] = str(results)
    point_clouds.main(options)
    table, difference = capsys.readouterr().out.strip().split("\n\n")
    assert table in page
    assert difference.endswith(" 0.0")
