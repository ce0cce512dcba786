"""Files and folders that appear under their name only once they are complete.

What is being written stands in a hidden folder ``….timm_moe.partial`` on the file system of the output, beside a file
``….timm_moe.lock`` that is locked as long as its process lives. So two processes never write the same output at once,
and what a killed one left is known as such: the next one that writes the same output removes it.
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

#: What the names of all that is hidden end in.
_PARTIAL, _LOCK = ".timm_moe.partial", ".timm_moe.lock"


def check_writable(file: str | Path, overwrite: bool = False) -> None:
    """Raise OSError if a file exists and must not be replaced, or cannot be written; missing parents are no reason."""
    file = Path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; the output must be a file.")
    if file.exists() and not file.is_file():
        raise FileExistsError(f"{file} is a pipe or a device; the output must be a file.")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists; pass --overwrite (overwrite=True) to replace it.")
    _check_place(file)


def check_folder(folder: str | Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Raise OSError if a folder cannot take files of these names, or has one that must not be replaced.

    Missing parents are no reason.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; the output must be a folder.")
    for name in names:
        if (folder / name).is_dir():
            raise IsADirectoryError(f"{folder / name} is a folder, where a file must be written.")
        if (folder / name).exists():
            check_writable(folder / name, overwrite)
    _check_place(folder)


def check_model_folder(folder: Path, names: Sequence[str], overwrite: bool = False) -> None:
    """As :func:`check_folder`, but nothing else may be in the folder either, unless it may be overwritten."""
    check_folder(folder, names, overwrite=True)
    if not overwrite and folder.is_dir() and _holds_something(folder):
        raise FileExistsError(
            f"The folder {folder} is not empty; pass --overwrite (overwrite=True) to replace its model."
        )


def _holds_something(folder: Path) -> bool:
    """Whether anything is in a folder but what a killed process left there."""
    return any(not path.name.endswith((_PARTIAL, _LOCK)) for path in folder.iterdir())


def _check_place(output: Path) -> None:
    """Raise OSError unless the output, or the first folder above it that is there, can be written to."""
    if output.is_symlink() and not output.exists():
        raise FileNotFoundError(f"{output} is a link to what is not there.")
    place = output if output.is_dir() else _real(output).parent
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file, so {output} cannot be made in it.")
    with _saying_what_failed(output):
        tempfile.TemporaryFile(dir=place).close()


@contextmanager
def staged(output: str | Path) -> Iterator[Path]:
    """A hidden, empty folder from which a rename can put a file or folder in its place; gone when the block ends.

    It stands in the output where that is a folder, which may be a mount point, otherwise beside it. Missing parents of
    the output are made; if the block fails, they are removed again.

    Raises:
        BlockingIOError: if another process is writing the same output.
        OSError: if the folder cannot be made.
    """
    output = _real(output)
    made = [parent for parent in output.parents if not parent.exists()]
    try:
        if made:
            with _saying_what_failed(output):
                output.parent.mkdir(parents=True, exist_ok=True)
        place = _place(output)
        for other in {_beside(output), _inside(output)} - {place}:  # the folder may have come since, or gone
            _remove_leftovers(other)
        with _workspace(place, output) as folder:
            if _place(output) != place:
                raise BlockingIOError(f"Another process has just written {output}: try again.")
            yield folder
    except BaseException:
        for parent in made:
            with suppress(OSError):  # another process uses it
                parent.rmdir()
        raise


@contextmanager
def written_whole(file: str | Path) -> Iterator[Path]:
    """A temporary name to write to; it becomes ``file`` if the block ends without an error.

    The file's mode is that of any new file, whatever wrote it. A link stays one; what it points to is replaced.
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
    """A folder in the system's temporary folder; those for the same purpose of processes that were killed are removed.

    It is closed to other users.
    """
    temporary = Path(tempfile.gettempdir())
    name = f"timm_moe-{purpose}-"
    for lock in temporary.glob(f".{name}*{_LOCK}"):
        _remove_leftovers(str(lock).removesuffix(_LOCK))
    with _workspace(str(temporary / f".{name}{secrets.token_hex(8)}"), temporary) as folder:
        yield folder


def publish(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Move what :func:`staged` gave room for to its target: a folder of files that belong together.

    At no moment does the last of the names, without which the others mean nothing, stand beside files that are not its
    own. Where the target is there already, files of these names that the folder lacks are removed from it, others stay.

    Raises:
        OSError: if a file cannot be moved; the target is as it was if it was the first.
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
    """Write results with the versions of what computed them; NaN and infinity, which JSON has not, become null."""
    with written_whole(file) as partial:
        dump_json(partial, contents)


def dump_json(file: Path, contents: dict[str, Any]) -> None:
    """Likewise, but as it is written to a name that is temporary already."""
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


def _inside(output: Path) -> str:
    """What the names of all that is hidden begin with, in the output itself."""
    return f"{output}{os.sep}"


def _beside(output: Path) -> str:
    return str(output.with_name(f".{output.name}"))


def _place(output: Path) -> str:
    return _inside(output) if output.is_dir() else _beside(output)


@contextmanager
def _workspace(place: str, output: Path) -> Iterator[Path]:
    """The hidden folder at a place, emptied of what a killed process left; no other process has it meanwhile."""
    lock, folder = Path(place + _LOCK), Path(place + _PARTIAL)
    with _saying_what_failed(output):
        descriptor = _lock(lock, output)
    try:
        with _saying_what_failed(output):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.unlink(missing_ok=True)
        if descriptor is not None:
            os.close(descriptor)


def _remove_leftovers(place: str) -> None:
    """Of a process that was killed; those of one that works stay."""
    if os.path.exists(place + _LOCK):
        with suppress(OSError), _workspace(place, Path(place)):
            pass


def _lock(file: Path, output: Path) -> int | None:
    """Descriptor of a file that this process alone has, until it is closed or the process ends.

    None where the file system knows no locks, as some network file systems: there the file itself is the lock.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            descriptor, new = os.open(file, flags | os.O_EXCL, 0o600), True
        except FileExistsError:
            descriptor, new = os.open(file, flags, 0o600), False
        try:
            _flock(descriptor)
        except BlockingIOError as error:
            os.close(descriptor)
            raise BlockingIOError(f"Another process is writing {output}: wait for it, or write elsewhere.") from error
        except OSError as error:
            os.close(descriptor)
            if new:
                return None
            raise FileExistsError(
                f"{file} is there, so another process is writing {output}, or one was killed: delete it if none is."
            ) from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor
        os.close(descriptor)  # of a process that has just ended and removed it


def _flock(descriptor: int) -> None:
    if fcntl is None:
        raise OSError("This system has no flock.")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _saying_what_failed(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a sentence of this module
            raise
        raise type(error)(f"{output} could not be written: {error.strerror}.") from error
