"""The file format of google-research/vmoe: ``PREFIX.index`` and ``PREFIX.data-00000-of-00008``, all of them msgpack.

The index is a tree of names whose leaves say the shape of an array, the slices it was cut into, and the shard that
holds each slice. A shard maps the number of an array to its slices. Arrays are numbered in the order of the index.
"""

import logging
import math
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

#: Kinds of msgpack extension that stand in the files.
_NDARRAY, _SLICES, _INDEX_INFO = 1, 6, 8
_CHUNKS_MARK = "__msgpack_array_chunk_a87ca2__"

#: (start, stop) in each dimension.
Slices = tuple[tuple[int, int], ...]


class _Entry(NamedTuple):
    """What the index says of an array; ``shards`` maps each of its slices to the shard that holds it."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: dict[Slices, int]

    def bytes_in(self, shard: int) -> int:
        return sum(_volume(part) for part, holder in self.shards.items() if holder == shard) * self.dtype.itemsize


def read_arrays(prefix: str | Path) -> dict[str, Tensor]:
    """The model's arrays in a sharded checkpoint by their path, as ``Encoder/encoder_norm/scale``.

    Of a whole training state only the part under ``params`` is read.

    Args:
        prefix: what the names of the files have in common, without ``.index``.

    Raises:
        ImportError: without msgpack.
        FileNotFoundError: if the index or a shard is missing.
        ValueError: if a file is truncated, damaged, or does not fit the index.
    """
    prefix = str(prefix).removesuffix(".index")
    if prefix.startswith("gs://"):
        raise ValueError(f"{prefix} is not on this machine: download its .index and .data files first.")
    index_file = Path(f"{prefix}.index")
    if not index_file.is_file():
        raise FileNotFoundError(f"There is no {index_file}; the prefix is what the checkpoint's files have in common.")
    index = _unpack(index_file)
    try:
        shard_count = index["shard_count"]
        entries = [_entry(path, leaf, shard_count) for path, leaf in _leaves(index["index"], "")]
        if type(shard_count) is not int or not entries:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index_file} is damaged, or no index of a sharded checkpoint.") from error
    shard_files = _shard_files(prefix, shard_count)
    in_params = any(entry.path.startswith("params/") for entry in entries)
    wanted = {n: entry for n, entry in enumerate(entries) if entry.path.startswith("params/") or not in_params}
    for shard, file in enumerate(shard_files):  # before room is made for what an index may only claim
        if sum(entry.bytes_in(shard) for entry in wanted.values()) > file.stat().st_size:
            raise ValueError(f"{file} is truncated, or belongs to another index.")
    arrays = {number: torch.empty(entry.shape, dtype=entry.dtype) for number, entry in wanted.items()}
    for shard, file in enumerate(shard_files):
        if shard_count > 1:
            _logger.info("Reading shard %d of %d ...", shard + 1, shard_count)
        _read_shard(file, shard, wanted, arrays)
    return {wanted[number].path.removeprefix("params/"): array for number, array in arrays.items()}


def _shard_files(prefix: str, count: int) -> list[Path]:
    files = []
    for shard in range(count):
        files.append(Path(f"{prefix}.data-{shard:05d}-of-{count:05d}"))
        if not files[-1].is_file():
            raise FileNotFoundError(f"The shard {files[-1]} is missing.")
    return files


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, f"{path}{name}/")
        else:
            yield path + name, child


def _entry(path: str, leaf: Any, shard_count: int) -> _Entry:
    array_info, slices, shards = _inner(leaf, _INDEX_INFO)
    shape, dtype_name, *_ = _unpackb(array_info)
    dtype = getattr(torch, dtype_name)
    parts = {_slices(part): shard for part, shard in zip(slices, shards, strict=True)}
    inside = all(0 <= start < stop <= size for part in parts for (start, stop), size in zip(part, shape, strict=True))
    apart = not any(_overlap(*pair) for pair in combinations(parts, 2))
    covered = sum(map(_volume, parts))
    held = all(0 <= shard < shard_count for shard in shards)
    if not (isinstance(dtype, torch.dtype) and inside and apart and covered == math.prod(shape) and held):
        raise ValueError
    return _Entry(path, tuple(shape), dtype, parts)


def _volume(part: Slices) -> int:
    return math.prod(stop - start for start, stop in part)


def _overlap(a: Slices, b: Slices) -> bool:
    return all(max(a0, b0) < min(a1, b1) for (a0, a1), (b0, b1) in zip(a, b, strict=True))


def _read_shard(file: Path, shard: int, entries: dict[int, _Entry], arrays: dict[int, Tensor]) -> None:
    """Copy what a shard holds of the arrays into them."""
    content = _unpack(file)
    try:
        if content.pop(_CHUNKS_MARK) is not True:
            raise ValueError
        found = {
            int(number): {_slices(_inner(part, _SLICES)): chunks for chunks, part in slices}
            for number, slices in content.items()
        }
        for number, array in arrays.items():
            expected = {part for part, holder in entries[number].shards.items() if holder == shard}
            if set(found.get(number, {})) != expected:
                raise ValueError
            for part, chunks in found.get(number, {}).items():
                flat = torch.cat([_vector(chunk, array.dtype) for chunk in chunks])
                target = array[tuple(slice(*bounds) for bounds in part)]
                target.copy_(flat.view(target.shape))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, or belongs to another index.") from error


def _vector(chunk: Any, dtype: torch.dtype) -> Tensor:
    shape, name, content = _inner(chunk, _NDARRAY)
    if getattr(torch, name) != dtype or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError
    return torch.frombuffer(bytearray(content), dtype=dtype)


def _slices(part: Any) -> Slices:
    """Bounds of a slice in each dimension; each is packed once more, as [start, stop, step]."""
    packed = _unpackb(part) if isinstance(part, bytes) else part
    return tuple((start, stop) for start, stop, _ in map(_unpackb, packed))


def _inner(extension: Any, kind: int) -> Any:
    if extension.code != kind:
        raise ValueError
    return _unpackb(extension.data)


def _unpack(file: Path) -> dict[str, Any]:
    try:
        content = _unpackb(file.read_bytes())
    except (ValueError, TypeError) as error:  # msgpack's errors are ValueErrors
        raise ValueError(f"{file} is truncated or damaged.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} is no part of a sharded checkpoint.")
    return content


def _unpackb(data: bytes) -> Any:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise ImportError("Reading this checkpoint needs msgpack: pip install msgpack.") from error
    return msgpack.unpackb(data, strict_map_key=False)
