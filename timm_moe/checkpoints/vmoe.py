"""Official V-MoE and E³ checkpoints (google-research/vmoe, JAX).

Their arrays get timm's names, and their shapes tell the model.

Names in shapes: D width, h heads, d width of a head, E experts, H hidden width.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from torch import Tensor, nn

from ..model_config import change_pretrained_cfg
from ..models.registered import weightless_model
from ..models.variants import vmoe_variants
from ..quick_init import quick_init
from .description import OF_IMAGES
from .layouts import require_kinds
from .vmoe_format import read_arrays

_BLOCK = re.compile(r"Encoder/encoderblock_(\d+)/")


def _same(array: Tensor) -> Tensor:
    return array


def _transposed(kernel: Tensor) -> Tensor:
    return kernel.mT  # (..., in, out) to (..., out, in)


#: For each tensor in timm the path in the flax tree, and the function that makes the tensor of the
#: arrays there. Query, key and value take the place of braces.
_MODEL: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "cls_token": ("cls", _same),
    "pos_embed": ("Encoder/posembed_input/pos_embedding", _same),
    "patch_embed.proj.weight": ("embedding/kernel", lambda kernel: kernel.permute(3, 2, 0, 1)),
    "patch_embed.proj.bias": ("embedding/bias", _same),
    "norm.weight": ("Encoder/encoder_norm/scale", _same),
    "norm.bias": ("Encoder/encoder_norm/bias", _same),
    "representation.fc.weight": ("pre_logits/kernel", _transposed),
    "representation.fc.bias": ("pre_logits/bias", _same),
    "head.weight": ("head/kernel", _transposed),
    "head.bias": ("head/bias", _same),
}
#: Parts that a model may lack.
_OPTIONAL = ("pre_logits/", "head/")
#: The same for each block. In blocks with experts ``Mlp`` lies in ``Moe``.
_PARTS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "norm1.weight": ("LayerNorm_0/scale", _same),
    "norm1.bias": ("LayerNorm_0/bias", _same),
    # three of (D, h, d) to (3hd, D), and of (h, d) to (3hd,)
    "attn.qkv.weight": (
        "SelfAttention/{}/kernel",
        lambda *three: torch.cat([part.flatten(1, 2).mT for part in three]),
    ),
    "attn.qkv.bias": (
        "SelfAttention/{}/bias",
        lambda *three: torch.cat([part.flatten() for part in three]),
    ),
    "attn.proj.weight": ("SelfAttention/out/kernel", lambda kernel: kernel.flatten(0, 1).mT),
    "attn.proj.bias": ("SelfAttention/out/bias", _same),
    "norm2.weight": ("LayerNorm_1/scale", _same),
    "norm2.bias": ("LayerNorm_1/bias", _same),
    "mlp.fc1.weight": ("Mlp/Dense_0/kernel", _transposed),
    "mlp.fc1.bias": ("Mlp/Dense_0/bias", _same),
    "mlp.fc2.weight": ("Mlp/Dense_1/kernel", _transposed),
    "mlp.fc2.bias": ("Mlp/Dense_1/bias", _same),
}


def state_dict_from_flax(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert the parameters of a flax model to the state dict of a model of timm.

    A ``VisionTransformerMoe`` becomes a ``vmoe_*`` model, a ``VisionTransformerMoeEnsemble`` a
    ``vmoe_pbe_*`` model.

    Args:
        params: flat mapping from path (``Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel``) to array
            (numpy, JAX or torch), with ``params/`` before the paths or without.

    Raises:
        ValueError: if an array is missing, is not part of the architecture, or has the wrong shape.
    """
    params = {path.removeprefix("params/"): _tensor(array) for path, array in params.items()}
    if not _blocks(params) or "embedding/kernel" not in params:
        raise ValueError(
            "The checkpoint is no vision transformer of google-research/vmoe: it has no encoder "
            "blocks."
        )
    if not _blocks(params, "Moe/"):
        raise ValueError(
            "The checkpoint is a plain vision transformer: none of its blocks has experts."
        )
    for path, array in params.items():
        if not array.numel():  # its other sizes could be anything
            raise ValueError(f"The checkpoint's array {path} is empty.")

    sources = _sources(params)
    known = {path for paths, _ in sources.values() for path in paths}
    if missing := known - params.keys():
        raise ValueError(f"The checkpoint has no array {min(missing)}.")
    if strange := params.keys() - known:
        raise ValueError(f"The checkpoint's array {min(strange)} has no place in a V-MoE.")

    state_dict = {}
    for name, (paths, convert) in sources.items():
        try:
            state_dict[name] = convert(*(params[path] for path in paths)).contiguous()
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{path} {tuple(params[path].shape)}" for path in paths)
            raise ValueError(
                f"The checkpoint's arrays have other shapes than a V-MoE's: {shapes}."
            ) from error
    require_fit(state_dict, *model_from_flax(params), "V-MoE")
    return state_dict


