"""The file format of google-research/vmoe's checkpoints.

The files are ``PREFIX.index`` and, for each shard, e.g. ``PREFIX.data-00000-of-00008``. All of them
are msgpack.

The index is a tree of names. Its leaves state the shape of an array, its slices, and the shard of
each slice. A shard maps the number of an array to its slices. Arrays are numbered in the order of
the index.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_logger = logging.getLogger(__name__)

#: Kinds of msgpack extension in the files.
_NDARRAY, _SLICES, _INDEX_INFO = 1, 6, 8
#: File by which a checkpoint of orbax is known, the newer format.
_ORBAX = "manifest.ocdbt"
_CHUNKS_MARK = "__msgpack_array_chunk_a87ca2__"

#: (start, stop) in each dimension.
Slices = tuple[tuple[int, int], ...]


class _Entry(NamedTuple):
    """The index's entry for an array; ``slices`` are by shard."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    slices: dict[int, set[Slices]]

    def bytes_in(self, shard: int) -> int:
        return sum(map(_size, self.slices.get(shard, ()))) * self.dtype.itemsize


def read_arrays(prefix: str | Path) -> dict[str, Tensor]:
    """Read the model's arrays of a sharded checkpoint by path, e.g. ``Encoder/encoder_norm/scale``.

    Of a whole training state only the part under ``params`` is read.

    Args:
        prefix: common beginning of the file names, without ``.index``.

    Raises:
        ImportError: without msgpack.
        FileNotFoundError: if the index or a shard is missing.
        ValueError: if a file is truncated or damaged, does not fit the index, or is of orbax.
    """
    prefix = str(prefix).removesuffix(".index")
    if prefix.startswith("gs://"):
        raise ValueError(
            f"{prefix} is not on this machine: download its .index and .data files first."
        )
    _refuse_orbax(Path(prefix))
    index_file = Path(f"{prefix}.index")
    if not index_file.is_file():
        raise FileNotFoundError(
            f"There is no {index_file}: give the path that the checkpoint's files begin with."
        )

    entries, shard_count = _read_index(index_file)
    # Memory is allocated last: the sizes that an index states may be false.
    shards = _shards(prefix, shard_count, entries)
    _require_whole_arrays(index_file, entries)
    arrays = {
        number: torch.empty(entry.shape, dtype=entry.dtype) for number, entry in entries.items()
    }
    for shard, file in enumerate(shards):
        _logger.info("Reading shard %d of %d ...", shard + 1, shard_count)
        with _damage_of(file, "belongs to another index"):
            _read_shard(_unpack(file.read_bytes()), shard, entries, arrays)
    return {entries[number].path.removeprefix("params/"): array for number, array in arrays.items()}


def _refuse_orbax(path: Path) -> None:
    """Raise ValueError if a path is of a checkpoint as newer google-research/vmoe writes it.

    That is a folder which holds ``manifest.ocdbt``, by itself or in a folder for the item.
    """
    folder = path.parent if path.name == _ORBAX else path
    if any(next(folder.glob(place + _ORBAX), None) for place in ("", "*/")):
        raise ValueError(
            f"{folder} is a checkpoint of orbax ({_ORBAX}), which is not read: restore it with "
            "orbax and give its parameters to timm_moe.checkpoints.vmoe.state_dict_from_flax."
        )


def _read_index(file: Path) -> tuple[dict[int, _Entry], int]:
    """Return the entries of the model's arrays by their numbers, and the number of shards."""
    with _damage_of(file, "no index of a sharded checkpoint"):
        index = _unpack(file.read_bytes())
        shard_count = index["shard_count"]
        entries = [_entry(path, leaf, shard_count) for path, leaf in _leaves(index["index"], "")]
        if not entries:
            raise ValueError

    in_params = any(entry.path.startswith("params/") for entry in entries)
    return {
        number: entry
        for number, entry in enumerate(entries)
        if entry.path.startswith("params/") or not in_params
    }, shard_count


def _shards(prefix: str, shard_count: int, entries: dict[int, _Entry]) -> list[Path]:
    """List the files of the shards, each of which must be large enough for its entries."""
    shards = list[Path]()
    for shard in range(shard_count):
        file = Path(f"{prefix}.data-{shard:05d}-of-{shard_count:05d}")
        if not file.is_file():
            raise FileNotFoundError(f"The shard {file} is missing.")
        if sum(entry.bytes_in(shard) for entry in entries.values()) > file.stat().st_size:
            raise ValueError(f"{file} is truncated, or belongs to another index.")
        shards.append(file)
    return shards


