"""The page itself: one file of HTML that needs no network."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import vl_convert
from jinja2 import Environment

from ..version import __version__
from .sections import Part, Section

#: Of all charts: what is black or white by default takes the colour of the page's text.
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor"}
CONFIG = {
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {**_TEXT, "tickColor": "currentColor", "domainColor": "currentColor", "gridColor": "#88888855"},
    "legend": {**_TEXT, "orient": "bottom", "columns": 4, "labelLimit": 320},
    "font": "system-ui, sans-serif",
}


@dataclass(frozen=True)
class Comparison:
    """The same section of several models, side by side.

    Attributes:
        name: its anchor.
        title: its heading.
        text: sentences below the heading.
        rows: titles of parts, and below each the part of every model that has it, with the model's name.
    """

    name: str
    title: str
    text: str
    rows: dict[str, list[tuple[str, Part]]]


def compare(sections: Mapping[str, Section]) -> Comparison:
    """Put parts with the same title side by side.

    Args:
        sections: one kind of section of some models, by the names of the models.
    """
    rows: dict[str, list[tuple[str, Part]]] = {}
    for name, section in sections.items():
        for part in section.parts:
            rows.setdefault(part.title, []).append((name, part))
    first = next(iter(sections.values()))
    return Comparison(first.name, first.title, first.text, rows)


def page(title: str, subtitle: str, sections: Sequence[Mapping[str, Section]]) -> str:
    """The HTML of a report.

    Args:
        title: heading of the page.
        subtitle: a line below it.
        sections: for each kind of section those of the models, by the models' names; empty ones are left out.
    """
    folder = files(__package__)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data"] = _data
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        subtitle=subtitle,
        sections=[compare(of_models) for of_models in sections if of_models],
        several=any(len(of_models) > 1 for of_models in sections),
        config=CONFIG,
        version=__version__,
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=folder.joinpath("page.js").read_text(encoding="utf-8"),
        library=vl_convert.javascript_bundle(),  # type: ignore[call-arg]  # its stub knows no default
    )


def _data(value: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
