"""The programme for a GPU: order, limits and what comes back, with short commands and on a CPU."""

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from common import ROOT
from train_script import needs_scripts

from benchmarks import programme
from benchmarks.programme import Command

#: A command that ends by no signal that it can ignore.
DEAF = (
    "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
)
#: A command that ends by SIGINT, as pytest does, with what it has counted.
INTERRUPTED = (
    "import time\ntry:\n    print('begun', flush=True)\n    time.sleep(60)\n"
    "finally:\n    time.sleep(1)\n    print('=== 5 passed, 1 warning in 2.00s ===')"
)


def python(code, **more):
    return Command(("-c", code), **more)


def summary(output):
    """Name, outcome and count of each line of summary.txt."""
    lines = (output / "summary.txt").read_text().splitlines()
    split = [re.fullmatch(r"(.+?): (.+), \d+ of [\d.]+ s, (.+)", line) for line in lines]
    return [found.groups() for found in split]


def test_parts_follow_each_other_and_their_commands_run_side_by_side(tmp_path, capsys):
    wait = "import pathlib, time\nwhile not pathlib.Path('{}').exists(): time.sleep(0.05)\n"
    meet = "import pathlib; pathlib.Path('{}').touch()\n" + wait + "print('1 of 1 models')"
    first, second = tmp_path / "first", tmp_path / "second"
    parts = {
        "both": {
            "one": python(meet.format(first, second)),
            "other": python(meet.format(second, first)),
        },
        "after": {"last": python(f"print(open('{first}').read(), end='2 of 2 runs')")},
    }
    assert programme.work_off(parts, {"both": 60, "after": 60}, tmp_path / "out") == []
    assert summary(tmp_path / "out") == [
        ("one", "passed", "1 of 1 models"),
        ("other", "passed", "1 of 1 models"),
        ("last", "passed", "2 of 2 runs"),
    ]
    assert capsys.readouterr().out == (tmp_path / "out/summary.txt").read_text()


@pytest.mark.parametrize(
    ("printed", "outcome", "count"),
    [
        ("==== 3 passed, 9 deselected in 0.5s ====", "passed", "3 passed, 9 deselected in 0.5s"),
        ("= 3 passed, 1 warning in 75.1s (0:01:15) =", "passed", None),
        ("==== 3 passed, 1 skipped in 0.5s ====", "incomplete", "3 passed, 1 skipped in 0.5s"),
        ("==== 4 skipped in 0.5s ====", "incomplete", "4 skipped in 0.5s"),
        ("2 of 2 runs done, about 0 min left", "passed", None),
        ("3 of 3 contests\nsome warning", "passed", "3 of 3 contests"),
        ("1 of 2 contests", "incomplete", "1 of 2 contests"),
        ("0 of 0 contests", "incomplete", "0 of 0 contests"),
        ("  round 3 of 3 of a contest", "incomplete", "nothing counted"),
        ("1 of 1 models\nraise SystemExit(3)", "failed (exit status 3)", "1 of 1 models"),
    ],
)
def test_a_command_has_passed_if_it_counts_all_that_it_should_do(printed, outcome, count, tmp_path):
    printed, _, error = printed.partition("\nraise ")
    code = f"print({printed!r})" + (f"; raise {error}" if error else "")
    failed = programme.work_off({"part": {"name": python(code)}}, {"part": 60}, tmp_path)
    assert failed == ([] if outcome == "passed" else ["name"])
    told = count or printed.strip("= ")
    assert summary(tmp_path) == [("name", outcome, told)]


@pytest.mark.ci
def test_a_part_ends_at_its_limit_with_what_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(programme, "GRACE", 3)
    logs, result = tmp_path / "runs", tmp_path / "near.json"
    train = (
        f"import os, time; os.makedirs('{logs}/dense/1'); print('3 of 9 runs', flush=True); "
        f"open('{logs}/dense/1/log.txt', 'w').write('x' * 30_000 + 'the end'); "
        f"open('{result}', 'w').write('{{}}'); time.sleep(60)"
    )
    parts = {
        "late": {
            "deaf": python(DEAF),
            "tests": python(INTERRUPTED),
            "study": python(train, logs=logs, result=result),
        },
        "next": {"last": python("print('1 of 1 models')")},
    }
    begin = time.monotonic()
    failed = programme.work_off(parts, {"late": 4, "next": 60}, tmp_path / "out")
    assert time.monotonic() - begin < 40
    assert failed == ["deaf", "tests", "study"]
    assert summary(tmp_path / "out") == [
        ("deaf", "cut off", "nothing counted"),
        ("tests", "cut off", "5 passed, 1 warning in 2.00s"),
        ("study", "cut off", "3 of 9 runs"),
        ("last", "passed", "1 of 1 models"),
    ]
    logs = {path.stem: path.read_text() for path in (tmp_path / "out").glob("*.log")}
    assert "begun" in logs["deaf"]
    assert logs["study"].endswith("the end")
    assert programme.TAIL <= len(logs["study"]) < programme.TAIL + 2000
    assert (tmp_path / "out/near.json").read_text() == "{}"


