"""The documentation: no name of a missing page or file, and the papers of all models cited."""

import re

from common import ROOT

import timm_moe
from timm_moe.models.publications import PUBLICATIONS

DOCS = sorted((ROOT / "docs").glob("*.md"))
#: docs/results.md is written by studies.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in DOCS if page.name != "results.md"),
]


def test_all_pages_that_are_named_are_there():
    """In docstrings, messages and comments."""
    folders = ("timm_moe", "studies", "examples", "benchmarks")
    files = [
        ROOT / "timm_moe_cli.py",
        *(file for folder in folders for file in (ROOT / folder).rglob("*.py")),
    ]
    named = {
        (file.name, name)
        for file in files
        for name in re.findall(r"docs/[\w/-]+\.md", file.read_text())
    }
    assert named
    assert [(file, name) for file, name in named if not (ROOT / name).is_file()] == []


def test_all_files_that_pages_name_are_there():
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())
    }
    assert named
    folders = (ROOT, ROOT / "timm_moe")
    assert [
        (page, name)
        for page, name in named
        if not any((folder / name).is_file() for folder in folders)
    ] == []


def test_the_citation_names_the_version_and_the_papers_of_the_models():
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {timm_moe.__version__}\n" in cited
    papers = {(paper.title, paper.arxiv) for paper in PUBLICATIONS.values()}
    titles = re.findall(r'^    title: "(.+)"', cited, re.MULTILINE)
    numbers = re.findall(r"arxiv\.org/abs/([\d.]+)", cited)
    assert set(zip(titles, numbers, strict=True)) == papers
    methods = [
        page.read_text() for page in DOCS if f"images/concept_{page.stem}.svg" in page.read_text()
    ]
    assert methods
    assert {re.search(r"arxiv\.org/abs/([\d.]+)", text)[1] for text in methods} <= set(numbers)
