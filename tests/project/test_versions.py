"""The versions that the project promises: the same wherever they are named, and tested."""

import re

import versions
from common import ROOT

PROMISED = dict(re.findall(r'"(timm|torch)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))


def test_the_oldest_versions_are_the_same_everywhere():
    readme, package, page = (
        (ROOT / name).read_text()
        for name in ("README.md", "timm_moe/registration.py", "docs/compatibility.md")
    )
    assert f"timm {PROMISED['timm']}, torch {PROMISED['torch']} or newer" in readme
    assert f"needs timm {PROMISED['timm']} or newer" in package
    assert f"timm ≥ {PROMISED['timm']} and torch ≥ {PROMISED['torch']} are required" in page


def test_the_oldest_versions_passed_the_suite():
    tested = [
        dict(zip(versions.COLUMNS, row, strict=True))
        for row in versions.rows(versions.PAGE.read_text())
    ]
    oldest = [
        row
        for row in tested
        if (row["timm"], row["torch"]) == (PROMISED["timm"], f"{PROMISED['torch']}.0")
    ]
    assert oldest
    assert {row["failed"] for row in tested} == {"0"}


def test_a_run_replaces_the_row_of_its_versions():
    row = [*versions.installed(), "no", "3", "1", "2", "2026-01-01"]
    older = ["3.10.1", "2.2.0", *row[2:]]
    page = versions.with_row(versions.with_row(versions.HEAD, row), older)
    assert versions.rows(page) == [older, row]
    again = [*row[:-4], "4", "0", "2", "2026-01-02"]
    assert versions.rows(versions.with_row(page, again)) == [older, again]