@pytest.mark.ci
def test_what_a_command_leaves_running_ends_with_it(tmp_path):
    child = f"import pathlib, time; time.sleep(4); pathlib.Path('{tmp_path}/late').touch()"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    code += "; print('1 of 1 models')"
    assert programme.work_off({"part": {"name": python(code)}}, {"part": 60}, tmp_path) == []
    time.sleep(5)
    assert not (tmp_path / "late").exists()


def test_a_programme_that_is_told_to_end_takes_its_commands_along(tmp_path):
    code = (
        "import signal; from pathlib import Path; from benchmarks import programme\n"
        "signal.signal(signal.SIGTERM, programme.stop)\n"
        f"command = programme.Command(('-c', {INTERRUPTED!r}))\n"
        f"programme.work_off({{'part': {{'name': command}}}}, {{'part': 60}}, Path('{tmp_path}'))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    log = tmp_path / "name.log"
    while not (log.exists() and "begun" in log.read_text().splitlines()):
        time.sleep(0.05)
    for _ in range(2):  # as by timeout
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    assert process.wait(30)
    assert summary(tmp_path) == [("name", "cut off", "5 passed, 1 warning in 2.00s")]


def test_the_pages_table_is_the_programmes():
    """The table of CONTRIBUTING.md has each part with its limit and the files that it writes."""
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## A GPU for fifteen minutes")[2]
    rows = re.findall(r"^\| `(\w+)` \| (\d+) s \| .* \| (.*) \|$", page, re.MULTILINE)
    parts = programme.programme("cuda", Path("OUTPUT"), Path("scratch"))
    assert {part: int(limit) for part, limit, _ in rows} == programme.LIMITS
    assert list(parts) == list(programme.LIMITS)
    for part, _, files in rows:
        expected = [f"{name}.log" for name in parts[part]]
        for command in parts[part].values():
            expected += [Path(word).name for word in command.words if word.startswith("OUTPUT/")]
            expected += [command.result.name] if command.result else []
        assert files.split(", ") == expected


@needs_scripts
def test_a_command_without_images_ends_at_once(tmp_path, monkeypatch):
    """The study's options are read, and its log comes back."""
    words = [str(tmp_path / "out"), "study", "--data-dir", "no", "--only", "dense"]
    monkeypatch.setattr(sys, "argv", ["programme", *words])
    with pytest.raises(SystemExit, match=r"Not passed, .*study"):
        programme.main()
    assert "There is no folder no." in (tmp_path / "out/study.log").read_text()
    assert summary(tmp_path / "out") == [("study", "failed (exit status 2)", "nothing counted")]


def test_a_programme_without_timms_scripts_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["programme", str(tmp_path), "checks"])
    monkeypatch.setenv("TIMM_SCRIPTS", str(tmp_path))
    with pytest.raises(SystemExit):
        programme.main()
    assert "TIMM_SCRIPTS names no folder" in capsys.readouterr().err


@pytest.mark.ci
def test_the_three_commands_have_each_test_for_a_gpu_once():
    def collected(words):
        command = [sys.executable, *words, "--collect-only", "-qq"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        return re.findall(r"^tests/gpu/.*\S", done.stdout, re.MULTILINE)

    parts = [collected(command.words) for command in programme.tests("cuda").values()]
    assert len(parts) == 3
    assert all(parts)
    whole = collected(("-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu", "-vv"))
    assert sorted(itertools.chain(*parts)) == sorted(whole)


@pytest.mark.ci
@needs_scripts
@pytest.mark.parametrize("part", programme.LIMITS)
def test_a_part_in_miniature(part, tmp_path, monkeypatch):
    # The time of the eager steps, but not of the others, which are compiled.
    limits = {**dict.fromkeys(programme.LIMITS, 900), "steps": 59, "large": 59}
    monkeypatch.setattr(programme, "LIMITS", limits)
    monkeypatch.setattr(sys, "argv", ["programme", str(tmp_path), part, "--device", "cpu"])
    if part in ("steps", "large"):
        with pytest.raises(SystemExit):
            programme.main()
    else:
        programme.main()
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    told = {name: (outcome, count) for name, outcome, count in summary(tmp_path)}
    if part == "checks":
        assert list(told) == ["smoke", "tests", "compiled"], logs
    for name, (outcome, _) in told.items():
        assert outcome == ("incomplete" if name in ("steps", "large") else "passed"), logs
    if part == "busy":
        # Beside other programs the share may be any number on a CPU.
        shares = re.findall(r"^(.+?): .*busy \d+\.\d", logs, re.MULTILINE)
        assert shares == ["dense", "EWA", "top-1"]
    elif part in ("steps", "large"):
        assert told[part][1] == f"{1 if part == 'steps' else 2} of 3 contests"
        (result,) = json.loads((tmp_path / f"{part}.json").read_text()).values()
        assert {row["entry"] for row in result["rows"]} == {"dense", "EWA", "top-1"}
        assert {row["contest"].split(", ")[2] for row in result["rows"]} == {"eager"}
    elif part == "study":
        assert logs.count("EWA: averaging the 4 experts") == 1
