"""The programmes of tests/stress (see docs/compatibility.md).

They are small in CI, whole with ``-m stress``.
"""

import pytest
from common import ROOT
from processes import run_script
from train_script import needs_scripts

PROGRAMMES = ROOT / "tests/stress"


pytestmark = pytest.mark.ci


def whole(*values):
    return pytest.param(*values, marks=pytest.mark.stress)


def run(name, *arguments):
    """In a process of its own: the programmes fork, which a process with threads must not."""
    done = run_script(PROGRAMMES / f"{name}.py", *arguments)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("number", [69, whole(1035)])
def test_damaged_and_hostile_files(number):
    assert f"| all |  | {number} |" in run("damage", "--number", number)


@pytest.mark.parametrize(("number", "only"), [(0, "export --overwrite"), whole(20, "")])
def test_killed_while_writing(number, only):
    output = run("kill_writing", "--random", number, "--only", only)
    assert "no config.json 2" in output
    assert "export --overwrite, two at once: one of them whole" in output


@needs_scripts
@pytest.mark.parametrize(("kills", "epochs"), [(2, 3), whole(20, 40)])
def test_killed_while_training(kills, epochs):
    assert f"updates at the end: {epochs * 4}" in run(
        "kill_training", "--kills", kills, "--epochs", epochs
    )


@pytest.mark.parametrize(
    "arguments", [("--steps", 10, "--models", "EWA", "pBE"), whole(("--steps", 2000))]
)
def test_training_leaves_memory_flat(arguments):
    assert "growing: none" in run("memory", *arguments)
