"""Official V-MoE and E³ checkpoints (google-research/vmoe, JAX): their arrays under timm's names, and their model.

Names in shapes: D width, h heads, d width of a head, E experts, H hidden width.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from ..files import check_writable, written_whole
from ..models.registration import vit_args
from .sharded import read_arrays

_BLOCK = re.compile(r"Encoder/encoderblock_(\d+)/")

#: Registered models with their sizes; all have a hidden width of 4 D.
_MODELS = {
    "vmoe_s32": vit_args("vmoe_small", 32),
    "vmoe_b32": vit_args("base", 32),
    "vmoe_b16": vit_args("base", 16),
    "vmoe_l32": vit_args("large", 32),
    "vmoe_l16": vit_args("large", 16),
    "vmoe_h14": vit_args("huge", 14),
}


class Source(NamedTuple):
    """The origin of a tensor: paths in the flax tree, and the function that makes one tensor of their arrays."""

    paths: tuple[str, ...]
    convert: Callable[..., Tensor]


class ImportedModel(NamedTuple):
    """The model of an imported checkpoint.

    Attributes:
        name: registered model name.
        kwargs: further arguments of ``timm.create_model``.
        parameters: number of parameters.
    """

    name: str
    kwargs: dict[str, Any]
    parameters: int


def state_dict_from_flax(params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Convert the parameters of a flax ``VisionTransformerMoe`` to the state dict of a ``vmoe_*`` model.

    Parameters of a flax ``VisionTransformerMoeEnsemble`` become a ``vmoe_pbe_*`` model's.

    Args:
        params: flat mapping from path (``Encoder/encoderblock_1/Moe/Mlp/Dense_0/kernel``) to array (numpy, JAX or
            torch), with ``params/`` before the paths or without.

    Raises:
        ValueError: if an array is missing, is not part of the architecture, or has the wrong shape.
    """
    params = {path.removeprefix("params/"): _tensor(array) for path, array in params.items()}
    _refuse_other_architectures(params)
    sources = _sources(params)
    for source in sources.values():
        for path in source.paths:
            if path not in params:
                raise ValueError(f"The checkpoint has no array {path}.")
    known = {path for source in sources.values() for path in source.paths}
    for path in params:
        if path not in known:
            raise ValueError(f"The checkpoint's array {path} has no place in a V-MoE.")
    state_dict = {}
    for name, source in sources.items():
        try:
            state_dict[name] = source.convert(*(params[path] for path in source.paths)).contiguous()
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{path} {tuple(params[path].shape)}" for path in source.paths)
            raise ValueError(f"The checkpoint's arrays have other shapes than a V-MoE's: {shapes}.") from error
    _require_fit(state_dict, *model_from_flax(params))
    return state_dict


