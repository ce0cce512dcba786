"""The documentation: plain English, few words, no name of a missing page, and the papers of all methods cited."""

import re

import pytest
from common import ROOT

import timm_moe

DOCS = sorted((ROOT / "docs").glob("*.md"))
#: docs/results.md is written by studies.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for page in DOCS if page.name != "results.md"),
]
#: Words that make a sentence be read twice.
RIDDLES = re.compile(r"\b(anew|those\s+of|is\s+told|has\s+none|stands(?!\s+for\b))\b", re.IGNORECASE)
#: A heading is a noun: it does not begin with a question word.
QUESTIONS = re.compile(r"^#+ (what|who|whether|which|as|of|how|where)\b.*", re.IGNORECASE | re.MULTILINE)
MOST_PAGES, MOST_WORDS = 15, 16_500


def words(*pages):
    return sum(len(page.read_text().split()) for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_riddles(page):
    text = page.read_text()
    assert [" ".join(match[0].split()) for match in RIDDLES.finditer(text)] == []
    assert QUESTIONS.findall(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)) == []


def test_the_readme_is_short_and_shows_code_at_once():
    readme = ROOT / "README.md"
    lines = readme.read_text().splitlines()
    assert words(readme) < 1000
    assert len(lines) <= 160
    assert lines.index("```python") < 30


def test_the_documentation_is_short():
    assert len(DOCS) <= MOST_PAGES
    assert words(*(page for page in DOCS if page.name != "results.md")) < MOST_WORDS
    assert words(ROOT / "CONTRIBUTING.md") < 1500


def test_all_pages_that_are_named_are_there():
    """In docstrings, messages and comments."""
    folders = ("timm_moe", "studies", "examples", "benchmarks")
    files = [ROOT / "timm_moe_cli.py", *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    named = {(file.name, name) for file in files for name in re.findall(r"docs/[\w/-]+\.md", file.read_text())}
    assert named
    assert [(file, name) for file, name in named if not (ROOT / name).is_file()] == []


def test_all_files_that_pages_name_are_there():
    named = {(page.name, name) for page in PAGES for name in re.findall(r"`(\w+/[\w/]+\.py)`", page.read_text())}
    assert named
    folders = (ROOT, ROOT / "timm_moe")
    assert [(page, name) for page, name in named if not any((folder / name).is_file() for folder in folders)] == []


def test_the_citation_names_the_version_and_the_papers_of_the_methods():
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {timm_moe.__version__}\n" in cited
    methods = [page.read_text() for page in DOCS if f"images/concept_{page.stem}.svg" in page.read_text()]
    papers = {re.search(r"arxiv\.org/abs/([\d.]+)", text)[1] for text in methods}
    assert papers == set(re.findall(r"arxiv\.org/abs/([\d.]+)", cited))
    assert len(papers) == 6
