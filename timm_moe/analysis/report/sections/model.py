"""The model of a report: its blocks, sizes and options, and the origin of its weights."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from ....convert.expert_layers import moe_layers, numbers_of_experts
from ....export.history import ExpertsRecord, History
from ....layers import (
    EnsembleRouter,
    ExpertChoiceRouter,
    MoeMlp,
    RandomPartition,
    SharedExpertMlp,
    SoftMoeMlp,
)
from ...info import ModelInfo, ffn_places
from ..page import Part, Section

_BLOCK = re.compile(r"blocks\.(\d+)\.mlp")


def model_section(model: nn.Module, info: ModelInfo, history: History) -> Section:
    """Show a model and the history of its weights.

    Its sizes are by :func:`timm_moe.analysis.info.measure`.
    """
    boxes = _boxes(model)
    members = f"{info.members}{_own_experts(model)}" if info.members > 1 else None
    size = {"model": info.name, **info.rows(), "members": members}
    parts = [
        Part(
            "Where the experts sit",
            _sentences(model, info, boxes),
            routes={"kind": "blocks", "blocks": boxes},
        ),
        Part("Size and cost", table=_table(size)),
    ]
    if history.options:
        table = [["option", "value"], *([name, value] for name, value in history.options.items())]
        parts.append(
            Part("How it was trained", "train.py's main options, those that are set.", table=table)
        )
    origin = {
        "file": history.file,
        "epoch": history.epoch,
        "pretrained weights": history.base,
        "start": history.start,
        "weights": "the EMA weights of the checkpoint" if history.ema else None,
        "data": history.dataset,
        "gathered by": history.method,
        **_experts_of(history.experts),
    }
    if any(value is not None for value in origin.values()):
        parts.append(Part("Where it came from", table=_table(origin)))
    return Section("model", "The model", parts)


def _experts_of(experts: ExpertsRecord | None) -> dict[str, Any]:
    """Return what is known of the experts that a dense model was made of."""
    if experts is None:
        return {}
    return {
        "made of the expert model": experts.model,
        "its expert layers": experts.layers,
        "its experts in each layer": f"{experts.experts}{' and a shared one' * experts.shared}",
        "its parameters": f"{experts.parameters:,}",
        "its experts were averaged": "yes" if experts.averaged else "no",
        "its outputs are those of the mean": "yes" if experts.mean else "no",
    }


def _table(rows: dict[str, Any]) -> list[list[str]]:
    return [["", ""], *([name, str(value)] for name, value in rows.items() if value is not None)]


def _sentences(model: nn.Module, info: ModelInfo, boxes: Sequence[dict[str, Any]]) -> str:
    """Tell the place of the experts, the choice among them, shared experts and members."""
    layers = moe_layers(model)
    members = (
        f" The model is an ensemble of {info.members} members in one: each gives an answer of its "
        "own, and the mean of their probabilities is the model's."
        if info.members > 1
        else ""
    )
    if not layers:
        return f"This model has no expert layers.{members}"
    places = sum(box["experts"] > 0 for box in boxes)
    experts = numbers_of_experts(layers.values())
    text = f"{places} of {len(boxes)} feed-forward networks hold {experts} experts each."
    if places > len(layers):
        shared = "one expert layer" if len(layers) == 1 else f"{len(layers)} expert layers"
        text += f" They share {shared}: these are the same."
    text += f" {_choice(list(layers.values()), info)}"
    if shared_by := [path for path, layer in layers.items() if isinstance(layer, SharedExpertMlp)]:
        text += (
            " Beside these there is a shared expert, which every token passes through, in "
            f"{', '.join(shared_by)}."
        )
    return text + members


def _choice(layers: Sequence[MoeMlp], info: ModelInfo) -> str:
    """Tell who chooses the experts of a token."""
    if all(isinstance(layer.router, RandomPartition) for layer in layers):
        return (
            "No router chooses: in training each token gets a random expert, so none of them sees "
            "some classes more than others, and none can die."
        )
    if all(isinstance(layer, SoftMoeMlp) for layer in layers):
        return "Nothing is routed: each expert computes weighted means of all tokens of an image."
    if all(isinstance(layer.router, ExpertChoiceRouter) for layer in layers):
        return "Each expert chooses equally many tokens, so a token goes to none, one or several."
    if not any(layer.router.depends_on_input for layer in layers):
        return "No router looks at the images: all tokens go the same ways through the experts."
    number = "one expert" if info.experts_of_row == "1" else f"{info.experts_of_row} experts"
    if info.routing_unit == "image":
        return f"A router chooses {number} for each image; all of its tokens go there."
    return f"A router chooses {number} for each token."


def _own_experts(model: nn.Module) -> str:
    """Name the experts of each member of an ensemble inside one model.

    The text is empty if all members have all experts.
    """
    routers = [
        layer.router
        for layer in moe_layers(model).values()
        if isinstance(layer.router, EnsembleRouter)
    ]
    if not routers:
        return ""
    members = routers[0].ensemble_size
    each = routers[0].num_experts // members
    experts = [
        f"expert {m}" if each == 1 else f"experts {m * each} to {(m + 1) * each - 1}"
        for m in range(members)
    ]
    return "; " + ", ".join(f"member {number} has {own}" for number, own in enumerate(experts, 1))


def _boxes(model: nn.Module) -> list[dict[str, Any]]:
    """Return the places of feed-forward networks as page.html draws them."""
    found = ffn_places(model)
    plain = all(_BLOCK.fullmatch(path) for path, _ in found)
    return [
        {
            "name": _BLOCK.sub(r"block \1", path) if plain else path,
            "experts": module.num_experts if isinstance(module, MoeMlp) else 0,
        }
        for path, module in found
    ]
