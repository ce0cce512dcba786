"""The page: its size, its command, and how it is in a real browser."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from common import SMALL_VIT_KWARGS, make_model
from observations import HERE, layer_of, seen_as
from safetensors.torch import save_file

from timm_moe.analysis.data import image_folder
from timm_moe.analysis.report import write_report
from timm_moe.analysis.report.observe import SHOWN, SUREST, Observation, Patch
from timm_moe.analysis.report.page import Part, Section, page
from timm_moe.analysis.report.sections.classifier import classifier_section
from timm_moe.analysis.report.sections.routing import routing_section
from timm_moe_cli import main


def test_words_are_explained_whichever_model_needs_them():
    soft = Section("routing", "Who goes where", [Part("What does a slot mix?")])
    routed = Section(
        "routing", "Who goes where", [Part("Did any expert die?")], "A row is a patch."
    )
    for order in ({"a": soft, "b": routed}, {"b": routed, "a": soft}):
        assert "A row is a patch." in page("Title", "", [order])


@pytest.mark.ci
def test_a_thousand_classes_stay_below_ten_megabytes(tmp_path):
    classes = [f"class number {number}" for number in range(1000)]
    generator = torch.Generator().manual_seed(0)
    layers = []
    for number in range(12):
        counts = torch.randint(50, (2000, 1, 32), generator=generator)
        layer = layer_of(
            counts.tolist(), labels=[*range(1000)] * 2, classes=classes, name=f"blocks.{number}.mlp"
        )
        surest = [
            [
                # Noise packs worst.
                Patch(0.5, torch.randint(256, (3, 48, 48), generator=generator).byte(), 0)
                for _ in range(SUREST)
            ]
            for _ in range(32)
        ]
        layer = replace(
            layer,
            grid=(14, 14),
            expert_SMP=torch.randint(32, (SHOWN, 1, 196), generator=generator),
            gate_SMP=torch.rand(SHOWN, 1, 196, generator=generator),
            surest=surest,
        )
        layers.append(layer)
    seen = seen_as(layers, [0.5] * 2000, [3] * 2000, classes)
    seen.labels[:] = torch.arange(2000) % 1000
    seen.shown[:] = range(SHOWN)
    seen = Observation(
        **{
            **vars(seen),
            "shown_pixels": torch.randint(256, (SHOWN, 3, 224, 224), generator=generator).byte(),
        }
    )
    text = page("Title", "", [{"": routing_section(seen)}, {"": classifier_section({"m": seen})}])
    assert len(text) < 10 * 2**20


@pytest.mark.ci
def test_nothing_of_a_name_becomes_code(report):
    text = report.read_text()
    assert "<script><b>" not in text
    assert "&lt;script&gt;&lt;b&gt;chair" in text
    assert "\\u003cscript\\u003e\\u003cb\\u003echair" in text


def test_the_command(splits, tmp_path, capsys, monkeypatch):
    torch.manual_seed(0)
    save_file(make_model().state_dict(), tmp_path / "a.safetensors")
    save_file(make_model().state_dict(), tmp_path / "b.safetensors")
    sources = [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]
    options = [
        "--data-dir",
        str(splits),
        "-j",
        "0",
        "--device",
        "cpu",
        "--model",
        "vit_tiny_moe",
        "--num-classes",
        "5",
    ]
    options += ["--model-kwargs", *SMALL_VIT_KWARGS, "--img-size", "32"]
    assert main(["report", *sources, *options, str(tmp_path / "out")]) == 0
    assert "open it in a browser" in capsys.readouterr().out
    text = (tmp_path / "out/index.html").read_text()
    for name in ("a.safetensors", "b.safetensors"):
        assert f"<h4>{name}</h4>" in text
    assert "<h1>What the experts do: vit_tiny_moe</h1>" in text
    assert f"on 20 images of 5 classes in {splits.name}/val" in text
    assert main(["report", sources[0], str(tmp_path / "out"), *options]) == 1
    assert "index.html exists; pass --overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", sources[0], *options, str(tmp_path / "out"), "--overwritten"])
    assert "unrecognized arguments" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "altair", None)
    for name in [name for name in sys.modules if name.startswith("timm_moe.analysis.report")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", sources[0], *options, "--overwrite", str(tmp_path / "other")]) == 1
    assert "altair: pip install 'timm_moe[report]'" in capsys.readouterr().err


# --- in a browser

#: Elements that are wider than their part, where nothing around them scrolls.
STICKING_OUT = """
const out = (inner, part) => inner.right > part.right + 1 || inner.left < part.left - 1;
return [...document.querySelectorAll(".part *")]
  .filter((inner) => !inner.ownerSVGElement && !inner.parentElement.closest(".scroll"))
  .filter((inner) => inner.offsetParent !== null)
  .filter((inner) => {
    const part = inner.closest(".part");
    return out(inner.getBoundingClientRect(), part.getBoundingClientRect());
  })
  .map((inner) => inner.outerHTML.slice(0, 150));
