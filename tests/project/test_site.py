"""The documentation as a site.

There is no dead link, no other host and no error in a browser, and every page is within two clicks.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from common import ROOT

import timm_moe
from timm_moe_cli import parser

pytestmark = [pytest.mark.ci]

START = "index.html"
#: The attribute with the address that a tag loads when the page opens.
ASKED = {
    "img": "src",
    "script": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "link": "href",
}
#: The addresses of the visible links of a page.
VISIBLE = """
const seen = link => link.checkVisibility({visibilityProperty: true, opacityProperty: true});
return [...document.links].filter(seen).map(link => link.href);
"""


class Page(HTMLParser):
    """Links of a page, addresses that it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.asked, self.ids = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found.get("id"), found.get("name")} - {None}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(ASKED.get(tag)):
            self.asked.append(found[ASKED[tag]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f'{name} is not installed: pip install -e ".[docs]".')
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    """Pages by their path in the site, without 404.html, which only a server shows."""
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.html")}
    return {
        path: Page(file.read_text(encoding="utf-8"))
        for path, file in files.items()
        if path != "404.html"
    }


def target(page, address):
    """Return the path in the site and the anchor of an address on a page; None for another host."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return None, None
    path = os.path.normpath(Path(page).parent / unquote(parts.path)) if parts.path else page
    return path, unquote(parts.fragment)


def test_no_link_is_dead_and_no_image_is_missing(folder, pages):
    dead = set()
    for path, page in pages.items():
        for address in [*page.links, *page.asked]:
            there, place = target(path, address)
            if there is None:
                continue
            is_file = (folder / there).is_file()
            if not is_file or (place and there in pages and place not in pages[there].ids):
                dead.add((path, address))
    assert sorted(dead) == []


def test_no_source_of_the_pages_is_copied(folder):
    """Programs and tables in docs/ write the pages, which show what there is to see."""
    copied = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    written = {file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*")}
    kinds = {Path(path).suffix for path in copied & written}
    assert kinds <= {".css", ".js", ".ipynb", ".png", ".svg"}


def test_no_link_runs_a_script(pages):
    schemes = {urlsplit(address).scheme for page in pages.values() for address in page.links}
    assert schemes <= {"", "http", "https"}


def within_two_clicks(links_of):
    first = {START, *links_of(START)}
    return first.union(*(links_of(page) for page in first))


def test_every_page_is_two_clicks_from_the_first(pages):
    def links_of(path):
        return {target(path, address)[0] for address in pages[path].links} & set(pages)

    assert set(pages) - within_two_clicks(links_of) == set()
    assert len(pages) > 40


def test_every_package_and_command_is_in_the_reference(pages):
    (commands,) = [action for action in parser()._actions if action.dest == "==SUPPRESS=="]
    assert set(commands.choices) <= pages["reference/cli.html"].ids
    documented = set().union(*(page.ids for page in pages.values()))
    packages = [file.parent for file in (ROOT / "timm_moe").glob("*/__init__.py")]
    assert {f"timm_moe.{package.name}" for package in packages} <= documented
    assert {
        "timm_moe.analysis.report.write_report",
        "timm_moe.analysis.routes.statistics",
    } <= documented
    modules = ("__version__", "checkpoints", "models")
    assert {f"timm_moe.{name}" for name in timm_moe.__all__ if name not in modules} <= documented


def test_no_page_asks_another_host(folder, pages):
    asked = {(path, address) for path, page in pages.items() for address in page.asked}
    assert [
        address
        for address in asked
        if target(*address)[0] is None and not address[1].startswith("data:")
    ] == []
    for file in folder.rglob("*.css"):
        addresses = re.findall(
            r"url\(\s*[\"']?([^\"')]+)|@import\s*[\"']([^\"']+)", file.read_text(encoding="utf-8")
        )
        assert [
            address for pair in addresses for address in pair if re.match(r"(https?:)?//", address)
        ] == [], file


def test_a_notebook_becomes_a_page():
    pytest.importorskip("mkdocs", reason='mkdocs is not installed: pip install -e ".[docs]".')
    notebook = runpy.run_path(str(ROOT / "mkdocs_hooks.py"))["notebook"]
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mtwo\x1b[0m\n", "three\n"]},
        {
            "output_type": "display_data",
            "data": {"image/png": "AAAA\n", "text/plain": ["<Figure>"]},
        },
        {"output_type": "execute_result", "data": {"text/plain": ["4"]}},
        {"output_type": "error", "ename": "ValueError", "evalue": "five", "traceback": []},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# One\n", "[EWA](../ewa.md)"]},
        {"cell_type": "code", "source": ["print()\n", "plot()"], "outputs": outputs},
    ]
    blocks = notebook({"cells": cells}).split("\n\n")
    assert blocks[:2] == ["# One\n[EWA](../ewa.md)", "~~~python\nprint()\nplot()\n~~~"]
    assert blocks[2:4] == ["~~~text\ntwo\nthree\n~~~", "![output](data:image/png;base64,AAAA)"]
    assert blocks[4:] == ["~~~text\n4\n~~~", "~~~text\nValueError: five\n~~~"]


def test_pages_open_as_files_without_error_or_request_and_what_is_seen_leads_everywhere(
    browser, folder, pages
):
    """Only visible links count.

    test_every_page_is_two_clicks_from_the_first counts folded ones too.
    """
    seen = {}
    for path in pages:
        browser.get((folder / path).as_uri())
        assert browser.get_log("browser") == [], path
        events = [
            json.loads(entry["message"])["message"] for entry in browser.get_log("performance")
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert [
            url for url in asked if not url.startswith(("file:", "data:", "blob:", "about:"))
        ] == [], path
        here = {unquote(urlsplit(url).path) for url in browser.execute_script(VISIBLE)}
        seen[path] = {other for other in pages if str(folder / other) in here}
    assert set(pages) - within_two_clicks(seen.__getitem__) == set()


@pytest.mark.parametrize("width", [390, 1280])
def test_commands_and_the_picture_fit_a_phone_and_a_laptop(browser, folder, width):
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 500)
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get((folder / START).as_uri())
        too_wide = """
        const commands = [...document.querySelectorAll('.language-bash pre > code')];
        const images = [...document.querySelectorAll('.md-typeset img')];
        return [
            commands.length,
            commands.filter(code => code.scrollWidth > code.clientWidth + 1).length,
            images.filter(image => image.getBoundingClientRect().right > innerWidth).length,
        ];
        """
        commands, cut, images = browser.execute_script(too_wide)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert commands > 5
    assert (cut, images) == (0, 0)


def test_the_search_finds_a_word_without_a_server(browser, folder):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((folder / START).as_uri())
    field = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    field.click()
    field.send_keys("upcycling")
    results = WebDriverWait(browser, 30).until(
        lambda b: b.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
    )
    assert any("upcycle.html" in result.get_attribute("href") for result in results)