def require_fit(
    state_dict: Mapping[str, Tensor], name: str, kwargs: dict[str, Any], family: str
) -> None:
    """Raise ValueError unless tensors have the names, shapes and kinds of a model's."""
    expected = weightless_model(name, **kwargs).state_dict()
    if different := expected.keys() ^ state_dict.keys():
        key = min(different)
        reason = (
            "is missing from the checkpoint" if key in expected else f"has no place in a {family}"
        )
        raise ValueError(f"The array {key} {reason}.")

    for key, tensor in expected.items():
        if state_dict[key].shape != tensor.shape:
            found = f"{key} should be {tuple(tensor.shape)}, it is {tuple(state_dict[key].shape)}"
            raise ValueError(f"The checkpoint fits no {family}: {found}.")
    require_kinds(state_dict, expected, "The checkpoint")


def model_from_flax(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of the model of flax parameters for ``timm.create_model``.

    K, capacities and losses do not show in the parameters and keep the model's defaults.

    Args:
        params: as for :func:`state_dict_from_flax`.

    Raises:
        ValueError: if the arrays do not have the shapes of a V-MoE.
    """
    shapes = {
        path.removeprefix("params/"): tuple(np.shape(array)) for path, array in params.items()
    }
    moe_blocks = sorted(_blocks(shapes, "Moe/"))
    try:
        size = _size_of(shapes, moe_blocks)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError("The checkpoint's arrays have other shapes than a V-MoE's.") from error

    vit = dict(
        patch_size=size.patch_size,
        embed_dim=size.width,
        depth=len(_blocks(shapes)),
        num_heads=size.num_heads,
    )
    registered = _registered_name(vit) if size.hidden == 4 * size.width else None
    name = registered or "vmoe_s32"
    kwargs: dict[str, Any] = {}
    if size.members is not None:
        name = name.replace("vmoe", "vmoe_pbe")
        kwargs["ensemble_size"] = size.members
    if registered is None:
        kwargs |= {**vit, "mlp_ratio": size.hidden / size.width}
    if size.img_size != 224:
        kwargs["img_size"] = size.img_size
    if size.in_chans != 3:
        kwargs["in_chans"] = size.in_chans
    kwargs |= dict(
        num_classes=size.num_classes,
        num_experts=size.num_experts,
        moe_layers=",".join(map(str, moe_blocks)),
        pre_logits="pre_logits/kernel" in shapes,
        act_layer="gelu_tanh",  # flax's default GELU
    )
    return name, kwargs


class _Size(NamedTuple):
    """Sizes of a V-MoE."""

    patch_size: int
    in_chans: int
    img_size: int
    width: int
    hidden: int
    num_heads: int
    num_experts: int
    num_classes: int
    members: int | None  # of an ensemble


def _size_of(shapes: Mapping[str, tuple[int, ...]], moe_blocks: list[int]) -> _Size:
    """Read the sizes of a V-MoE from the shapes of its arrays.

    Raises:
        KeyError, IndexError, ValueError: if an array is missing, or has another shape.
    """
    num_experts, width, hidden = shapes[
        f"Encoder/encoderblock_{moe_blocks[0]}/Moe/Mlp/Dense_0/kernel"
    ]
    patch_size, _, in_chans, _ = shapes["embedding/kernel"]
    (num_heads,) = {
        shape[1] for path, shape in shapes.items() if path.endswith("SelfAttention/query/kernel")
    }
    (router,) = {
        shape for path, shape in shapes.items() if path.endswith("Moe/Router/dense/kernel")
    }
    patches = shapes["Encoder/posembed_input/pos_embedding"][1] - 1  # one is the class token's
    return _Size(
        patch_size=patch_size,
        in_chans=in_chans,
        img_size=math.isqrt(patches) * patch_size,
        width=width,
        hidden=hidden,
        num_heads=num_heads,
        num_experts=num_experts,
        num_classes=shapes["head/kernel"][1] if "head/kernel" in shapes else 0,
        members=router[1] if len(router) == 3 else None,
    )


def _registered_name(size: dict[str, Any]) -> str | None:
    """Return the name of the registered V-MoE of this size, with a hidden width of 4 D."""
    for name, model in vmoe_variants("vmoe", "V-MoE", {}).items():
        if size.items() <= {**model.args, **model.own_size}.items():
            return name
    return None


def import_checkpoint(prefix: str | Path) -> nn.Module:
    """Load an official checkpoint as a model of timm.

    Args:
        prefix: common beginning of the names of its ``.index`` and ``.data-…`` files.

    Raises:
        OSError: if a file is missing.
        ValueError: if the checkpoint is damaged, is no V-MoE or is not finite.
    """
    params = read_arrays(prefix)
    require_finite(params)
    state_dict = state_dict_from_flax(params)
    name, kwargs = model_from_flax(params)
    # All of the reference's configurations have images in [-1, 1]. Their crops differ.
    half = [0.5] * kwargs.get("in_chans", 3)
    images = {"mean": half, "std": half, "interpolation": "bilinear"}
    return imported_model(name, kwargs, state_dict, images)


def require_finite(arrays: Mapping[str, Tensor]) -> None:
    """Raise ValueError if an array holds NaN or Inf."""
    for path, array in arrays.items():
        if not array.isfinite().all():
            raise ValueError(f"The checkpoint's array {path} holds NaN or Inf.")


def imported_model(
    name: str, kwargs: dict[str, Any], state_dict: dict[str, Tensor], images: dict[str, Any]
) -> nn.Module:
    """Create the model of a checkpoint, whose config states what is known of its images."""
    with quick_init():
        model = timm.create_model(name, **kwargs)
    model.load_state_dict(state_dict)
    change_pretrained_cfg(model, **{entry: images.get(entry) for entry in OF_IMAGES})
    return model


def _blocks(paths: Iterable[str], part: str = "") -> set[int]:
    return {
        int(match[1])
        for path in paths
        if (match := _BLOCK.match(path)) and path.startswith(part, match.end())
    }


def _sources(params: Mapping[str, Tensor]) -> dict[str, tuple[list[str], Callable[..., Tensor]]]:
    """Return the paths of the arrays of each tensor, and their conversion, by its name in timm."""
    absent = tuple(part for part in _OPTIONAL if not any(path.startswith(part) for path in params))
    sources = {
        name: source
        for name, source in _MODEL.items()
        if not (absent and source[0].startswith(absent))
    }
    moe_blocks = _blocks(params, "Moe/")
    for block in sorted(_blocks(params)):
        for name, (path, convert) in _PARTS.items():
            path = f"Moe/{path}" if block in moe_blocks and path.startswith("Mlp/") else path
            sources[f"blocks.{block}.{name}"] = (f"Encoder/encoderblock_{block}/{path}", convert)
        if block in moe_blocks:
            sources[f"blocks.{block}.mlp.router.weight"] = (
                f"Encoder/encoderblock_{block}/Moe/Router/dense/kernel",
                # (D, E), or an ensemble's (D, M, E/M), to (E, D)
                lambda kernel: kernel.flatten(1).mT,
            )
    return {
        name: (
            [path.format(part) for part in ("query", "key", "value")] if "{}" in path else [path],
            convert,
        )
        for name, (path, convert) in sources.items()
    }


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    if isinstance(array, Mapping):
        raise ValueError(
            "The parameters must be a flat mapping: join the names of nested ones by /."
        )
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not take
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))  # a copy: JAX's arrays cannot be written to
