"""The charts of a report, as Vega-Lite specifications: plain data in, a chart out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from ..colours import COLOURS

#: Ratio of the largest to the smallest value above which an axis is logarithmic.
LOGARITHMIC_FROM = 100
#: Most columns of a heat map that has a number in each cell.
NUMBERED = 8
#: Most steps of an axis of epochs.
TICKS = 8
Rows = Sequence[Mapping[str, Any]]


def lines(rows: Rows, series: str, y_title: str | list[str], percent: bool = False) -> alt.Chart:
    """Draw the ``value`` of each series over the epochs.

    Positive values of very different sizes have a logarithmic axis.
    """
    values = [row["value"] for row in rows]
    logarithmic = min(values) > 0 and max(values) > LOGARITHMIC_FROM * min(values)
    axis = alt.Axis(format="%" if percent else "~g" if logarithmic else "~f")
    scale = alt.Scale(type="log" if logarithmic else "linear")
    legend = alt.Legend() if len({row[series] for row in rows}) > 1 else None
    first, last = min(row["epoch"] for row in rows), max(row["epoch"] for row in rows)
    ticks = list(range(first, last + 1, max(1, math.ceil((last - first) / TICKS))))
    marks = _chart(rows, height=240).mark_line(point=True)
    return marks.encode(
        x=alt.X("epoch:Q", title="epoch", axis=alt.Axis(format="d", values=ticks)),
        y=alt.Y("value:Q", title=y_title, axis=axis, scale=scale),
        **_series(series, legend),
        tooltip=[
            f"{series}:N",
            "epoch:Q",
            alt.Tooltip("value:Q", format=".1%" if percent else ".4"),
        ],
    )


def loads(rows: Rows, even: float | None) -> Any:
    """Draw a bar for the ``share`` of each ``expert``, and a dashed line at an even share."""
    bars = alt.Chart().mark_bar(color=COLOURS[0])
    bars = bars.encode(
        x=alt.X("expert:O", title="expert", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("share:Q", title="share of the choices", axis=alt.Axis(format="%")),
        tooltip=["expert:O", alt.Tooltip("share:Q", format=".1%")],
    )
    layers = [bars]
    if even is not None:
        line = alt.MarkDef("rule", color=COLOURS[4], strokeDash=[4, 4], strokeWidth=2, aria=False)
        layers.append(_chart([{}]).properties(mark=line).encode(y=alt.datum(even)))
    # The bars have no data of their own, so that they show the choice from the whole chart's data.
    return alt.layer(*layers, data=alt.Data(values=list(rows))).properties(
        width="container", height=240
    )


def heatmap(rows: Rows) -> Any:
    """Draw a cell for each pair of an ``expert`` and an ``other``: their cosine, the ``value``.

    A larger value is darker. Small maps have the numbers in their cells.
    """
    colours = alt.Scale(scheme="cividis", reverse=True, domain=[0, 1], clamp=True)
    # The cells have no data of their own, so that they show the choice from the whole chart's data.
    marks = alt.Chart().encode(
        x=alt.X("other:O", title="expert", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("expert:O", title="expert"),
    )
    legend = alt.Legend(format=".2")
    cells = marks.mark_rect().encode(
        color=alt.Color("value:Q", title="cosine", scale=colours, legend=legend),
        tooltip=["expert:O", "other:O", alt.Tooltip("value:Q", format=".3")],
    )
    layers = [cells]
    if len({row["other"] for row in rows}) <= NUMBERED:
        on_dark = alt.condition("datum.value > 0.5", alt.value("white"), alt.value("black"))
        number = alt.Text("value:Q", format=".2f")
        layers.append(marks.mark_text(aria=False).encode(text=number, color=on_dark))
    return alt.layer(*layers, data=alt.Data(values=list(rows))).properties(
        width="container", height=300
    )


def histogram(rows: Rows, series: str, x_title: str, y_title: str) -> alt.Chart:
    """Draw a step line of the ``share`` at each ``value`` for each series."""
    marks = _chart(rows, height=240).mark_line(interpolate="step")
    return marks.encode(
        x=alt.X("value:Q", title=x_title, axis=alt.Axis(format="%")),
        y=alt.Y("share:Q", title=y_title, axis=alt.Axis(format="%")),
        **_series(series),
        tooltip=[
            f"{series}:N",
            alt.Tooltip("value:Q", format=".0%"),
            alt.Tooltip("share:Q", format=".1%"),
        ],
    )


def reliability(rows: Rows) -> Any:
    """Draw accuracy against confidence in bins.

    Beside it is the diagonal of a perfectly calibrated classifier.
    """
    ends = _chart([{"confidence": end, "accuracy": end} for end in (0, 1)])
    diagonal = ends.mark_line(color=COLOURS[6], strokeDash=[4, 4]).encode(
        x="confidence:Q", y="accuracy:Q"
    )
    percent = alt.Axis(format="%")
    shares = [alt.Tooltip(f"{name}:Q", format=".1%") for name in ("confidence", "accuracy")]
    points = _chart(rows).mark_line(point=True)
    points = points.encode(
        x=alt.X("confidence:Q", title="confidence (mean of the bin)", axis=percent),
        y=alt.Y("accuracy:Q", title="accuracy", axis=percent, scale=alt.Scale(domain=[0, 1])),
        **_series("model"),
        tooltip=["model:N", *shares, "images:Q"],
    )
    return alt.layer(diagonal, points).properties(width="container", height=280)


def chosen(chart: Any, field: str, label: str) -> Any:
    """Let the reader choose the value of a field that the chart shows.

    The values are in a drop-down list. At first the last one is chosen.
    """
    options = list(dict.fromkeys(row[field] for row in chart.data.values))
    if len(options) < 2:
        return chart
    choice = alt.param(
        name=field, value=options[-1], bind=alt.binding_select(options=options, name=f"{label} ")
    )
    return chart.add_params(choice).transform_filter(f"datum.{field} === {field}")


def _chart(rows: Rows, height: int | None = None) -> alt.Chart:
    chart = alt.Chart(alt.Data(values=list(rows)))
    return chart if height is None else chart.properties(width="container", height=height)


def _series(series: str, legend: Any = alt.Undefined) -> dict[str, Any]:
    """Return a colour and a dash for each series; the same legend explains both."""
    colours = alt.Scale(range=list(COLOURS))
    return {
        "color": alt.Color(f"{series}:N", title=series, scale=colours, legend=legend),
        "strokeDash": alt.StrokeDash(f"{series}:N", title=series, legend=legend),
    }
