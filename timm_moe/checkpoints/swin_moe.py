"""Swin-MoE checkpoints (microsoft/Swin-Transformer, Tutel).

The files of all processes become one, under timm's names.

Names in shapes: e experts or parts of one in a file, D width, H hidden width, h heads.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from .layouts import require_tensors
from .reading import read_checkpoint, require_intact
from .vmoe import imported_model, require_finite, require_fit

Tensors = dict[str, Tensor]

_BLOCK = re.compile(r"layers\.(\d+)\.blocks\.(\d+)\.")
_GATE = re.compile(r"mlp\._moe_layer\.gates?\.(?:0\.)?")
_EXPERTS = "mlp._moe_layer.experts.batched_"
#: Parts of a gate, by their names here.
_ROUTER = {
    "wg.weight": "weight",
    "sim_matrix": "weight",
    "cosine_projector.weight": "projection",
    "cosine_projector.bias": "projection_bias",
    "temperature": "log_scale",
}
_PARTS = ("fc1_w", "fc1_bias", "fc2_w")
#: The preprocessing by which the reference evaluates.
_IMAGES = {
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "crop_pct": 0.875,
    "interpolation": "bicubic",
}
#: Buffers that timm computes, and arrays from which the position biases and the number of experts
#: are computed.
_COMPUTED = re.compile(
    r"\.(relative_position_index|relative_coords_table|attn_mask|cpb_mlp\.\S+|_num_global_experts)$"
)


def import_checkpoint(prefix: str | Path) -> nn.Module:
    """Load a Swin-MoE checkpoint as a model of timm.

    Args:
        prefix: common beginning of the names of its files: ``.pth.master`` and one ``.pth.rank…``
            for each process, or a single ``.pth.global`` or ``.pth``. One without experts becomes a
            plain Swin of timm.

    Raises:
        OSError: if a file is missing.
        ValueError: if a file is damaged or would run code, the files do not belong together, or
            they are no Swin-MoE's or not finite.
    """
    rest, ranks = _read(prefix)
    try:
        name, kwargs = model_of(rest)
        state_dict = _state_dict(rest, ranks)
    except (LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(
            "The checkpoint's arrays have other names or shapes than a Swin-MoE's."
        ) from error
    require_finite(state_dict)
    require_fit(state_dict, name, kwargs, "Swin-MoE")
    return imported_model(name, kwargs, state_dict, _IMAGES)


def model_of(rest: Tensors) -> tuple[str, dict[str, Any]]:
    """Return the registered name and the ``timm.create_model`` arguments of a checkpoint's model.

    K, capacities and losses do not show in the arrays and keep the model's defaults.

    Args:
        rest: the arrays that all processes share.

    Raises:
        LookupError: if an array is missing or has too few dimensions.
    """
    blocks = sorted(
        {(int(match[1]), int(match[2])) for name in rest if (match := _BLOCK.match(name))}
    )
    size = _size(rest, blocks)
    known = _published_size(size)
    in_chans, patch_size = (rest["patch_embed.proj.weight"].shape[dim] for dim in (1, 2))
    window_size = (rest["layers.0.blocks.0.attn.relative_coords_table"].shape[1] + 1) // 2
    # The mask is one of shifted windows; a single window has none.
    windows = len(rest.get("layers.0.blocks.1.attn_mask", [0]))
    kwargs: dict[str, Any] = dict(
        img_size=math.isqrt(windows) * window_size * patch_size, window_size=window_size
    )

    gates = {
        blocks.index((int(match[1]), int(match[2]))): num_experts
        for match, num_experts in _gates(rest)
    }
    if gates:
        is_cosine = any(name.endswith("sim_matrix") for name in rest)
        routing = dict(num_experts=max(gates.values()), score="cosine" if is_cosine else "softmax")
        name, args = _variant(known or "small", routing)
        kwargs = {
            option: value for option, value in (kwargs | routing).items() if value != args[option]
        }
        kwargs["moe_layers"] = ",".join(map(str, sorted(gates)))
    else:
        name = f"swin_{known or 'small'}_patch4_window7_224"

    if not known:
        kwargs |= size
    optional = dict(
        patch_size=(patch_size, 4), in_chans=(in_chans, 3), mlp_ratio=(_mlp_ratio(rest), 4)
    )
    kwargs |= {option: value for option, (value, default) in optional.items() if value != default}
    kwargs["num_classes"] = len(rest["head.weight"]) if "head.weight" in rest else 0
    return name, kwargs


def _size(rest: Tensors, blocks: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the width, depths and heads of a Swin with these blocks, (stage, block) each."""
    depths = tuple(Counter(stage for stage, _ in blocks).values())
    heads = tuple(
        len(rest[f"layers.{stage}.blocks.0.attn.cpb_mlp.2.weight"]) for stage in range(len(depths))
    )
    embed_dim = rest["patch_embed.proj.weight"].shape[0]
    return dict(embed_dim=embed_dim, depths=depths, num_heads=heads)


