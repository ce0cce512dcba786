"""The model of a report: its blocks, sizes and options, and where its weights came from."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from ...convert.blocks import moe_layers
from ...convert.find import ffn_paths
from ...export.history import History
from ...info import ModelInfo
from ...layers import EnsembleRouter, MoeMlp, RandomPartition, SharedExpertMlp
from ...model_config import get_pretrained_cfg
from .part import Part, Section

_BLOCK = re.compile(r"blocks\.(\d+)\.mlp")


def model_section(model: nn.Module, info: ModelInfo, history: History) -> Section:
    """The model: its blocks, sizes and options, and where its weights came from."""
    boxes = _boxes(model)
    rows = [["", ""], ["model", info.name], ["experts", _experts(info)]]
    rows += [["members", f"{info.members}{_own_experts(model)}"]] if info.members > 1 else []
    rows += [["parameters in training", f"{info.total:,}"], ["activated for a token", f"{info.activated:,}"]]
    rows += [["exported", f"{info.exported:,}"]] if info.exported is not None else []
    rows += [["evaluation of an image", f"{info.gflops:.3f} GFLOPs"]]
    rows += [["input", " x ".join(map(str, info.input_size))]]
    options = [["option", "value"], *([name, value] for name, value in history.options.items())]
    origin = [["", ""], *([name, str(value)] for name, value in _origin(history))]
    parts = [
        Part(
            "Where the experts sit",
            f"{_sitting(info, boxes)}{_chosen_by(model, info)}{_shared(model)}{_members(info)}",
            routes={"kind": "blocks", "blocks": boxes},
        ),
        Part("Size and cost", table=rows),
    ]
    if len(options) > 1:
        parts.append(Part("How it was trained", "train.py's options, those that are set.", table=options))
    if len(origin) > 1:
        parts.append(Part("Where it came from", table=origin))
    return Section("model", "The model", parts)


def _experts(info: ModelInfo) -> str:
    if not info.moe_layers:
        return "none"
    unit = "image" if info.routing_unit == "image" else "token"
    layers = f"each of {len(info.moe_layers)} layers" if len(info.moe_layers) > 1 else "one layer"
    return f"{info.num_experts} in {layers}; {info.top_k} for each {unit}"


def _sitting(info: ModelInfo, boxes: Sequence[dict[str, Any]]) -> str:
    if not info.moe_layers:
        return "This model has no expert layers."
    places, layers = sum(box["experts"] > 0 for box in boxes), len(info.moe_layers)
    text = f"{places} of {len(boxes)} feed-forward networks hold {info.num_experts} experts each."
    if places > layers:
        text += f" They share {'one expert layer' if layers == 1 else f'{layers} expert layers'}: these are the same."
    return text


def _chosen_by(model: nn.Module, info: ModelInfo) -> str:
    """A sentence on what chooses the experts."""
    layers = moe_layers(model).values()
    if not layers:
        return ""
    if all(isinstance(layer.routed_by, RandomPartition) for layer in layers):
        return (
            " No router chooses: in training each token gets a random expert, so none of them sees some classes more "
            "than others, and none can die."
        )
    if all(layer.fused for layer in layers):
        return " Nothing is routed: learned weights fuse the experts of a layer into one network."
    number = "one expert" if info.top_k == 1 else f"{info.top_k} experts"
    if info.routing_unit == "image":
        return f" A router chooses {number} for each image; all of its tokens go there."
    return f" A router chooses {number} for each token."


def _members(info: ModelInfo) -> str:
    if info.members == 1:
        return ""
    return (
        f" The model is an ensemble of {info.members} members in one: each gives an answer of its own, and the mean of "
        "their probabilities is the model's."
    )


def _shared(model: nn.Module) -> str:
    """A sentence on the shared experts."""
    layers = [path for path, layer in moe_layers(model).items() if isinstance(layer, SharedExpertMlp)]
    if not layers:
        return ""
    return f" Beside these there is a shared expert, which every token passes through, in {', '.join(layers)}."


def _own_experts(model: nn.Module) -> str:
    """Which experts belong to which member of an ensemble inside one model; empty where all have all."""
    routers = [layer.routed_by for layer in moe_layers(model).values() if isinstance(layer.routed_by, EnsembleRouter)]
    if not routers:
        return ""
    members, own = routers[0].ensemble_size, routers[0].num_experts // routers[0].ensemble_size
    told = [f"member {number + 1} has {_numbered(number * own, own)}" for number in range(members)]
    return f"; {', '.join(told)}"


def _numbered(first: int, number: int) -> str:
    return f"expert {first}" if number == 1 else f"experts {first} to {first + number - 1}"


def _boxes(model: nn.Module) -> list[dict[str, Any]]:
    """All places of feed-forward networks, in order, of one that stands in several blocks each of them."""
    networks = {model.get_submodule(path) for path in ffn_paths(model)}
    found = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if module in networks]
    numbers = [_BLOCK.fullmatch(path) for path, _ in found]
    plain = all(numbers)
    return [
        {
            "name": f"block {number[1]}" if plain and number else path,
            "experts": module.num_experts if isinstance(module, MoeMlp) else 0,
        }
        for number, (path, module) in zip(numbers, found, strict=True)
    ]


def _origin(history: History) -> list[tuple[str, Any]]:
    known = {"file": history.file, "epoch": history.epoch, "pretrained weights": history.base, "start": history.start}
    known |= {"weights": "the EMA weights of the checkpoint" if history.ema else None}
    known |= {"data": history.dataset, "gathered by": history.method}
    known |= (
        {}
        if history.experts is None
        else {f"experts' {name}": value for name, value in asdict(history.experts).items()}
    )
    return [(name, value) for name, value in known.items() if value is not None]


def origin_of(model: nn.Module) -> str:
    """The registered name of a model, for :func:`timm_moe.info.measure`."""
    return get_pretrained_cfg(model).get("architecture", type(model).__name__)
