"""Deviations from the papers: one page lists them, and each method's page leads to its part."""

import re

import pytest
from common import ROOT

PAGE = ROOT.joinpath("docs/deviations.md").read_text(encoding="utf-8")
SECTIONS = {
    "ewa": "EWA",
    "vmoe": "V-MoE and Switch",
    "vimoe": "ViMoE",
    "widenet": "WideNet",
    "pbe": "pBE",
    "ones": "OneS",
    "soft_moe": "Soft MoE and Expert Choice",
    "swin_moe": "Swin-MoE",
}


def test_the_page_has_a_section_for_each_method():
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == list(SECTIONS.values())


@pytest.mark.parametrize("name", SECTIONS)
def test_every_choice_on_a_methods_page_is_listed(name):
    page = ROOT.joinpath("docs", f"{name}.md").read_text(encoding="utf-8")
    section = PAGE.partition(f"\n## {SECTIONS[name]}\n")[2].partition("\n## ")[0]
    rows = section.count("\n|") - 2  # without the head
    assert page.count("*choice*") <= rows
    assert "](deviations.md#" in page
    assert f"[{name}.md]({name}.md)" in section
    for row in section.splitlines():
        if row.startswith("|") and "---" not in row:
            assert row.count("|") == 5
            assert re.search(r"\| (open|differs)[:| ]", row) or row.startswith("| what")
