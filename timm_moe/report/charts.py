"""The charts of a report, as Vega-Lite specifications: plain data in, a chart out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from ..drawings import ALL_COLOURS

#: Ratio of the largest to the smallest value above which an axis is logarithmic.
WIDE = 100
#: Steps of an axis of whole numbers.
TICKS = 8
Rows = Sequence[Mapping[str, Any]]


def lines(rows: Rows, x: str, y: str, series: str, *, x_title: str, y_title: str, percent: bool = False) -> alt.Chart:
    """A line for each series over whole numbers; values of very different sizes, all above 0, have a log axis."""
    values = [row[y] for row in rows]
    logarithmic = min(values) > 0 and max(values) > WIDE * min(values)
    axis = alt.Axis(format="%" if percent else "~g" if logarithmic else "~f")
    legend = alt.Legend() if len({row[series] for row in rows}) > 1 else None
    numbers = alt.Axis(format="d", values=_ticks([row[x] for row in rows]))
    return (
        _chart(rows)
        .mark_line(point=True)
        .encode(
            x=alt.X(f"{x}:Q", title=x_title, axis=numbers),
            y=alt.Y(f"{y}:Q", title=y_title, axis=axis, scale=alt.Scale(type="log" if logarithmic else "linear")),
            color=_colour(series).legend(legend),
            strokeDash=alt.StrokeDash(f"{series}:N", title=_title(series)).legend(legend),
            tooltip=[f"{series}:N", f"{x}:Q", alt.Tooltip(f"{y}:Q", format=".1%" if percent else ".4")],
        )
        .properties(width="container", height=240)
    )


def bars(
    rows: Rows, x: str, y: str, *, x_title: str, y_title: str, percent: bool = False, rule: float | None = None
) -> Any:
    """A bar for each x; a rule across at a value."""
    axis = alt.Axis(format="%") if percent else alt.Axis()
    layers = [
        alt.Chart()
        .mark_bar(color=ALL_COLOURS[0])
        .encode(
            x=alt.X(f"{x}:O", title=x_title, axis=alt.Axis(labelAngle=0)),
            y=alt.Y(f"{y}:Q", title=y_title, axis=axis),
            tooltip=[f"{x}:O", alt.Tooltip(f"{y}:Q", format=".1%" if percent else ".4")],
        )
    ]
    if rule is not None:
        line = alt.MarkDef("rule", color=ALL_COLOURS[4], strokeDash=[4, 4], strokeWidth=2, aria=False)
        layers.append(_chart([{}]).properties(mark=line).encode(y=alt.datum(rule)))
    # the bars have no data of their own: what is chosen of the chart's is what they show
    return alt.layer(*layers, data=alt.Data(values=list(rows))).properties(width="container", height=240)


def heatmap(
    rows: Rows,
    x: str,
    y: str,
    value: str,
    *,
    x_title: str,
    y_title: str,
    value_title: str,
    highest: float,
    percent: bool = False,
) -> alt.Chart:
    """A cell for each pair; darker is more."""
    return (
        _chart(rows)
        .mark_rect()
        .encode(
            x=alt.X(f"{x}:O", title=x_title, axis=alt.Axis(labelAngle=0)),
            y=alt.Y(f"{y}:O", title=y_title),
            color=alt.Color(
                f"{value}:Q",
                title=value_title,
                scale=alt.Scale(scheme="cividis", reverse=True, domain=[0, highest], clamp=True),
                legend=alt.Legend(format="%" if percent else ".2"),
            ),
            tooltip=[f"{y}:O", f"{x}:O", alt.Tooltip(f"{value}:Q", format=".1%" if percent else ".3")],
        )
        .properties(width="container", height=300)
    )


def histogram(rows: Rows, x: str, y: str, series: str, *, x_title: str, y_title: str) -> alt.Chart:
    """A step line of shares for each series."""
    return (
        _chart(rows)
        .mark_line(interpolate="step")
        .encode(
            x=alt.X(f"{x}:Q", title=x_title, axis=alt.Axis(format="%")),
            y=alt.Y(f"{y}:Q", title=y_title, axis=alt.Axis(format="%")),
            color=_colour(series),
            strokeDash=alt.StrokeDash(f"{series}:N", title=_title(series)),
            tooltip=[f"{series}:N", alt.Tooltip(f"{x}:Q", format=".0%"), alt.Tooltip(f"{y}:Q", format=".1%")],
        )
        .properties(width="container", height=240)
    )


def reliability(rows: Rows) -> Any:
    """Accuracy against confidence in bins, beside the diagonal of a classifier that is as sure as it is right."""
    ends = [{"confidence": end, "accuracy": end} for end in (0, 1)]
    diagonal = _chart(ends).mark_line(color=ALL_COLOURS[6], strokeDash=[4, 4]).encode(x="confidence:Q", y="accuracy:Q")
    points = (
        _chart(rows)
        .mark_line(point=True)
        .encode(
            x=alt.X("confidence:Q", title="confidence (mean of the bin)", axis=alt.Axis(format="%")),
            y=alt.Y("accuracy:Q", title="accuracy", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1])),
            color=_colour("model"),
            strokeDash=alt.StrokeDash("model:N", title="model"),
            tooltip=[
                "model:N",
                alt.Tooltip("confidence:Q", format=".1%"),
                alt.Tooltip("accuracy:Q", format=".1%"),
                "images:Q",
            ],
        )
    )
    return alt.layer(diagonal, points).properties(width="container", height=280)


def chosen(chart: Any, field: str, label: str, options: Sequence[str]) -> Any:
    """The chart of one value of a field at a time, which the reader chooses; at first the last one."""
    if len(options) < 2:
        return chart
    choice = alt.param(name=field, value=options[-1], bind=alt.binding_select(options=list(options), name=f"{label} "))
    return chart.add_params(choice).transform_filter(f"datum.{field} === {field}")


def _ticks(numbers: Sequence[int]) -> list[int]:
    """Some whole numbers from the least to the largest."""
    low, high = min(numbers), max(numbers)
    return list(range(low, high + 1, max(1, math.ceil((high - low) / TICKS))))


def _chart(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)))


def _colour(series: str) -> alt.Color:
    return alt.Color(f"{series}:N", title=_title(series), scale=alt.Scale(range=list(ALL_COLOURS)))


def _title(name: str) -> str:
    return name.replace("_", " ")
