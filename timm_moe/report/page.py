"""The page itself: one file of HTML that needs no network."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import vl_convert
from jinja2 import Environment

from ..version import __version__
from .sections import Section

#: Of all charts: what is black or white by default takes the colour of the page's text.
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor"}
CONFIG = {
    "background": None,
    "view": {"stroke": "transparent"},
    "axis": {**_TEXT, "tickColor": "currentColor", "domainColor": "currentColor", "gridColor": "#88888855"},
    "legend": {**_TEXT, "orient": "bottom", "columns": 4},
    "font": "system-ui, sans-serif",
}


def page(title: str, subtitle: str, groups: Sequence[tuple[str, Sequence[Section]]]) -> str:
    """The HTML of a report.

    Args:
        title: heading of the page.
        subtitle: a line below it.
        groups: a name, empty where there is only one, and the sections below it.
    """
    folder = files(__package__)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data"] = _data
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        title=title,
        subtitle=subtitle,
        groups=groups,
        config=CONFIG,
        version=__version__,
        style=folder.joinpath("page.css").read_text(encoding="utf-8"),
        script=folder.joinpath("page.js").read_text(encoding="utf-8"),
        library=vl_convert.javascript_bundle(),  # type: ignore[call-arg]  # its stub knows no default
    )


def _data(value: Any) -> str:
    """JSON that may stand in a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
