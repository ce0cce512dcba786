"""The drawings of the documentation.

All of them stand on their pages, and nothing in them covers anything else.
"""

import sys
from importlib import import_module
from itertools import combinations

import pytest
from common import ROOT

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.text import Text

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
drawings = import_module("drawings")


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_a_drawing_stands_on_its_page(name):
    page = DOCS / ("../README.md" if name == "way" else f"{name.removeprefix('concept_')}.md")
    assert f"images/{name}.svg)" in page.read_text()
    assert (DOCS / f"images/{name}.svg").is_file()


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_words_are_inside_and_apart(name):
    figure = Figure(figsize=drawings.SIZE, layout="constrained")
    drawings.DRAWINGS[name](figure)
    figure.draw_without_rendering()
    hidden = {
        text
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for text in axis.findobj(Text)
    }
    words = [text for text in set(figure.findobj(Text)) - hidden if text.get_text().strip()]
    places = [text.get_window_extent() for text in words]
    assert len(places) > 5
    for word, place in zip(words, places, strict=True):
        inside = (
            place.x0 >= 0
            and place.y0 >= 0
            and place.x1 <= figure.bbox.x1
            and place.y1 <= figure.bbox.y1
        )
        assert inside, word.get_text()
    for (word, place), (other, elsewhere) in combinations(zip(words, places, strict=True), 2):
        assert not place.overlaps(elsewhere), f"{word.get_text()} covers {other.get_text()}"
