"""The programme for a GPU: its parts run apart from each other, and in miniature on a CPU."""

import json
import re
import sys
import time
from contextlib import suppress

import pytest

from benchmarks import programme

PYTHON = (sys.executable, "-c")


def test_no_part_stops_another_and_each_keeps_its_limit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(programme, "GRACE", 0.3)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('begun', flush=True)"
    )
    parts = {
        "fails": lambda seconds: [*PYTHON, "raise SystemExit(3)"],
        "hangs": lambda seconds: [*PYTHON, f"{deaf}; time.sleep(60)"],
        "passes": lambda seconds: [*PYTHON, f"print('had', {seconds})"],
    }
    begin = time.monotonic()
    failed = programme.work_off(parts, {"fails": 20, "hangs": 2, "passes": 10}, tmp_path)
    assert time.monotonic() - begin < 25
    assert failed == ["fails", "hangs"]
    told = (tmp_path / "summary.txt").read_text()
    assert told == capsys.readouterr().out
    first, second, third = told.splitlines()
    assert first.startswith("fails: failed (exit status 3), ")
    assert second.startswith("hangs: over its limit, ")
    assert second.endswith(" of 2 s")
    assert third.startswith("passes: passed, ")
    assert "begun" in (tmp_path / "hangs.log").read_text()
    # The last part has what the others left, here of the first.
    had = float((tmp_path / "passes.log").read_text().splitlines()[-1].split()[1])
    assert 10 < had < 30


def test_the_programme_takes_twelve_minutes_and_a_command_each(tmp_path):
    assert sum(programme.LIMITS.values()) == 12 * 60
    made = {
        part: make(240) for part, make in programme.commands(tmp_path, "cuda", "images").items()
    }
    assert list(made) == list(programme.LIMITS)
    assert made["study"][2:5] == ["studies", "near", "--size"]
    assert made["study"][-1] == "3.50"
    until = float(made["steps"][-1]) - time.time()
    assert 200 < until <= 210


@pytest.mark.ci
@pytest.mark.parametrize("part", ["busy", "tests", "steps"])
def test_a_part_in_miniature(part, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["programme", str(tmp_path), "--device", "cpu", "--parts", part]
    )
    with suppress(SystemExit):
        programme.main()
    log, told = ((tmp_path / name).read_text() for name in (f"{part}.log", "summary.txt"))
    # A slow machine compiles for longer than the limit.
    assert "passed" in told or (part == "steps" and "over its limit" in told), log[-2000:]
    if part == "busy":
        # Beside other programs the share may be any number on a CPU.
        shares = re.findall(r"^(.+?): .*busy \d+\.\d", log, re.MULTILINE)
        assert shares == ["dense", "EWA", "top-1"]
    elif part == "steps":
        (result,) = json.loads((tmp_path / "steps.json").read_text()).values()
        assert {row["entry"] for row in result["rows"]} == {"dense", "EWA", "top-1"}
        assert {row["contest"].split(", ")[2] for row in result["rows"]} >= {"eager"}
    else:
        assert "1 passed" in log
