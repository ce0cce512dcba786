"""Read: a file becomes a dictionary, without running code of the file."""

import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from .safe_globals import SAFE_GLOBALS

#: The first bytes by which torch.load, and nothing else, decides that a file is an archive.
_ARCHIVE = b"PK\x03\x04"
#: How many of the objects that a file names are printed.
_NAMES = 3


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the dictionary in a checkpoint file.

    The tensors of an archive stay in the file until they are used. :func:`require_intact` verifies
    their checksums.

    Raises:
        OSError: if the file cannot be opened.
        ValueError: if it is damaged, is no checkpoint, or runs code when it is read.
    """
    is_archive = _is_archive(path)
    if path.suffix == ".safetensors" and is_archive:
        raise ValueError(
            f"{path} was written by torch.save and is no safetensors file: rename it to end in "
            ".pth."
        )
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if is_archive:
            _check_records(path)
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except Exception as error:  # a file that is no checkpoint may end in anything
        if isinstance(error, OSError) and error.filename is not None:  # the file cannot be opened
            raise
        needed = _globals_needed(path) if isinstance(error, pickle.UnpicklingError) else []
        if needed:
            more = f" and {len(needed) - _NAMES} more" if len(needed) > _NAMES else ""
            raise ValueError(
                f"{path} runs code when it is read, which is refused: write its weights to a file "
                "of their own, by torch.save(model.state_dict(), file). The file names "
                f"{', '.join(needed[:_NAMES])}{more}."
            ) from error
        raise ValueError(f"{path} {_what_it_is(path)}.") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{path} holds a {type(checkpoint).__name__}, not a checkpoint.")

    return checkpoint


def require_intact(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the tensors that were read from a file match its checksums.

    torch.load ignores the checksums of an archive. Here they are compared for these tensors alone,
    so an optimizer's state is not read.
    """
    if not _is_archive(path):
        return
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    if not any(record.CRC for record in records):  # torch.save was told to write none
        return
    written = {(record.file_size, record.CRC) for record in records}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        content: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        if (content.nbytes, zlib.crc32(content)) not in written:
            raise ValueError(
                f"{path} is damaged: {name} does not match its checksum. If its run still trains, "
                "the file may have been replaced while it was read: try again."
            )


def _what_it_is(path: Path) -> str:
    """Say what a file is that could not be read, with the remedy where there is one."""
    with path.open("rb") as file:
        begin = file.read(64)
    if not begin:
        return "is empty"
    if begin.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS in the file's place: run git lfs pull"
    if begin.lstrip().startswith(b"<"):
        return "is a web page, not a checkpoint: download the file itself"
    if begin[8:9] == b"{" and path.suffix != ".safetensors":
        return "is a safetensors file: rename it to end in .safetensors"
    return "is damaged or not a checkpoint"


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARCHIVE)) == _ARCHIVE


def _check_records(path: Path) -> None:
    """Raise an error unless an archive is as torch.save writes it and is intact.

    The checksums of the tensors are not compared here; see :func:`require_intact`.
    """
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            # Memory-mapped, the compressed bytes would be taken for the numbers.
            if record.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"The record {record.filename} is compressed.")
            is_tensor = Path(record.filename).parts[1:-1] == ("data",)  # as in last/data/0
            if record.CRC and not is_tensor:
                archive.read(record)  # zipfile compares the checksum


def _globals_needed(path: Path) -> list[str]:
    """Return the functions and classes that a pickle names and that are not harmless, sorted."""
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged pickle may raise anything
        return []
    return sorted(set(needed) - set(dict(SAFE_GLOBALS).values()))
