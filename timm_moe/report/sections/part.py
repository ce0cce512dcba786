"""What a report is made of: sections with a heading, and in them parts to look at."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Part:
    """Something to look at.

    Attributes:
        title: says what to see in it.
        text: sentences below.
        chart: a Vega-Lite specification.
        table: rows of cells, the first the head.
        routes: what the page draws of a layer, see the page's script.
    """

    title: str
    text: str = ""
    chart: dict[str, Any] | None = None
    table: list[list[str]] | None = None
    routes: dict[str, Any] | None = None


@dataclass
class Section:
    """A part of the page with a heading of its own.

    Attributes:
        name: its anchor.
        title: its heading.
        parts: in their order.
        text: sentences below the heading.
    """

    name: str
    title: str
    parts: list[Part] = field(default_factory=list)
    text: str = ""
