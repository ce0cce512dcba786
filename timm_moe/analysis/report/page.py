"""The page itself: one file of HTML that needs no network, made of sections, and they of parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import vl_convert
from jinja2 import Environment

from ...version import __version__

#: Black or white lines and text of a chart take the colour of the page's text.
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor"}
CONFIG = {
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {
        **_TEXT,
        "tickColor": "currentColor",
        "domainColor": "currentColor",
        "gridColor": "#88888855",
    },
    "legend": {**_TEXT, "orient": "bottom", "columns": 4, "labelLimit": 320},
    "font": "system-ui, sans-serif",
}


@dataclass
class Part:
    """An answer to one question, the title."""

    title: str
    text: str = ""
    chart: dict[str, Any] | None = None  #: a Vega-Lite specification
    table: list[list[str]] | None = None  #: rows of cells, the first one the head
    routes: dict[str, Any] | None = None  #: data of a drawing by page.html or page.js


@dataclass
class Section:
    """A part of the page with a heading, the title."""

    name: str  #: its anchor
    title: str
    parts: list[Part] = field(default_factory=list)
    text: str = ""


def page(title: str, subtitle: str, sections: Sequence[Mapping[str, Section]]) -> str:
    """Return the HTML of a report.

    The parts of several models are side by side if they have the same title.

    Args:
        title: heading of the page.
        subtitle: a line below it.
        sections: for each kind of section one of each model, by the model's name; a kind without
            any is left out.
    """
    folder = files(__package__)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        subtitle=subtitle,
        sections=[
            (_heading(of_models.values()), _rows(of_models)) for of_models in sections if of_models
        ],
        several=any(len(of_models) > 1 for of_models in sections),
        config=CONFIG,
        version=__version__,
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=folder.joinpath("page.js").read_text(encoding="utf-8"),
        library=chart_library(),
    )


def _heading(sections: Iterable[Section]) -> Section:
    """Return the section whose title and text stand above those of several models.

    The text explains words of the parts, so it is there if one of them needs it.
    """
    return max(sections, key=lambda section: bool(section.text))


@cache
def chart_library() -> str:
    """Return the JavaScript that draws charts.

    The first call starts V8, which ends the process if memory is short.
    """
    # The library's stub does not know that its argument has a default.
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]
    return bundle


def _rows(sections: Mapping[str, Section]) -> dict[str, list[tuple[str, Part]]]:
    """Group the parts by their titles, each with the name of its model."""
    rows: dict[str, list[tuple[str, Part]]] = {}
    for name, section in sections.items():
        for part in section.parts:
            rows.setdefault(part.title, []).append((name, part))
    return rows
