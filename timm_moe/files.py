"""Files and folders that appear under their name only once they are complete.

They are written to a hidden folder ``….timm_moe.partial`` on the file system of the output, beside a file
``….timm_moe.lock`` that is locked for as long as the process lives. So two processes never write the same output at
once, and the next process that writes an output removes what a killed one left there.
"""

import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
import torch

from .version import __version__

try:
    import fcntl
except ModuleNotFoundError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

_PARTIAL, _LOCK = ".timm_moe.partial", ".timm_moe.lock"


def check_writable(file: str | Path, overwrite: bool = False) -> None:
    """Raise OSError if a file exists and must not be replaced, or cannot be written; parents may be missing."""
    file = Path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; the output must be a file.")
    if file.exists() and not file.is_file():
        raise FileExistsError(f"{file} is a pipe or a device; the output must be a file.")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists; pass --overwrite (overwrite=True) to replace it.")
    _check_place(file)


def check_folder(folder: str | Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Raise OSError if a folder cannot take files of these names, or has one that must not be replaced."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; the output must be a folder.")
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a folder, where a file must be written.")
        if (folder / name).exists():
            check_writable(folder / name, overwrite)
    _check_place(folder)


def holds_something(folder: Path) -> bool:
    """Return whether a folder has any entry besides what a killed process left there."""
    return folder.is_dir() and any(not path.name.endswith((_PARTIAL, _LOCK)) for path in folder.iterdir())


def _check_place(output: Path) -> None:
    """Raise OSError unless the output, or the nearest folder above it that exists, can be written to."""
    if output.is_symlink() and not output.exists():
        raise FileNotFoundError(f"{output} is a broken symbolic link to what is not there.")
    place = output if output.is_dir() else _real(output).parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file, so {output} cannot be made in it.")
    with _naming(output):
        tempfile.TemporaryFile(dir=place).close()


@contextmanager
def staged(output: str | Path) -> Iterator[Path]:
    """Yield a hidden, empty folder from which a rename can move a file or folder to its final name.

    It lies in the output where that is a folder (it may be a mount point), otherwise beside it, and is removed when the
    block ends. Missing parents of the output are made, and removed again if the block fails.

    Raises:
        BlockingIOError: if another process is writing the same output.
        OSError: if the folder cannot be made.
    """
    output = _real(output)
    made = [parent for parent in output.parents if not parent.exists()]
    try:
        if made:  # else nothing outside the output is touched
            with _naming(output):
                output.parent.mkdir(parents=True, exist_ok=True)
        inside, beside = f"{output}{os.sep}", str(output.with_name(f".{output.name}"))
        place, other = (inside, beside) if output.is_dir() else (beside, inside)
        _remove_leftovers(other)
        with _workspace(place, output) as folder:
            if output.is_dir() != (place == inside):
                raise BlockingIOError(f"Another process has just written {output}: try again.")
            yield folder
    except BaseException:
        with suppress(OSError):  # another process uses them
            for parent in made:
                parent.rmdir()
        raise


@contextmanager
def written_whole(file: str | Path) -> Iterator[Path]:
    """Yield a temporary name to write to; it becomes ``file`` if the block ends without an error.

    The file gets the mode of any new file. A symbolic link remains one; its target is replaced.
    """
    with staged(file) as folder:
        partial = folder / _real(file).name
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors closes its files to other users
        os.replace(partial, _real(file))


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Yield a private folder in the system's temporary folder; folders that killed processes left there are removed."""
    temporary = Path(tempfile.gettempdir())
    name = f".timm_moe-{purpose}-"
    for lock in temporary.glob(f"{name}*{_LOCK}"):
        _remove_leftovers(str(lock).removesuffix(_LOCK))
    with _workspace(str(temporary / f"{name}{secrets.token_hex(8)}"), temporary) as folder:
        yield folder


def publish(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Move a folder of files that belong together from inside :func:`staged` to its target.

    In a target that exists, ``names[-1]``, which gives the others their meaning, is removed first and written last, so
    readers never see a mixed folder. Files of these names that the new folder lacks are removed; all others remain.

    Raises:
        OSError: if a file cannot be moved; if it was the first, the target is unchanged.
    """
    target = _real(target)
    if not target.is_dir():
        os.replace(folder, target)
        return
    *others, last = names
    aside, moved = folder.with_name(f"{last}.old"), False
    if (target / last).exists():
        os.rename(target / last, aside)
    try:
        for name in others:
            if (folder / name).exists():
                os.replace(folder / name, target / name)
            else:
                (target / name).unlink(missing_ok=True)
            moved = True
        os.replace(folder / last, target / last)
    except OSError:
        if aside.exists() and not moved:
            os.rename(aside, target / last)
        raise


def write_json(file: str | Path, contents: dict[str, Any]) -> None:
    """Write results and the versions of the libraries; NaN and infinity, which JSON lacks, become null."""
    with written_whole(file) as partial:
        dump_json(partial, contents)


def dump_json(file: Path, contents: dict[str, Any]) -> None:
    """Write the same to a name that is temporary already."""
    versions = {"timm_moe": __version__, "timm": timm.__version__, "torch": torch.__version__}
    file.write_text(json.dumps(_finite({**contents, "versions": versions}), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


@contextmanager
def _workspace(place: str, output: Path) -> Iterator[Path]:
    """Yield the hidden folder at a place, locked and emptied of what a killed process left."""
    lock, folder = Path(place + _LOCK), Path(place + _PARTIAL)
    with _naming(output):
        descriptor = _lock(lock, output)
    try:
        with _naming(output):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.unlink(missing_ok=True)  # before it is unlocked, so nobody else's is removed
        if descriptor is not None:
            os.close(descriptor)


def _remove_leftovers(place: str) -> None:
    """Remove what a killed process left at a place; a living one keeps its lock."""
    if os.path.exists(place + _LOCK):
        with suppress(OSError), _workspace(place, Path(place)):
            pass


def _lock(file: Path, output: Path) -> int | None:
    """Lock a file for this process until the returned descriptor is closed.

    Some network file systems have no locks. There the file itself is the lock, and None is returned.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor, new = os.open(file, flags | os.O_EXCL, 0o600), True
    except FileExistsError:
        descriptor, new = os.open(file, flags, 0o600), False
    try:
        if fcntl is None:
            raise OSError("This system has no flock.")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # else its owner has just removed it
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:
        os.close(descriptor)
        if new:
            return None
        raise FileExistsError(
            f"{file} is there, so another process is writing {output}, or one was killed: delete it if none is."
        ) from error
    os.close(descriptor)
    raise BlockingIOError(f"Another process is writing {output}: wait for it, or write elsewhere.")


@contextmanager
def _naming(output: Path) -> Iterator[None]:
    """Name the output in the system's errors."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence of this module
            raise
        raise type(error)(f"{output} could not be written: {error.strerror}.") from error