def model_from_flax(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the registered name and the ``timm.create_model`` arguments of the model of flax parameters.

    K, capacities and losses do not show in the parameters and keep the model's defaults.

    Args:
        params: as for :func:`state_dict_from_flax`.

    Raises:
        ValueError: if the arrays do not have the shapes of a V-MoE.
    """
    try:
        return _model_from_shapes({path.removeprefix("params/"): tuple(np.shape(a)) for path, a in params.items()})
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError("The checkpoint's arrays have other shapes than a V-MoE's.") from error


def _model_from_shapes(shapes: dict[str, tuple[int, ...]]) -> tuple[str, dict[str, Any]]:
    moe_blocks = sorted(_moe_blocks(shapes))
    num_experts, dim, hidden = shapes[f"Encoder/encoderblock_{moe_blocks[0]}/Moe/Mlp/Dense_0/kernel"]
    patch_size, _, in_chans, _ = shapes["embedding/kernel"]
    depth = len(_blocks(shapes))
    (num_heads,) = {shape[1] for path, shape in shapes.items() if path.endswith("SelfAttention/query/kernel")}
    img_size = math.isqrt(shapes["Encoder/posembed_input/pos_embedding"][1] - 1) * patch_size
    size = dict(patch_size=patch_size, embed_dim=dim, depth=depth, num_heads=num_heads)
    name = next((name for name, args in _MODELS.items() if args == size and hidden == 4 * dim), None)
    (router,) = {shape for path, shape in shapes.items() if path.endswith("Moe/Router/dense/kernel")}
    kwargs: dict[str, Any] = {"ensemble_size": router[1]} if len(router) == 3 else {}
    if name is None:
        kwargs |= {**size, "mlp_ratio": hidden / dim}
    if img_size != 224:
        kwargs["img_size"] = img_size
    if in_chans != 3:
        kwargs["in_chans"] = in_chans
    kwargs["num_classes"] = shapes["head/kernel"][1] if "head/kernel" in shapes else 0
    kwargs["num_experts"] = num_experts
    kwargs["moe_layers"] = ",".join(map(str, moe_blocks))
    kwargs["pre_logits"] = "pre_logits/kernel" in shapes
    kwargs["act_layer"] = "gelu_tanh"  # flax's default GELU
    name = name or "vmoe_s32"
    return name.replace("vmoe", "vmoe_pbe") if "ensemble_size" in kwargs else name, kwargs


def import_checkpoint(prefix: str | Path, output: str | Path, overwrite: bool = False) -> ImportedModel:
    """Write an official checkpoint as a safetensors file for ``timm.create_model(..., checkpoint_path=...)``.

    Args:
        prefix: common beginning of the names of its ``.index`` and ``.data-…`` files.
        output: file to write, ending in ``.safetensors``; missing parents are made.
        overwrite: replace a file that exists.

    Raises:
        OSError: if a file is missing, exists already, or cannot be written.
        ValueError: if the checkpoint is damaged, is no V-MoE or is not finite; then nothing is written.
    """
    output = Path(output)
    if output.suffix != ".safetensors":
        raise ValueError(f"The output must be a file that ends in .safetensors, got {output}.")
    check_writable(output, overwrite)
    params = read_arrays(prefix)
    for path, array in params.items():
        if not array.isfinite().all():
            raise ValueError(f"The checkpoint's array {path} holds NaN or Inf.")
    state_dict = state_dict_from_flax(params)
    name, kwargs = model_from_flax(params)
    with written_whole(output) as partial:
        check_writable(output, overwrite)  # another process may have written it meanwhile
        save_file(state_dict, partial, {"format": "pt", "model": name, "model_kwargs": json.dumps(kwargs)})
    return ImportedModel(name, kwargs, sum(tensor.numel() for tensor in state_dict.values()))


def _refuse_other_architectures(params: Mapping[str, Tensor]) -> None:
    if not _blocks(params) or "embedding/kernel" not in params:
        raise ValueError("The checkpoint is no vision transformer of google-research/vmoe: it has no encoder blocks.")
    for expected, block in enumerate(sorted(_blocks(params))):
        if block != expected:
            raise ValueError(f"The checkpoint has arrays of encoder block {block}, but none of block {expected}.")
    if not _moe_blocks(params):
        raise ValueError("The checkpoint is a plain vision transformer: none of its blocks has experts.")


def _blocks(paths: Iterable[str]) -> set[int]:
    return {int(match[1]) for match in map(_BLOCK.match, paths) if match}


def _moe_blocks(paths: Iterable[str]) -> set[int]:
    return {int(match[1]) for path in paths if (match := _BLOCK.match(path)) and path[match.end() :].startswith("Moe/")}


def _sources(params: Mapping[str, Tensor]) -> dict[str, Source]:
    """List the origin of every tensor of the model by its name in timm."""
    sources = {
        "cls_token": Source(("cls",), _same),
        "pos_embed": Source(("Encoder/posembed_input/pos_embedding",), _same),
        "patch_embed.proj.weight": Source(("embedding/kernel",), lambda kernel: kernel.permute(3, 2, 0, 1)),
        "patch_embed.proj.bias": Source(("embedding/bias",), _same),
        **_norm("norm", "Encoder/encoder_norm"),
    }
    moe_blocks = _moe_blocks(params)
    for block in sorted(_blocks(params)):
        sources |= _block(f"blocks.{block}", f"Encoder/encoderblock_{block}", block in moe_blocks)
    for name, path in (("representation.fc", "pre_logits"), ("head", "head")):
        if any(other.startswith(f"{path}/") for other in params):
            sources |= _linear(name, path)
    return sources


def _block(name: str, path: str, moe: bool) -> dict[str, Source]:
    attention = f"{path}/SelfAttention"
    qkv = [f"{attention}/{part}" for part in ("query", "key", "value")]
    sources = {
        **_norm(f"{name}.norm1", f"{path}/LayerNorm_0"),
        f"{name}.attn.qkv.weight": Source(tuple(f"{part}/kernel" for part in qkv), _qkv_weight),
        f"{name}.attn.qkv.bias": Source(tuple(f"{part}/bias" for part in qkv), _qkv_bias),
        f"{name}.attn.proj.weight": Source((f"{attention}/out/kernel",), lambda kernel: kernel.flatten(0, 1).mT),
        f"{name}.attn.proj.bias": Source((f"{attention}/out/bias",), _same),
        **_norm(f"{name}.norm2", f"{path}/LayerNorm_1"),
    }
    mlp = f"{path}/Moe/Mlp" if moe else f"{path}/Mlp"
    sources |= _linear(f"{name}.mlp.fc1", f"{mlp}/Dense_0") | _linear(f"{name}.mlp.fc2", f"{mlp}/Dense_1")
    if moe:
        sources[f"{name}.mlp.router.weight"] = Source((f"{path}/Moe/Router/dense/kernel",), _router_weight)
    return sources


def _norm(name: str, path: str) -> dict[str, Source]:
    return {f"{name}.weight": Source((f"{path}/scale",), _same), f"{name}.bias": Source((f"{path}/bias",), _same)}


def _linear(name: str, path: str) -> dict[str, Source]:
    weight, bias = Source((f"{path}/kernel",), _transposed), Source((f"{path}/bias",), _same)
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _same(array: Tensor) -> Tensor:
    return array


def _transposed(kernel: Tensor) -> Tensor:
    """Transpose (..., in, out) to (..., out, in)."""
    return kernel.mT


def _router_weight(kernel: Tensor) -> Tensor:
    """Reshape (D, E), or an ensemble's (D, M, E/M), to (E, D)."""
    return kernel.flatten(1).mT


def _qkv_weight(*kernels: Tensor) -> Tensor:
    """Join three weights (D, h, d) to (3hd, D)."""
    return torch.cat([kernel.flatten(1, 2).mT for kernel in kernels])


def _qkv_bias(*biases: Tensor) -> Tensor:
    """Join three biases (h, d) to (3hd,)."""
    return torch.cat([bias.flatten() for bias in biases])


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array
    if isinstance(array, Mapping):
        raise ValueError("The parameters must be a flat mapping: join the names of nested ones by /.")
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not take
        return torch.from_numpy(array.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(array))  # a copy: JAX's arrays cannot be written to


def _require_fit(state_dict: dict[str, Tensor], name: str, kwargs: dict[str, Any]) -> None:
    """Raise ValueError unless the model takes exactly these tensors."""
    with torch.device("meta"):
        expected = timm.create_model(name, **kwargs).state_dict()
    for key, tensor in expected.items():
        if key not in state_dict or state_dict[key].shape != tensor.shape:
            found = tuple(state_dict[key].shape) if key in state_dict else "missing"
            raise ValueError(f"The checkpoint fits no V-MoE: {key} should be {tuple(tensor.shape)}, it is {found}.")
