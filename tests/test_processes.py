"""A process that a test starts ends with the test.

It does so even if the test is interrupted or the process dies.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

#: A process that was started in the background of a shell ignores SIGINT.
HEARS = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
#: Leaves its process id in a folder, and waits for longer than any test.
WAITS = """
import os, pathlib, time
pathlib.Path({folder!r}, str(os.getpid())).touch()
time.sleep(10_000)
"""
#: A process that waits, and goes on without its parent, whose output it holds open.
OUTLIVES = """
import os, pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {waits!r}], start_new_session=True)
while not os.listdir({folder!r}):
    time.sleep(0.01)
print("killed", flush=True)
os.kill(os.getpid(), 9)
"""
#: Ways to start processes that wait, and their number.
STARTS = {
    "a new process": ('run_new([sys.executable, "-c", {waits!r}])', 1),
    "a forked process": ("run_code({waits!r}, modules=())", 1),
    "torchrun": (
        'run_new([sys.executable, "-m", "torch.distributed.run", "--standalone", '
        '"--nproc_per_node=2", {file!r}])',
        2,
    ),
}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


@pytest.fixture
def started(tmp_path):
    folder = tmp_path / "started"
    folder.mkdir()
    yield folder
    for pid in filter(is_running, os.listdir(folder)):
        os.kill(int(pid), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("kind", ["a new process", "a forked process", "torchrun"])
@pytest.mark.first_case
def test_processes_end_with_an_interrupted_test(kind, started, tmp_path):
    start, number = STARTS[kind]
    waits = WAITS.format(folder=str(started))
    file = tmp_path / "waits.py"
    file.write_text(waits)
    call = start.format(waits=waits, file=str(file))
    code = f"{HEARS}\nfrom processes import run_code, run_new\n{call}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    test = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(os.listdir(started)) == number)
        # An exception in the middle of its wait, as from a time limit.
        test.send_signal(signal.SIGINT)
        assert test.wait(60) != 0
    finally:
        test.kill()
    wait_until(lambda: not any(map(is_running, os.listdir(started))), 10)


def test_a_command_that_dies_is_not_waited_for_because_of_its_children(started):
    from processes import run_new

    waits = WAITS.format(folder=str(started))
    done = run_new([sys.executable, "-c", OUTLIVES.format(waits=waits, folder=str(started))])
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "killed\n")


@pytest.mark.ci
def test_a_time_limit_ends_a_test_that_waits_for_a_process(started, tmp_path):
    call = STARTS["a new process"][0].format(waits=WAITS.format(folder=str(started)))
    test = f"import sys\nfrom processes import run_new\n\n\ndef test_waits():\n    {call}\n"
    (tmp_path / "test_waits.py").write_text(test)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "pytest_timeout",
        "--timeout",
        "1",
        "-c",
        os.devnull,
        str(tmp_path),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Timeout (>1.0s)" in done.stdout
