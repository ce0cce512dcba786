"""Run the default test suite, and write the result to docs/generated/versions.md.

The command is ``python tests/versions.py``. The result is in the row of the installed versions.
"""

import os
import re
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs/generated/versions.md"
LIBRARIES = ("torch", "timm", "transformers", "accelerate", "lightning", "peft")
COLUMNS = ("Python", *LIBRARIES, "train.py of", "passed", "failed", "skipped", "date")
HEAD = f"""# Versions that were tested

Each row is a run of the default test suite on CPUs, with these versions. `python tests/versions.py`
writes this page: it runs the suite and replaces the row of the installed versions. With
TIMM_SCRIPTS=FOLDER, timm's own `train.py` and `validate.py` run too, of the version that the folder
is named after. Skipped are tests of what a machine or an older version lacks. The number of tests
changes with the commit: since 26 November 2026 many cases are in the longer suite, which these rows
leave out. So compare failures only.

| {" | ".join(COLUMNS)} |
|{"---|" * len(COLUMNS)}
"""


class Counts:
    """Plugin of pytest that counts the tests by their outcome."""

    def pytest_terminal_summary(self, terminalreporter):
        number = {name: len(reports) for name, reports in terminalreporter.stats.items()}
        failed = number.get("failed", 0) + number.get("error", 0)
        self.cells = [
            str(count) for count in (number.get("passed", 0), failed, number.get("skipped", 0))
        ]


def installed():
    """List the versions of Python and the libraries.

    The name of a build, as in 2.8.0+cpu, is left out.
    """
    return [
        ".".join(map(str, sys.version_info[:3])),
        *(version(name).partition("+")[0] for name in LIBRARIES),
    ]


def rows(page):
    """List the rows of a page, each a list of cells."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| \d", line)]


def with_row(page, row):
    """Replace the row of the same versions on a page, or add it; the newest torch comes last."""
    known = {tuple(old[: 1 + len(LIBRARIES)]): old for old in [*rows(page), row]}
    in_order = sorted(
        known.values(),
        key=lambda cells: [[*map(int, re.findall(r"\d+", cell))] for cell in cells[1:3]],
    )
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in in_order)


def main():
    counts = Counts()
    status = pytest.main(["-n", "auto"], plugins=[counts])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(status)
    scripts = Path(os.environ.get("TIMM_SCRIPTS") or "none").name
    row = [*installed(), scripts, *counts.cells, date.today().isoformat()]
    page = PAGE.read_text() if PAGE.is_file() else HEAD
    PAGE.write_text(with_row(page, row))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
