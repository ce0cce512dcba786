"""The benchmarks' protocol, every contest once on little data, and the report."""

import dataclasses
import itertools
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import benchmarks.layers
import benchmarks.peers
from benchmarks import (
    averaging,
    evaluation,
    host,
    modes,
    papers,
    protocol,
    report,
    scaling,
    steps,
    worker,
)
from benchmarks.__main__ import FOLDER, main
from benchmarks.peers import Size
from benchmarks.protocol import Contest, Row, Setting, run
from timm_moe.layers import EwaMlp, RandomPartition

SHORT = Setting(rounds=2)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only works move on, and no waiting for samples that are long enough."""
    now = [0.0]
    monkeypatch.setattr(protocol.time, "process_time", lambda: now[0])
    monkeypatch.setitem(protocol.SHORTEST_SAMPLE, "cpu", 0)
    return now


def _taking(seconds, clock):
    def work():
        clock[0] += seconds() if callable(seconds) else seconds

    return lambda: work


def test_ratios_are_to_the_baseline_of_the_round(clock):
    contest = Contest(
        "c", {"dense": _taking(2.0, clock), "moe": _taking(3.0, clock)}, {"moe": "a note"}
    )
    dense, moe = run(contest, SHORT)
    assert (dense.ratio, moe.ratio, moe.low, moe.high, moe.value) == (1, 1.5, 1.5, 1.5, 3000)
    assert dense.gauge == moe.gauge == 1
    assert moe.counts
    assert moe.note == "a note"


def test_a_noisy_contest_is_repeated_and_marked(clock, monkeypatch):
    made, attempts = [], []
    rounds = protocol._rounds
    monkeypatch.setattr(protocol, "_rounds", lambda *args: attempts.append(None) or rounds(*args))

    def make():
        made.append(None)
        seconds = 1.0 if len(made) == 1 else 1.1  # the second copy is the gauge
        return _taking(seconds, clock)()

    (row,) = run(Contest("c", {"dense": make}), SHORT)
    assert row.gauge == pytest.approx(1.1)
    assert not row.counts
    assert len(attempts) == protocol.ATTEMPTS


def test_a_suite_whose_time_is_over_goes_on_and_adds_to_its_figures(clock, monkeypatch, tmp_path):
    file, timed = tmp_path / "results" / "cpu.json", []

    def measure(setting):
        for name in ("first", "second", "third"):
            yield Contest(name, {"dense": _taking(1.0, clock), "moe": _taking(2.0, clock)})

    def run_for_a_while(contest, setting):
        rows = run(contest, setting)
        timed.extend(row.contest for row in rows)
        now[0] += 80
        return rows

    monkeypatch.setattr(worker, "run", run_for_a_while)
    monkeypatch.setitem(sys.modules, "benchmarks.tiny", SimpleNamespace(measure=measure))
    now = [0.0]
    monkeypatch.setattr(protocol.time, "time", lambda: now[0])
    stated = {"dtype": "float32", "rounds": 2}
    for _ in range(2):
        worker.main("tiny", json.dumps(stated), str(file), str(now[0] + 60))
        kept = worker.begin("tiny", stated, file)
        assert [row["contest"] for row in kept["rows"]] == timed
        assert not kept["whole"]
    worker.main("tiny", json.dumps(stated), str(file), str(now[0] + 60))
    assert timed == ["first", "first", "second", "second", "third", "third"]
    assert worker.begin("tiny", stated, file)["whole"]
    assert worker.begin("tiny", {**stated, "rounds": 3}, file)["rows"] == []
    monkeypatch.setattr(worker, "versions", lambda device: {"device": "another"})
    assert worker.begin("tiny", stated, file)["rows"] == []
    worker.main("tiny", json.dumps(stated), str(file))  # without a limit all is measured
    assert len(timed) == 12


def test_a_contest_that_would_not_end_in_time_makes_way_for_a_shorter_one(
    clock, monkeypatch, tmp_path, capsys
):
    def measure(setting):
        for name, seconds in (("first", 20), ("long", 120), ("short", 20)):
            yield Contest(name, {"dense": _taking(1.0, clock)}, seconds=seconds)

    monkeypatch.setitem(sys.modules, "benchmarks.tiny", SimpleNamespace(measure=measure))
    monkeypatch.setattr(protocol.time, "time", lambda: 0.0)
    worker.main("tiny", json.dumps({"rounds": 2}), str(tmp_path / "cpu.json"), "60")
    kept = worker.begin("tiny", {"rounds": 2}, tmp_path / "cpu.json")
    assert [row["contest"] for row in kept["rows"]] == ["first", "short"]
    assert not kept["whole"]
    assert capsys.readouterr().err.splitlines()[-1] == "2 of 3 contests"


def test_an_interrupted_suite_counts_what_it_has(clock, monkeypatch, tmp_path, capsys):
    def interrupted():
        raise KeyboardInterrupt

    def measure(setting):
        yield Contest("first", {"dense": _taking(1.0, clock)})
        yield Contest("second", {"dense": interrupted})

    monkeypatch.setitem(sys.modules, "benchmarks.tiny", SimpleNamespace(measure=measure))
    with pytest.raises(KeyboardInterrupt):
        worker.main("tiny", json.dumps({"rounds": 2}), str(tmp_path / "cpu.json"), "inf")
    kept = worker.begin("tiny", {"rounds": 2}, tmp_path / "cpu.json")
    assert [row["contest"] for row in kept["rows"]] == ["first"]
    assert capsys.readouterr().err.splitlines()[-1] == "1 of 2 contests"


def test_results_of_another_machine_are_added_to_its_own(monkeypatch, tmp_path, capsys):
    place = {"device": "NVIDIA H100 80GB HBM3"}
    result = {"setting": {"device": "cuda"}, "environment": place, "rows": []}
    (tmp_path / "results").mkdir()
    file = tmp_path / "results/cuda-nvidia-h100-80gb-hbm3.json"
    file.write_text(json.dumps({"steps": {**result, "rows": ["old"]}, "modes": "old"}))
    (tmp_path / "steps.json").write_text(json.dumps({"modes": result}))
    monkeypatch.setattr("benchmarks.__main__.FOLDER", tmp_path)
    monkeypatch.setattr(report, "write", lambda folder: print("report of", folder))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--add", str(tmp_path / "steps.json")])
    main()
    assert json.loads(file.read_text()) == {"steps": {**result, "rows": ["old"]}, "modes": result}
    assert capsys.readouterr().out == f"report of {tmp_path / 'results'}\n"


def test_a_command_that_measures_nothing_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "papers"])  # too large for a CPU
    with pytest.raises(SystemExit):
        main()
    assert "no suite has these settings" in capsys.readouterr().err


def test_a_suite_goes_on_after_a_contest_that_fails(clock, monkeypatch, tmp_path):
    def measure(setting):
        yield Contest("first", {"dense": lambda: 1 / 0})
        yield Contest("second", {"dense": _taking(1.0, clock)})

    monkeypatch.setitem(sys.modules, "benchmarks.tiny", SimpleNamespace(measure=measure))
    with pytest.raises(SystemExit, match=r"Not measured, .*first"):
        worker.main("tiny", json.dumps({"rounds": 2}), str(tmp_path / "cpu.json"))
    kept = worker.begin("tiny", {"rounds": 2}, tmp_path / "cpu.json")
    assert ([row["contest"] for row in kept["rows"]], kept["whole"]) == (["second"], False)


def test_kernels_of_a_dense_layer_are_counted():
    """Count the kernels of both passes.

    Forward: two products with their biases, GELU. Backward: two products and a sum for each layer,
    GELU.
    """
    (row,) = host.counted("kernels", {"dense": lambda: host.pass_of(host.mlp, SHORT)})
    assert row.value == (2 + 1) + (2 * 3 + 1)
    with host.Kernels() as kernels:
        x = torch.empty(4, 2).view(2, 4).t().detach()
        assert kernels.number == 0
        x.clone().add_(1)
    assert kernels.number == 2


def test_what_is_counted_has_the_form_of_a_gpu():
    """There each expert has equally many slots, and one product serves all."""
    partition, x = EwaMlp(host.mlp(), RandomPartition(4)).router, torch.randn(16, host.WIDTH)
    with host.form_of_a_gpu():
        assert partition(x).slots_per_expert == 4
    assert partition(x).slots_per_expert is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_of_the_host_suite_is_counted_and_times_its_work(monkeypatch, dtype):
    monkeypatch.setattr(host, "models", dict)  # they are in the longer tests
    rows, contests = [], []
    for found in host.measure(Setting(dtype=dtype)):
        (contests if isinstance(found, Contest) else rows).append(found)
    assert [row.entry for row in rows] == list(host.layers())
    dense, *others = rows
    assert (dense.ratio, dense.unit) == (1, "kernels")
    assert all(row.ratio > 1 for row in others)
    assert list(contests[0].entries) == list(host.layers())


@pytest.mark.ci
def test_steps_of_the_host_suite_and_of_all_modes_run():
    with host.form_of_a_gpu():
        dense, ewa, routed = (row.value for row in _counted_steps())
    assert dense < ewa < routed
    for contest in itertools.islice(modes.measure(SHORT), 1):
        for make in contest.entries.values():
            make()()
    assert [name for name, *_ in modes.models(Setting(device="cuda"))] == ["ViT-S/16", "ViT-B/16"]


def _counted_steps():
    return host.counted(
        "step", {name: partial(host.step_of, make, SHORT) for name, make in host.models().items()}
    )


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_and_peer_runs(monkeypatch, dtype):
    monkeypatch.setattr(benchmarks.layers, "TOKENS", 16)
    setting = Setting(dtype=dtype)
    monkeypatch.setattr(Setting, "pick", lambda self, cpu, cuda: 2)
    monkeypatch.setattr(
        papers, "VMOE_B32", dataclasses.replace(papers.VMOE_B32, width=32, hidden=48, tokens=10)
    )
    for contest in [
        *papers.layers(setting),
        *benchmarks.layers.contests(setting),
        *benchmarks.peers.contests(setting, Size(tokens=16)),
    ]:
        for make in contest.entries.values():
            make()()
    for row in benchmarks.layers.saved_bytes(setting):
        # Under autocast a dense layer keeps its cast weights, more than so few rows. Experts keep
        # none.
        assert row.ratio >= 1 if dtype == "float32" else row.ratio <= 1


@pytest.mark.ci
def test_every_step_evaluation_and_averaging_runs(monkeypatch):
    for make in steps.vit_xtiny().values():
        steps.step(make, 2, True, SHORT)()
    assert list(steps.vit_small()) == list(steps.vit_xtiny())
    for contest in evaluation.contests(1, SHORT):
        for make in contest.entries.values():
            make()()
    averaging.average(4, SHORT)()
    averaging.copy(4, SHORT)()
    for make in scaling._contest("8 experts", 8, 16, 32, SHORT).entries.values():
        make()()


def test_the_report_tells_what_was_reached(monkeypatch, tmp_path):
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    (docs / "generated").mkdir()
    monkeypatch.setattr(report, "DOCS", docs)
    rows = [
        Row("averaging, 4 experts", "memcpy", 1, 1, 1, 5, "ms", 1.0),
        Row("averaging, 4 experts", "averaging", 1.7, 1.6, 1.8, 8.5, "ms", 1.0),
        Row("averaging, 8 experts", "averaging", 1.5, 1.4, 1.6, 8.5, "ms", 1.2),
    ]
    partition = [Row("layer, one expert a row", "random partition, 4", 1.02, 1, 1.1, 8, "ms", 1.0)]
    result = {
        "suite": "averaging",
        "setting": dataclasses.asdict(SHORT),
        "environment": dict(
            device="d", python="3", torch="2", timm="1", timm_moe="0", date="today", commit="abc"
        ),
    }
    stored = {
        "averaging neutral": {**result, "rows": [dataclasses.asdict(row) for row in rows]},
        "layers float32 eager neutral": {
            **result,
            "rows": [dataclasses.asdict(row) for row in partition],
        },
    }
    results = tmp_path / "results"
    results.mkdir()
    (results / "cpu.json").write_text(json.dumps(stored))
    report.write(results)
    text = (docs / "generated/benchmarks.md").read_text()
    four = "averaging 4 experts / memcpy | averaging, 4 experts, float32"
    assert f"| {four} | 1.700 | 1.6 | **no** |" in text
    eight = "averaging 8 experts / memcpy | averaging, 8 experts, float32"
    assert f"| {eight} | 1.500 | 1.6 | noise |" in text
    assert "| 1.020 | 1.03 | yes, within the quartiles |" in text
    assert "| training step, EWA, 4 experts | | not measured | 1.01 | |" in text
    assert "timm_moe 0 (abc); today" in text
    assert "| averaging | 1.700 | 1.600-1.800 | 8.5 |  |" in text


def test_documents_say_what_was_timed_on_a_gpu():
    stored = json.loads((FOLDER / "results/cuda-nvidia-h100-80gb-hbm3.json").read_text())
    rows = [row for suite in ("modes", "large") for row in stored[suite]["rows"]]
    ways, kinds = ("eager", "reduce-overhead"), ("EWA", "naive")

    def row(model, way, kind):
        start = f"step of ViT-{model}/16, bfloat16, {way},"
        (found,) = (
            each
            for each in rows
            if each["contest"].startswith(start) and each["entry"].startswith(kind)
        )
        return found

    readme = " ".join((FOLDER.parent / "README.md").read_text().split())
    train = (FOLDER.parent / "docs/train.md").read_text()
    for kind in kinds:
        eager, graphs = (row("S", way, kind)["ratio"] for way in ways)
        assert f"| {eager:.2f}, as graphs {graphs:.2f} |" in readme
    quartiles = ("{low:.2f} to {high:.2f}".format(**row("S", "eager", kind)) for kind in kinds)
    assert f"(quartiles {' and '.join(quartiles)})" in readme
    dense, ewa = ([row("S", way, kind)["value"] for way in ways] for kind in ("dense", "EWA"))
    assert (
        f"took {dense[1]:.1f} ms instead of {dense[0]:.1f}, those of EWA {ewa[1]:.1f} instead of "
        f"{ewa[0]:.1f}"
    ) in readme
    for model in "SB":
        for kind in ("dense", *kinds):
            both = [row(model, way, kind) for way in ways]
            cells = [f"{each['value']:.1f}" for each in both]
            if kind != "dense":
                cells += [f"{each['ratio']:.2f}" for each in both]
            assert f"| {' | '.join(cells)} |" in train


@pytest.mark.ci
def test_the_report_in_the_repository_is_that_of_its_results(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    committed = (report.DOCS / "generated/benchmarks.md").read_text()
    (tmp_path / "images").mkdir()
    (tmp_path / "generated").mkdir()
    monkeypatch.setattr(report, "DOCS", tmp_path)
    report.write(FOLDER / "results")
    assert (tmp_path / "generated/benchmarks.md").read_text() == committed
