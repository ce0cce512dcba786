"""How alike the experts of a report's model are, as a chart."""

from collections.abc import Sequence

from .. import charts
from ..alike import Likeness
from .part import Part, Section

#: What such a distance means.
MEASURED = (
    "The distance is divided by the size (the norm) of that mean: at 0 all experts are equal, and near √(E - 1), for E "
    "experts, they have nothing in common."
)


def alike_section(alike: Sequence[Likeness]) -> Section | None:
    """How alike the experts of each layer are; None of a model without any."""
    if not alike:
        return None
    rows = [
        {"of": f"{of}, {layer.layer}", "a": a, "b": b, "cosine": cosine}
        for of, name in (("weights", "weights_EE"), ("outputs", "outputs_EE"))
        for layer in alike
        for a, cosines in enumerate(getattr(layer, name).tolist())
        for b, cosine in enumerate(cosines)
    ]
    chart = charts.heatmap(
        rows, "b", "a", "cosine", x_title="expert", y_title="expert", value_title="cosine", highest=1.0
    )
    options = list(dict.fromkeys(row["of"] for row in rows))
    known = {layer.layer: layer.spread for layer in alike if layer.spread is not None}
    told = "; ".join(f"{name} {value:.3g}" for name, value in known.items())
    text = (
        "The chart compares two experts by the cosine of their weights, or of their outputs on the same rows. 1 means "
        "that they are the same, 0 that they have nothing to do with each other."
    )
    if told:
        text += f" Distance of the experts from their mean in this checkpoint: {told}. {MEASURED}"
    return Section(
        "alike",
        "How alike are the experts?",
        [Part("Do the experts differ?", text, charts.chosen(chart, "of", "compare", options).to_dict())],
    )