def _published_size(size: dict[str, Any]) -> str | None:
    """Return the name of a size in the paper of Swin; None for another size."""
    embed_dim = size["embed_dim"]
    heads = tuple(embed_dim // 32 * 2**stage for stage in range(4))
    is_published = size["depths"] == (2, 2, 18, 2) and size["num_heads"] == heads
    return {96: "small", 128: "base"}.get(embed_dim) if is_published else None


def _variant(size: str, routing: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a registered model of a size.

    It is the one with this routing, if there is one.
    """
    from ..models.swin_moe import VARIANTS  # not every timm has the models that these are made of

    variants = {name: variant.args for name, variant in VARIANTS.items() if f"_{size}_" in name}
    for name, args in variants.items():
        if routing.items() <= args.items():
            return name, args
    return next(iter(variants.items()))


def _read(prefix: str | Path) -> tuple[Tensors, list[Tensors]]:
    """Read the arrays that all processes share, and the experts of each process.

    A single file is that of one process.
    """
    base = re.sub(r"\.pth(\.(master|global|rank\d+))?$", "", str(prefix)) + ".pth"
    # A run that goes on has no .master: each process writes what is shared, too.
    files = [Path(f"{base}{suffix}") for suffix in (".master", ".global", "", ".rank0")]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise FileNotFoundError(
            f"There is no {files[0]}: give the path that the checkpoint's files begin with."
        )
    weights = _weights(file)
    if file in (files[1], files[2]):  # of one process
        rest, experts = _separated(weights)
        return rest, [experts] if experts else []

    ranks = _read_ranks(base, file)
    if file == files[3]:
        return _separated(weights)[0], [_separated(rank)[1] for rank in ranks]
    return weights, ranks


def _read_ranks(base: str, file: Path) -> list[Tensors]:
    """Read the files of all processes, which lie beside the one of what they share."""
    named = re.compile(re.escape(file.stem) + r"\.rank(\d+)")
    matches = (named.fullmatch(other.name) for other in file.parent.iterdir())
    last = max((int(match[1]) for match in matches if match), default=0)
    ranks: list[Tensors] = []
    for rank in range(last + 1):
        rank_file = Path(f"{base}.rank{rank}")
        if not rank_file.is_file():
            raise FileNotFoundError(
                f"{rank_file} is missing: put the files of all processes beside {file}."
            )
        ranks.append(_weights(rank_file))
        if _shapes(ranks[-1]) != _shapes(ranks[0]):
            raise ValueError(f"{rank_file} and {base}.rank0 are of different checkpoints.")
    return ranks


def _separated(weights: Tensors) -> tuple[Tensors, Tensors]:
    """Separate what all processes share and the experts of one."""
    experts = {name: tensor for name, tensor in weights.items() if _EXPERTS in name}
    return {name: tensor for name, tensor in weights.items() if name not in experts}, experts


def _weights(file: Path) -> Tensors:
    weights = read_checkpoint(file).get("model")
    if not isinstance(weights, dict):
        raise ValueError(f"{file} has no weights under 'model', where Swin-MoE's files have them.")
    require_intact(file, require_tensors(weights, file))
    return weights


def _shapes(tensors: Tensors) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _gates(rest: Tensors) -> list[tuple[re.Match[str], int]]:
    """List the blocks with experts, and their numbers of experts."""
    gates = []
    for name, tensor in rest.items():
        match = _BLOCK.match(name)
        if match and _GATE.match(name, match.end()) and name.endswith(("wg.weight", "sim_matrix")):
            gates.append((match, tensor.shape[1 if name.endswith("sim_matrix") else 0]))
    return gates


def _mlp_ratio(rest: Tensors) -> float:
    """Return H / D of the blocks without experts, or 4 if there are none."""
    shape = next(
        (tensor.shape for name, tensor in rest.items() if name.endswith(".mlp.fc1.weight")), (4, 1)
    )
    return shape[0] / shape[1]


def _state_dict(rest: Tensors, ranks: Sequence[Tensors]) -> Tensors:
    """Convert a checkpoint to the state dict of a ``swin_moe_*`` model, or of timm's Swin."""
    moe_blocks = {match[0]: num_experts for match, num_experts in _gates(rest)}
    placed = {f"{block}{_EXPERTS}{own}" for block in moe_blocks for own in (*_PARTS, "fc2_bias")}
    strange = {name for rank in ranks for name in rank} - placed
    if strange:
        raise ValueError(f"The array {min(strange)} has no place in a Swin-MoE.")

    state_dict = _shared_state_dict(rest)
    for block, num_experts in moe_blocks.items():
        experts = _joined(block, ranks, num_experts, _mlp_ratio(rest))
        state_dict |= {f"{block}mlp.{own}": tensor for own, tensor in experts.items()}
    return {name: tensor.contiguous() for name, tensor in state_dict.items()}


def _shared_state_dict(rest: Tensors) -> Tensors:
    """Convert the arrays that all processes share: all but the experts."""
    state_dict = {}
    for name, tensor in rest.items():
        block = match[0] if (match := _BLOCK.match(name)) else ""
        part = name[len(block) :]
        if part == "attn.cpb_mlp.0.weight":
            table = f"{block}attn.relative_position_bias_table"
            state_dict[table] = _position_bias(rest, f"{block}attn.")
        if _COMPUTED.search(name):
            continue
        if part == f"{_EXPERTS}fc2_bias":  # it is frozen at zero, so all processes share it
            _require_zero(name, tensor)
        elif gate := _GATE.match(part):
            own = f"{block}mlp.router.{_ROUTER[part[gate.end() :]]}"
            state_dict[own] = tensor.mT if part.endswith("sim_matrix") else tensor
        else:
            state_dict[_name_in_timm(name)] = tensor
        if part == "mlp.fc1.weight" and f"{block}mlp.fc2.bias" not in rest:
            state_dict[f"{block}mlp.fc2.bias"] = tensor.new_zeros(tensor.shape[1])
    return state_dict


def _name_in_timm(name: str) -> str:
    """Return timm's name of an array: it downsamples before a stage, and its head has an ``fc``."""
    if match := re.match(r"layers\.(\d+)(\.downsample.*)", name):
        return f"layers.{int(match[1]) + 1}{match[2]}"
    return re.sub(r"^head\.", "head.fc.", name)


def _position_bias(rest: Tensors, prefix: str) -> Tensor:
    """Compute the (positions, h) biases of the relative positions.

    They are two linear layers on the coordinates of the positions.
    """
    first, bias, second = (
        rest[f"{prefix}cpb_mlp.{name}"] for name in ("0.weight", "0.bias", "2.weight")
    )
    coordinates = rest[f"{prefix}relative_coords_table"].to(first.dtype).flatten(0, 2)
    return nn.functional.linear(nn.functional.linear(coordinates, first, bias).relu(), second)


def _joined(block: str, ranks: Sequence[Tensors], num_experts: int, ratio: float) -> Tensors:
    """Join the experts of a block.

    Where there are more processes than experts, a process has some hidden units of one expert.
    """
    parts = {own: [rank[f"{block}{_EXPERTS}{own}"] for rank in ranks] for own in _PARTS}
    beginnings = torch.stack([part.flatten()[:64] for part in parts["fc1_w"]])
    if len(ranks) > 1 and len(beginnings.unique(dim=0)) < len(ranks):
        raise ValueError(
            f"Two .rank files hold the same experts in {block.rstrip('.')}: one was copied over "
            "another."
        )
    # (e, H or a part of it, D) of each process
    fc1_w, fc2_w = (torch.cat(parts[own]) for own in ("fc1_w", "fc2_w"))
    dim, hidden = fc1_w.shape[2], round(ratio * fc1_w.shape[2])
    if fc1_w.numel() != num_experts * hidden * dim:
        raise ValueError(
            f"The {len(ranks)} .rank files do not hold {num_experts} experts of {hidden} hidden "
            f"units in {block.rstrip('.')}, as the .master file has it: put the files of all "
            "processes of one checkpoint there."
        )
    for rank in ranks:
        if (name := f"{block}{_EXPERTS}fc2_bias") in rank:
            _require_zero(name, rank[name])
    return {
        "fc1.weight": fc1_w.reshape(num_experts, hidden, dim),
        "fc1.bias": torch.cat([part.flatten() for part in parts["fc1_bias"]]).reshape(
            num_experts, hidden
        ),
        "fc2.weight": fc2_w.reshape(num_experts, hidden, dim).mT,
        "fc2.bias": fc1_w.new_zeros(num_experts, dim),
    }


def _require_zero(name: str, bias: Tensor) -> None:
    if bias.any():
        raise ValueError(
            f"The array {name} is not zero: Swin-MoE's experts have no bias in their last layer."
        )