def _require_whole_arrays(index_file: Path, entries: dict[int, _Entry]) -> None:
    """Raise ValueError unless the slices of each array cover it exactly once."""
    with _damage_of(index_file, "no index of a sharded checkpoint"):
        for entry in entries.values():
            parts = [part for of_shard in entry.slices.values() for part in of_shard]
            if not tile(parts, entry.shape):
                raise ValueError


@contextmanager
def _damage_of(file: Path, otherwise: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{file} is damaged, or {otherwise}.") from error


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, child in tree.items():
        if isinstance(child, dict):
            yield from _leaves(child, f"{path}{name}/")
        else:
            yield path + name, child


def _entry(path: str, leaf: Any, shard_count: int) -> _Entry:
    array_info, packed, shards = _inner(leaf, _INDEX_INFO)
    shape, dtype_name, *_ = _unpack(array_info)
    dtype = getattr(torch, dtype_name)
    slices: dict[int, set[Slices]] = defaultdict(set)
    for part, shard in zip(packed, shards, strict=True):
        if shard not in range(shard_count):
            raise ValueError
        slices[shard].add(_slices(part))
    if not isinstance(dtype, torch.dtype):
        raise ValueError
    return _Entry(path, tuple(shape), dtype, slices)


def tile(parts: Sequence[Slices], shape: Sequence[int]) -> bool:
    """Tell whether slices cover each element of an array of this shape exactly once."""
    for part in parts:
        if len(part) != len(shape) or not all(_is_range(*bounds) for bounds in part):
            return False
    # A false shape could ask for a mask of any size, so the numbers of elements come first.
    if sum(map(_size, parts)) != math.prod(shape):
        return False
    covered = np.zeros(shape, bool)
    for part in parts:
        covered[tuple(slice(*bounds) for bounds in part)] = True
    return bool(covered.all())


def _size(part: Slices) -> int:
    return math.prod(stop - start for start, stop in part)


def _read_shard(
    content: Any, shard: int, entries: dict[int, _Entry], arrays: dict[int, Tensor]
) -> None:
    """Copy the slices in a shard into the arrays."""
    if content.pop(_CHUNKS_MARK) is not True:
        raise ValueError
    found = {
        int(number): {_slices(_inner(part, _SLICES)): chunks for chunks, part in slices}
        for number, slices in content.items()
    }
    for number, array in arrays.items():
        if set(found.get(number, {})) != entries[number].slices.get(shard, set()):
            raise ValueError
        for part, chunks in found.get(number, {}).items():
            flat = torch.cat([_vector(chunk, array.dtype) for chunk in chunks])
            target = array[tuple(slice(*bounds) for bounds in part)]
            target.copy_(flat.view(target.shape))


def _vector(chunk: Any, dtype: torch.dtype) -> Tensor:
    shape, name, content = _inner(chunk, _NDARRAY)
    if getattr(torch, name) != dtype or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError
    return torch.frombuffer(bytearray(content), dtype=dtype)


def _slices(part: Any) -> Slices:
    """Return the bounds of a slice in each dimension.

    In the file each of them is packed once more, as [start, stop, step].
    """
    packed = _unpack(part) if isinstance(part, bytes) else part
    bounds = [_unpack(bound) for bound in packed]
    for start, stop, step in bounds:
        if not _is_range(start, stop) or step not in (None, 1):
            raise ValueError
    return tuple((start, stop) for start, stop, _ in bounds)


def _is_range(start: Any, stop: Any) -> bool:
    """Tell if bounds are those of a slice with elements.

    Negative bounds would hide how much memory an array needs.
    """
    return type(start) is type(stop) is int and 0 <= start < stop


def _inner(extension: Any, kind: int) -> Any:
    if extension.code != kind:
        raise ValueError
    return _unpack(extension.data)


def _unpack(data: bytes) -> Any:
    try:
        import msgpack
    except ModuleNotFoundError as error:
        raise ImportError("Reading this checkpoint needs msgpack: pip install msgpack.") from error
    return msgpack.unpackb(data, strict_map_key=False)