"""


def opened(browser, report, width=1200):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get_log("performance")
    browser.get(f"file://{report}")
    browser.execute_async_script("window.drawn.then(() => arguments[0]())")
    return lambda selector: browser.find_elements("css selector", selector)


@pytest.mark.ci
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_opens_whole_without_an_error_or_a_request(browser, report, width):
    find = opened(browser, report, width)
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    headings = [heading.text for heading in find("h2")]
    assert headings == [
        "The model",
        "Who goes where",
        "How alike are the experts?",
        "The classifier",
    ]
    left, right = (figure.rect for figure in find("#routing-2 figure"))
    # Side by side where there is room.
    assert (left["y"] == right["y"]) == (left["x"] != right["x"]) == (width > 1000)
    labels = [label.get_attribute("textContent") for label in find(".role-axis-label text")]
    assert labels
    assert not any("e+" in label for label in labels)
    assert len(find(".chart svg")) == len(find(".chart")) > 5
    assert all(chart.size["width"] > 200 for chart in find(".chart svg"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(STICKING_OUT) == []
    links = [link.get_attribute("href").partition("#")[2] for link in find("nav a")]
    assert all(find(f"[id='{link}']") for link in links)


@pytest.mark.ci
def test_tables_are_sorted_and_searched_and_layers_chosen_by_keyboard(browser, report):
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    find = opened(browser, report)
    table = "#routing-2-1 "

    def column(number):
        return [
            int(row.find_elements("css selector", "td")[number].text)
            for row in find(table + "tbody tr")
        ]

    for expert in (2, 0):
        button = find(table + "thead button")[expert + 1]
        button.send_keys(Keys.ENTER)
        assert column(expert) == sorted(column(expert), reverse=True)
        assert find(table + "thead th")[expert + 1].get_attribute("aria-sort") == "descending"
        assert browser.switch_to.active_element.text == str(expert)
        browser.switch_to.active_element.send_keys(Keys.ENTER)
        assert column(expert) == sorted(column(expert))
        assert find(table + "thead th")[expert + 1].get_attribute("aria-sort") == "ascending"
    shown = [row.text for row in find(table + "tbody tr")]
    Select(find(table + "select")[0]).select_by_index(0)
    assert [row.text for row in find(table + "tbody tr")] != shown
    find(table + "input")[0].send_keys("DOL")
    assert [row.text for row in find(table + "tbody th")] == ["dolphin"]
    patches = "#routing-3-1 "

    def colours():
        return [mark.get_attribute("fill") for mark in find(patches + "rect")]

    before = colours()
    assert len(before) == SHOWN * 16
    Select(find(patches + "select")[0]).select_by_index(0)
    assert colours() != before
    assert all(mark.is_displayed() for mark in find(patches + "rect"))
    find(patches + "input")[0].send_keys(Keys.SPACE)
    assert not any(mark.is_displayed() for mark in find(patches + "rect"))


@pytest.mark.ci
def test_the_bars_are_those_of_the_layer_that_is_chosen(browser, report):
    from selenium.webdriver.support.ui import Select

    find = opened(browser, report)

    def shares():
        """Told to screen readers, of the first model."""
        labels = [bar.get_attribute("aria-label") for bar in find("#routing-1-1 .mark-rect path")]
        return [float(label.rpartition(": ")[2].removesuffix("%")) for label in labels]

    both = []
    for layer in range(2):
        Select(find("#routing-1-1 select")[0]).select_by_index(layer)
        both.append(shares())
        assert len(both[-1]) == 4
        assert sum(both[-1]) == pytest.approx(100, abs=0.3)
    assert both[0] != both[1]
    assert len(find("#routing-1-1 .role-mark.mark-rule line")) == 1


@pytest.mark.ci
@pytest.mark.parametrize("dark", [False, True])
def test_everyone_can_read_it(browser, report, dark):
    from axe_core_python.selenium import Axe

    find = opened(browser, report)
    if (find("html")[0].get_attribute("data-theme") == "dark") != dark:
        find("#theme")[0].click()
    assert find("html")[0].get_attribute("data-theme") == ("dark" if dark else "light")
    found = Axe().run(browser)["violations"]
    assert [(violation["id"], violation["nodes"][0]["html"]) for violation in found] == []


def test_files_are_read_before_the_images_are_run_on(splits, tmp_path, monkeypatch):
    def damaged(*_):
        raise ValueError("damaged")

    monkeypatch.setattr("timm_moe.analysis.report.history_of", damaged)
    monkeypatch.setattr(
        "timm_moe.analysis.report.observe", lambda *_: pytest.fail("The images were run on.")
    )
    with pytest.raises(ValueError, match="damaged"):
        write_report(
            [make_model("vit_tiny_moe", num_experts=4)],
            image_folder(splits),
            tmp_path,
            inference=HERE,
        )
