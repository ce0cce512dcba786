"""The tutorials run from top to bottom, and the committed outputs are from such a run.

``python tests/project/test_tutorials.py [NAME ...]`` runs them and writes their outputs into the
files.
"""

import base64
import resource
import sys
import tempfile
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

pytestmark = [pytest.mark.ci]

TUTORIALS = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.ipynb"))
NAMES = ["dense_to_vmoe_and_back", "ensemble_in_one_model", "ewa_in_ten_minutes"]
#: Seconds of CPU time that a tutorial may take.
LIMIT = 120
#: Largest size of a figure, in bytes.
LARGEST_FIGURE = 100_000


def execute(file, folder):
    """Run a notebook in a folder; return it with the seconds of CPU time of all its processes."""
    notebook = nbformat.read(file, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = dict(timeout=600, kernel_name="python3", record_timing=False, coalesce_streams=True)
    # Or raises.
    nbclient.NotebookClient(
        notebook, resources={"metadata": {"path": str(folder)}}, **options
    ).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return notebook, after.ru_utime - before.ru_utime


def without_traces(notebook):
    """Remove traces of the machine and the editor, so that a diff shows real changes only."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell):
    """Return the kinds of output of a cell, without warnings, which differ by version."""
    kinds = [
        sorted(output["data"]) if "data" in output else output.get("name", "error")
        for output in cell.outputs
    ]
    return [kind for kind in kinds if kind != "stderr"]


def test_all_tutorials_are_here():
    assert [file.stem for file in TUTORIALS] == NAMES


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_a_tutorial_runs(file, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    committed = nbformat.read(file, as_version=4)
    notebook, seconds = execute(file, tmp_path)
    assert seconds < LIMIT
    assert [kinds(cell) for cell in code_cells(notebook)] == [
        kinds(cell) for cell in code_cells(committed)
    ]


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_a_tutorial_is_committed_with_its_outputs(file):
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    # No warnings.
    assert {output.get("name", output.output_type) for output in outputs} == {
        "stdout",
        "display_data",
    }
    figures = [base64.b64decode(output.data["image/png"]) for output in outputs if "data" in output]
    assert max(map(len, figures)) <= LARGEST_FIGURE


@pytest.mark.parametrize("file", TUTORIALS, ids=lambda file: file.stem)
def test_a_tutorial_tells_nothing_of_a_machine(file):
    notebook = nbformat.read(file, as_version=4)
    assert without_traces(nbformat.from_dict(notebook)) == notebook
    text = file.read_text()
    for path in (Path.home(), tempfile.gettempdir(), sys.prefix, Path.cwd()):
        assert str(path) not in text


if __name__ == "__main__":
    for file in TUTORIALS:
        if len(sys.argv) == 1 or file.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as folder:
                notebook, seconds = execute(file, folder)
            nbformat.write(without_traces(notebook), file)
            print(f"{file.stem}: {seconds:.0f} s")
