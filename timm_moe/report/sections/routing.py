"""The routing of a report: which classes, images and patches go to which experts."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from .. import charts
from ..images import data_uri, sheet
from ..observe import ENTROPY_BINS, LayerObservation, Observation
from .part import Part, Section

#: What the words of the routing's section mean.
_WORDS = (
    "A row is what an expert layer sees of one patch, or of the class token. A gate is how likely the router finds an "
    "expert for a row, from 0 to 1. A choice is an expert that the router takes for a row; a row may have several, the "
    "first is that with the largest gate. Where a router chooses for whole images, all rows of an image have the same "
    "choices."
)
#: How far the class decides the expert beyond chance, up to which share a preference is called so.
PREFERENCES = ((0.02, "No preference beyond chance"), (0.1, "Weak preferences"), (0.3, "Clear preferences"))
STRONG = "Strong preferences"
#: Times that the classes are shuffled to know what chance gives.
SHUFFLES = 5
#: Share of an even load below which an expert counts as dead.
DEAD = 0.1


def routing_section(seen: Observation) -> Section | None:
    """Which images and patches go to which experts; None of a model that does not route by what it sees."""
    if not seen.layers:
        return None
    section = Section("routing", "Who goes where", text=_WORDS)
    names = [layer.name for layer in seen.layers]
    loads = [
        {"layer": layer.name, "expert": expert, "share": share}
        for layer in seen.layers
        for expert, share in enumerate(layer.load.tolist())
    ]
    even = 1 / seen.layers[0].experts if len({layer.experts for layer in seen.layers}) == 1 else None
    chart = charts.bars(
        loads, "expert", "share", x_title="expert", y_title="share of the choices", percent=True,
        rule=even,
    )  # fmt: skip
    dashed = " The dashed line is an even share." if even else ""
    section.parts += [
        Part(
            "Did any expert die?",
            f"{_dead(seen.layers)}{dashed}",
            charts.chosen(chart, "layer", "layer", names).to_dict(),
        ),
        _classes_part(seen),
        _patches_part(seen),
        *_surest_part(seen),
        *_entropy_part(seen.layers),
        *_pairs_part(seen.layers),
    ]
    return section


def _dead(layers: Sequence[LayerObservation]) -> str:
    dead = []
    for layer in layers:
        load = layer.load * layer.experts
        idle = [str(expert) for expert, share in enumerate(load.tolist()) if share < DEAD]
        dead += [f"{layer.name}: {', '.join(idle)}"] if idle else []
    told = f" {_dropped(layers)}"
    if dead:
        return f"Chosen for less than a tenth of an even share: {'; '.join(dead)}.{told}"
    least = min(layers, key=lambda layer: (layer.load * layer.experts).min().item())
    share = (least.load * least.experts).min().item()
    which = f"expert {int(least.load.argmin())} of {least.name}"
    return f"None has less than a tenth of an even share. The least chosen, {which}, has {share:.0%} of it.{told}"


def _choices(layer: LayerObservation) -> int:
    """Of all images; where the rows of an image go together they are one choice."""
    return len(layer.count_IE) * layer.top_k * layer.members if layer.by_image else int(layer.count_IE.sum())


def _dropped(layers: Sequence[LayerObservation]) -> str:
    choices = sum(_choices(layer) for layer in layers)
    dropped = sum(layer.dropped for layer in layers)
    if not dropped:
        return f"This counts {choices:,} choices in evaluation. None of them was dropped."
    return f"This counts {choices:,} choices in evaluation. {dropped:,} of them found no place and were dropped."


def _classes_part(seen: Observation) -> Part:
    present = seen.labels.unique().tolist()
    return Part(
        "Which expert sees which class?",
        f"{_preference(seen)} The table has the share of a class's choices that fell on each expert, before capacities."
        f" Sort by an expert, or find a class by its name.{_members_share(seen.layers)}",
        routes={
            "kind": "classes",
            "classes": [seen.classes[label] for label in present],
            "layers": [
                {
                    "name": layer.name,
                    "share": _percent(layer.share_CE(seen.labels, len(seen.classes))[present]),
                    "even": 100 / layer.experts,
                }
                for layer in seen.layers
            ],
        },
    )


def _preference(seen: Observation) -> str:
    """Sentences on how far the class decides the expert, in the layer where it does most."""
    told = {layer.name: layer.class_information(seen.labels, len(seen.classes)) for layer in seen.layers}
    strongest = max(seen.layers, key=lambda layer: told[layer.name])
    known, chance = told.pop(strongest.name), _chance(strongest, seen)
    verdict = next((words for limit, words in PREFERENCES if known - chance < limit), STRONG)
    share_CE = strongest.share_CE(seen.labels, len(seen.classes))
    label, expert = divmod(int(share_CE.argmax()), strongest.experts)
    others = f" In the other layers it says {_range(told.values())}." if told else ""
    return (
        f"{verdict}. In {strongest.name} the class of an image says {known:.0%} of which expert is chosen, where 0% "
        f"means that all classes are spread alike, 100% that the class decides. Shuffled classes would say {chance:.0%}"
        f".{others} The largest share in {strongest.name}: expert {expert} gets {share_CE.max():.0%} of "
        f"{seen.classes[label]}; an even share is {1 / strongest.experts:.0%}."
    )


def _range(shares: Collection[float]) -> str:
    ends = [f"{end:.0%}" for end in (min(shares), max(shares))]
    return " to ".join(dict.fromkeys(ends))


def _chance(layer: LayerObservation, seen: Observation) -> float:
    """What the class would say about the expert if it said nothing: few images give more than 0."""
    generator = torch.Generator().manual_seed(0)
    shuffled = [seen.labels[torch.randperm(len(seen.labels), generator=generator)] for _ in range(SHUFFLES)]
    return fmean(layer.class_information(labels, len(seen.classes)) for labels in shuffled)


def _members_share(layers: Sequence[LayerObservation]) -> str:
    members = max(layer.members for layer in layers)
    if members == 1:
        return ""
    return f" The {members} members together make 100%: an expert that one of them has gets {1 / members:.0%} at most."


def _percent(share_CE: Tensor) -> list[list[int]]:
    return (100 * share_CE).round().int().tolist()


def _patches_part(seen: Observation) -> Part:
    layers = [layer for layer in seen.layers if layer.grid is not None]
    return Part(
        "Which patches go to which expert?",
        f"Each patch has the colour and number of its first choice, the more opaque the surer the router is."
        f"{_together(layers)}{_colourless(layers)}{_whose_patches(layers)}"
        if layers
        else "The rows of these layers are not patches of an image.",
        routes={
            "kind": "patches",
            "images": [data_uri(pixels) for pixels in seen.shown_pixels] if layers else [],
            "labels": [
                f"{seen.classes[seen.labels[number]]}, predicted {seen.classes[seen.predicted[number]]}"
                for number in seen.shown
            ],
            "layers": [
                {
                    "name": f"{layer.name}, member {member + 1}" if layer.members > 1 else layer.name,
                    "grid": layer.grid,
                    "experts": layer.experts,
                    "expert": layer.expert_SMP[:, member].tolist(),
                    "gate": (100 * layer.gate_SMP[:, member]).round().int().tolist(),
                }
                for layer in layers
                for member in range(layer.members)
            ],
        },
    )


def _together(layers: Sequence[LayerObservation]) -> str:
    if not all(layer.by_image for layer in layers):
        return ""
    return " An image goes to its experts as a whole, so all of its patches have one colour."


def _colourless(layers: Sequence[LayerObservation]) -> str:
    if not any((layer.expert_SMP == layer.experts).any() for layer in layers):
        return ""
    one = all(layer.top_k == 1 for layer in layers)
    which = "its only choice" if one else f"the first of its {max(layer.top_k for layer in layers)} choices"
    return f" Of a patch without colour, {which} found no place and was dropped."


def _whose_patches(layers: Sequence[LayerObservation]) -> str:
    members = max(layer.members for layer in layers)
    return f" The model has {members} members inside; the list has each one's choices." if members > 1 else ""


def _surest_part(seen: Observation) -> list[Part]:
    layers = [layer for layer in seen.layers if any(layer.surest)]
    if not layers:
        return []
    shown = "images" if layers[0].by_image else "patches"
    around = "" if layers[0].by_image else ", with what is around them, at most one of an image"
    return [
        Part(
            "What is each expert surest of?",
            f"The {shown} with the largest gates{around}.",
            routes={
                "kind": "surest",
                "layers": [
                    {
                        "name": layer.name,
                        "sheet": sheet([[patch.pixels for patch in patches] for patches in layer.surest]),
                        "columns": max(map(len, layer.surest)),
                        "told": [_told(patches, seen.classes) for patches in layer.surest],
                    }
                    for layer in layers
                ],
            },
        )
    ]


def _told(patches: Sequence[Any], classes: Sequence[str]) -> str:
    if not patches:
        return "never chosen first"
    of = ", ".join(dict.fromkeys(classes[patch.label] for patch in patches))
    return f"gates {patches[-1].gate:.2f} to {patches[0].gate:.2f}; of {of}"


def _entropy_part(layers: Sequence[LayerObservation]) -> list[Part]:
    rows = [
        {"entropy": (index + 0.5) / ENTROPY_BINS, "share": share, "layer": layer.name}
        for layer in layers
        if layer.entropy is not None
        for index, share in enumerate((layer.entropy / layer.entropy.sum().clamp(min=1)).tolist())
    ]
    if not rows:
        return []
    chart = charts.histogram(
        rows, "entropy", "share", "layer", x_title="how undecided the router is", y_title="share of the rows"
    )
    text = (
        "At 0 % the router is certain of one expert. At 100 % it finds all experts equally likely. This is the entropy "
        "of the gates, as a share of the largest that is possible."
    )
    return [Part("How sure are the routers?", text, chart.to_dict())]


def _pairs_part(layers: Sequence[LayerObservation]) -> list[Part]:
    rows, names = [], []
    for layer, following in pairwise(layers):
        if layer.next_EE is None:
            continue
        names.append(f"{layer.name} to {following.name}")
        share_EE = layer.next_EE / layer.next_EE.sum(1, keepdim=True).clamp(min=1)
        rows += [
            {"pair": names[-1], "here": here, "there": there, "share": share}
            for here, shares in enumerate(share_EE.tolist())
            for there, share in enumerate(shares)
        ]
    if not rows:
        return []
    chart = charts.heatmap(
        rows, "there", "here", "share",
        x_title="expert in the next layer", y_title="expert", value_title="share of its rows",
        highest=max(row["share"] for row in rows), percent=True,
    )  # fmt: skip
    text = (
        "Take the rows that one expert gets. The chart shows which experts the same rows get in the next expert layer. "
        "Only first choices count."
    )
    return [Part("Do experts follow each other?", text, charts.chosen(chart, "pair", "layers", names).to_dict())]
