"""Differences between a file's weights and a model, told as options that the model would need.

A list of names and shapes that do not match leaves the reader to guess which option is wrong. The
usual ones show in the weights: how many blocks there are, which of them have experts, the classes,
and the sizes of image, patch and token.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from ..console import shown_name

Weights = Mapping[str, Tensor]

#: The number of an entry of a list of modules, as in ``blocks.3.mlp``.
_NUMBER = re.compile(r"\.(\d+)(?=\.)")
_PATCHES = "patch_embed.proj.weight"
_PREFIX_TOKENS = ("cls_token", "reg_token", "dist_token")


def explain(held: Weights, expected: Weights, classifiers: Iterable[str]) -> list[str]:
    """Tell by which options a model that was built differs from the one that was saved.

    Args:
        held: the weights in the file, by the model's names where they have such.
        expected: the weights of the model.
        classifiers: names of the model's classifiers, as in timm's configs.

    Returns:
        A phrase for each option, the file's value first; none if the difference is of another kind.
    """
    return [
        *_of_prefix(held, expected),
        *_of_patches(held, expected),
        *_of_lengths(held, expected),
        *_of_experts(held, expected),
        *_of_image_size(held, expected),
        *_of_classes(held, expected, classifiers),
    ]


def _of_prefix(held: Weights, expected: Weights) -> Iterator[str]:
    """Compare the beginnings of the names, which another trainer may have put before them."""
    levels = zip(*(name.split(".")[:-1] for name in held), strict=False)
    common = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    prefix = "".join(f"{level[0]}." for level in common)
    if prefix and not any(name.startswith(prefix) for name in expected):
        yield f"all names in the file begin with {shown_name(prefix)}, none in the model"


def _of_patches(held: Weights, expected: Weights) -> Iterator[str]:
    """Compare the layer that embeds patches, (D, channels, height, width)."""
    if not _are_comparable(held, expected, _PATCHES) or held[_PATCHES].ndim != 4:
        return
    options = {"embed_dim": 0, "in_chans": 1, "patch_size": 3}
    for option, dimension in options.items():
        sizes = [weights[_PATCHES].shape[dimension] for weights in (held, expected)]
        if sizes[0] != sizes[1]:
            yield f"the file has {option}={sizes[0]}, the model {sizes[1]}"


def _of_lengths(held: Weights, expected: Weights) -> Iterator[str]:
    """Compare the lengths of the lists of modules that both have."""
    ours, theirs = _lengths(held), _lengths(expected)
    differing = [name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]]
    for name in sorted(differing, key=lambda name: (name.count("."), name))[:2]:
        option = f" (depth={ours[name]})" if name == "blocks" else ""
        yield f"the file has {ours[name]} of {name}{option}, the model {theirs[name]}"


def _lengths(names: Iterable[str]) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for name in names:
        for found in _NUMBER.finditer(name):
            place = name[: found.start()]
            lengths[place] = max(lengths.get(place, 0), int(found[1]) + 1)
    return lengths


def _of_experts(held: Weights, expected: Weights) -> Iterator[str]:
    """Compare the blocks that have experts, whose matrices are stacked, (E, H, D)."""
    matrices = [
        name
        for name in held.keys() & expected.keys()
        if name.endswith(".weight") and {held[name].ndim, expected[name].ndim} <= {2, 3}
    ]
    ours, theirs = (
        {_block_of(name) for name in matrices if weights[name].ndim == 3}
        for weights in (held, expected)
    )
    if not ours or ours == theirs:  # A dense network becomes every expert.
        return
    blocks, others = (", ".join(_in_order(of_model)) for of_model in (ours, theirs))
    if not theirs:
        yield f"the file has experts in {blocks}, the model none: name a model with experts"
    elif all(re.fullmatch(r"blocks\.\d+", block) for block in ours | theirs):
        numbers, others = (
            ",".join(block.removeprefix("blocks.") for block in _in_order(of_model))
            for of_model in (ours, theirs)
        )
        yield f"the file has experts in moe_layers={numbers}, the model in {others}"
    else:  # moe_layers counts the blocks of all stages.
        yield f"the file has experts in {blocks}, the model in {others}: another moe_layers"


def _block_of(name: str) -> str:
    """Return the beginning of a name up to its last number, as ``layers.2.blocks.1``."""
    return name[: max((found.end() for found in _NUMBER.finditer(name)), default=0)]


def _in_order(blocks: Iterable[str]) -> list[str]:
    """Sort names of blocks by their numbers."""
    return sorted(blocks, key=lambda block: [int(number) for number in re.findall(r"\d+", block)])


def _of_image_size(held: Weights, expected: Weights) -> Iterator[str]:
    """Compare the sizes of images, or else the numbers of positions."""
    if not _are_comparable(held, expected, "pos_embed") or held["pos_embed"].ndim != 3:
        return
    sizes = [_image_size(weights) for weights in (held, expected)]
    if None not in sizes:
        if sizes[0] != sizes[1]:
            yield f"the file has img_size={sizes[0]}, the model {sizes[1]}"
        return
    positions = [weights["pos_embed"].shape[1] for weights in (held, expected)]
    if positions[0] != positions[1]:
        yield f"the file has {positions[0]} positions, the model {positions[1]}"


def _image_size(weights: Weights) -> int | None:
    """Compute the size of square images, in pixels; None if the positions are of no square."""
    positions = weights["pos_embed"].shape[1]
    before = sum(weights[name].shape[1] for name in _PREFIX_TOKENS if name in weights)
    for patches in (positions - before, positions):
        if _PATCHES in weights and patches > 0 and math.isqrt(patches) ** 2 == patches:
            return math.isqrt(patches) * weights[_PATCHES].shape[-1]
    return None


def _of_classes(held: Weights, expected: Weights, classifiers: Iterable[str]) -> Iterator[str]:
    """Compare the rows of the classifiers."""
    others = {name for name in expected if not name.startswith(tuple(classifiers))}
    for name in (f"{classifier}.weight" for classifier in classifiers):
        if _are_comparable(held, expected, name) and len(held[name]) != len(expected[name]):
            yield f"the file has num_classes={len(held[name])}, the model {len(expected[name])}"
        elif name in expected and name not in held and held.keys() >= others:
            yield f"the file has no classifier {name} (num_classes=0)"


def _are_comparable(held: Weights, expected: Weights, name: str) -> bool:
    return name in held and name in expected and held[name].ndim == expected[name].ndim
