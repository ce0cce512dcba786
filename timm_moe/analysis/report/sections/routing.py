"""Routing in a report: experts of classes and patches, loads, certainty of the routers."""

from collections.abc import Sequence

from .. import charts
from ..observe import ENTROPY_BINS, LayerObservation, Observation
from ..page import Part, Section
from .patches import mixture_part, patches_part, surest_part

#: The words of this section.
_WORDS = (
    "A row is one patch, or the class token, at an expert layer. A gate is the router's "
    "probability of an expert for a row, from 0 to 1. A choice is an expert that the router takes "
    "for a row. A row may have several choices; the first is the one it prefers. If a router "
    "chooses for whole images, all rows of an image have the same choices."
)
#: Words for how far the class decides the expert beyond chance, each with the share below which it
#: is used.
PREFERENCES = (
    (0.02, "No preference beyond chance"),
    (0.1, "Weak preferences"),
    (0.3, "Clear preferences"),
)
STRONG = "Strong preferences"
#: Share of an even load below which an expert counts as dead.
DEAD = 0.1


def routing_section(seen: Observation) -> Section | None:
    """Show the experts of images and patches.

    None is returned for a model whose experts do not depend on the images.
    """
    parts = [mixture_part(seen)]
    if seen.layers:
        parts += [
            _load_part(seen.layers),
            _classes_part(seen),
            patches_part(seen),
            surest_part(seen),
            _entropy_part(seen.layers),
        ]
    shown = [part for part in parts if part is not None]
    if not shown:
        return None
    return Section("routing", "Who goes where", shown, _WORDS if seen.layers else "")


def _load_part(layers: Sequence[LayerObservation]) -> Part:
    rows = [
        {"layer": layer.name, "expert": expert, "share": share}
        for layer in layers
        for expert, share in enumerate(layer.routes.load().tolist())
    ]
    even = (
        1 / layers[0].routes.experts
        if len({layer.routes.experts for layer in layers}) == 1
        else None
    )
    # If the rows of an image go together, they count as one choice.
    choices = sum(
        layer.routes.images() * layer.routes.top_k * layer.routes.members
        if layer.by_image
        else int(layer.routes.counts.sum())
        for layer in layers
    )
    dropped = sum(layer.dropped for layer in layers)
    lost = (
        f"{dropped:,} of them found no place and were dropped."
        if dropped
        else "None of them was dropped."
    )
    text = f"{_dead(layers)} This counts {choices:,} choices in evaluation. {lost}"
    text += " The dashed line is an even share." if even else ""
    return Part(
        "Did any expert die?",
        text,
        charts.chosen(charts.loads(rows, even), "layer", "layer").to_dict(),
    )


def _dead(layers: Sequence[LayerObservation]) -> str:
    """Name the experts with less than a tenth of an even share, or the one with the least."""
    relative = {
        layer.name: (layer.routes.load() * layer.routes.experts).tolist() for layer in layers
    }
    idle = {
        name: [str(e) for e, share in enumerate(shares) if share < DEAD]
        for name, shares in relative.items()
    }
    dead = [f"{name}: {', '.join(experts)}" for name, experts in idle.items() if experts]
    if dead:
        return f"Chosen for less than a tenth of an even share: {'; '.join(dead)}."
    name, shares = min(relative.items(), key=lambda item: min(item[1]))
    return (
        "None has less than a tenth of an even share. The least chosen, expert "
        f"{shares.index(min(shares))} of {name}, has {min(shares):.0%} of it."
    )


def _classes_part(seen: Observation) -> Part:
    members = max(layer.routes.members for layer in seen.layers)
    text = (
        f"{_preference(seen)} The table has the share of a class's choices that fell on each "
        "expert, before capacities. Sort by an expert, or find a class by its name."
    )
    if members > 1:
        text += (
            f" The {members} members together make 100%: an expert that one of them has gets "
            f"{1 / members:.0%} at most."
        )
    layers = [
        {
            "name": layer.name,
            "share": (100 * layer.routes.share_CE()).round().int().tolist(),
            "even": 100 / layer.routes.experts,
        }
        for layer in seen.layers
    ]
    routes = {"kind": "classes", "classes": seen.layers[0].routes.classes, "layers": layers}
    return Part("Which expert sees which class?", text, routes=routes)


def _preference(seen: Observation) -> str:
    """Say how far the class decides the expert, in the layer where it does most."""
    shares = {layer.name: layer.routes.class_information() for layer in seen.layers}
    strongest = max(seen.layers, key=lambda layer: shares[layer.name]).routes
    known, chance = shares.pop(strongest.layer), strongest.class_information_by_chance()
    verdict = next((words for limit, words in PREFERENCES if known - chance < limit), STRONG)
    share_CE = strongest.share_CE()
    label, expert = divmod(int(share_CE.argmax()), strongest.experts)
    others = ""
    if shares:
        ends = (f"{end:.0%}" for end in (min(shares.values()), max(shares.values())))
        others = f" In the other layers it says {' to '.join(dict.fromkeys(ends))}."
    return (
        f"{verdict}. In {strongest.layer} the class of an image says {known:.0%} of which expert "
        "is chosen, where 0% means that all classes are spread alike, 100% that the class decides. "
        f"Shuffled classes would say {chance:.0%}.{others} The largest share in {strongest.layer}: "
        f"expert {expert} gets {share_CE.max():.0%} of {strongest.classes[label]}; an even share "
        f"is {1 / strongest.experts:.0%}."
    )


def _entropy_part(layers: Sequence[LayerObservation]) -> Part | None:
    rows = [
        {"value": (index + 0.5) / ENTROPY_BINS, "share": share, "layer": layer.name}
        for layer in layers
        if layer.entropy is not None
        for index, share in enumerate((layer.entropy / layer.entropy.sum().clamp(min=1)).tolist())
    ]
    if not rows:
        return None
    text = (
        "At 0 % the router is certain of one expert. At 100 % it finds all experts equally likely. "
        "This is the entropy of the gates, as a share of the largest that is possible."
    )
    chart = charts.histogram(rows, "layer", "how undecided the router is", "share of the rows")
    return Part("How sure are the routers?", text, chart.to_dict())
