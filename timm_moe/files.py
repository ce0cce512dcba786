"""Files and folders that appear under their name only once they are complete.

They are written to a hidden folder, ``.NAME.timm_moe.partial``, and renamed. The file
``.NAME.timm_moe.lock`` is locked meanwhile, so two processes never write the same output at once.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
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

_PARTIAL = ".timm_moe.partial"
_LOCK = ".timm_moe.lock"
_TRIAL = ".timm_moe.trial"


def check_writable(file: str | Path, overwrite: bool = False) -> None:
    """Check that a file can be written. Folders above it may be missing.

    Args:
        file: the file.
        overwrite: allow a file that exists.

    Raises:
        OSError: if the file exists and must not be replaced, or cannot be written.
        ValueError: if it has no name.
    """
    if str(file) in ("", "."):
        raise ValueError("The name of a file to write is empty.")
    file = Path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder, where a file must be written.")
    if file.exists() and not file.is_file():
        raise FileExistsError(f"{file} is a pipe or a device; the output must be a file.")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists; pass --overwrite (overwrite=True) to replace it.")
    _check_place(file)


def check_apart(output: str | Path, sources: Iterable[Any], images: Iterable[Any] = ()) -> None:
    """Check that a file to write is none that is read.

    Args:
        output: the file to write.
        sources: files and folders that are read; others than paths, and an empty text, are
            ignored.
        images: folders of images that are read.

    Raises:
        ValueError: if the output is a source itself, would replace a file in a source's folder, or
            is in a folder of images.
    """
    output = Path(output).resolve()
    for folder in images:
        if output.is_relative_to(Path(folder).resolve()):
            raise ValueError(f"{output} is in {folder}, whose images are read: write elsewhere.")
    for source in sources:
        if source == "" or not isinstance(source, (str, Path)):
            continue
        read = local_path(source).resolve()
        if output == read or (output.parent == read and output.exists()):
            raise ValueError(f"{output} belongs to {source}, which is read: write elsewhere.")


def local_path(source: str | Path) -> Path:
    """Return the path of a file or folder, which may be named as ``local-dir:FOLDER``.

    A leading ``~`` becomes the user's home, as in a shell.
    """
    return Path(os.path.expanduser(str(source).removeprefix("local-dir:")))


def require_inside(file: Path, folder: Path) -> Path:
    """Return the place of a file, which exists or not, with its links followed.

    Args:
        file: the file to read.
        folder: the folder that its links must not lead out of. A snapshot in the Hub's cache has
            links to the ``blobs`` of its own repository, which have links to the ``blobs`` of the
            cache, by hash.

    Raises:
        ValueError: if the file leads out of the folder.
    """
    target = file.resolve()
    places = _places(folder.resolve(), target)
    if not any(target.is_relative_to(place) for place in places):
        raise ValueError(
            f"{file} leads out of {folder}, to {target}: put a copy there, if it belongs there."
        )
    return target


def _places(folder: Path, target: Path) -> Iterator[Path]:
    """Yield the folders that a folder's links may lead to."""
    yield folder
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            yield parent.parent / "blobs"
            if re.fullmatch("[0-9a-f]{64}", target.name):
                yield parent.parents[1] / "blobs" / target.name[:2]


def check_folder(folder: str | Path, names: Sequence[str], overwrite: bool = False) -> None:
    """Check that files can be written to a folder.

    Args:
        folder: the folder, which may be missing.
        names: names of the files.
        overwrite: allow files that exist.

    Raises:
        OSError: if the folder cannot take the files, or has one that must not be replaced.
        ValueError: if it has no name.
    """
    if not str(folder):
        raise ValueError("The name of a folder to write is empty.")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; the output must be a folder.")
    _check_place(folder)
    for name in names:
        check_writable(folder / name, overwrite)


def holds_something(folder: Path) -> bool:
    """Return whether a folder has any entry besides the hidden ones of this module."""
    return folder.is_dir() and any(
        not path.name.endswith((_PARTIAL, _LOCK, _TRIAL)) for path in folder.iterdir()
    )


def _check_place(output: Path) -> None:
    """Check that a file or folder can be written.

    Raises:
        OSError: if the output, or the nearest folder above it that exists, cannot be written to.
    """
    if output.is_symlink() and not output.exists():
        raise FileNotFoundError(
            f"{output} is a broken symbolic link: remove it, or write elsewhere."
        )
    nearest = output if output.is_dir() else output.resolve().parent
    place = next((folder for folder in (nearest, *nearest.parents) if folder.exists()), None)
    if place is None:
        raise FileNotFoundError(f"{output} is on a drive that is not there.")
    if not place.is_dir():
        raise NotADirectoryError(f"{place} is a file, so {output} cannot be made in it.")
    # Windows cannot be asked for the rights, and there tempfile tries for ever.
    trial = place / _TRIAL
    try:
        # Another process may try the same place, or was killed as it did.
        with suppress(FileExistsError):
            trial.mkdir()
        with suppress(FileNotFoundError):
            trial.rmdir()
    except OSError as error:
        raise type(error)(f"{output} could not be written: {error.strerror}.") from error


@contextmanager
def staged(output: str | Path) -> Iterator[Path]:
    """Yield a hidden, empty folder from which a rename can move a file or folder to its final name.

    The folder is removed when the block ends. Missing parents of the output are made.

    Raises:
        BlockingIOError: if another process is writing the same output.
    """
    output = Path(output).resolve()
    if not output.parent.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
    # No rename leads into a mount point, and the parent of a folder may be closed to this user. The
    # hidden folder is then inside the output.
    inside = output.is_dir() and (os.path.ismount(output) or not os.access(output.parent, os.W_OK))
    place = f"{output}{os.sep}" if inside else str(output.with_name(f".{output.name}"))
    folder = Path(place + _PARTIAL)
    lock = Path(place + _LOCK)
    descriptor = _lock(lock, output)
    try:
        shutil.rmtree(folder, ignore_errors=True)  # A process that was killed may have left it.
        # On Windows the mode would close the finished output to other users, too.
        folder.mkdir(mode=0o700 if os.name == "posix" else 0o777)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            # The file goes before it is unlocked. Afterwards it could be another process's.
            lock.unlink()
        os.close(descriptor)


def _lock(file: Path, output: Path) -> int:
    """Lock a file until the returned descriptor is closed.

    Where a file system has no locks, the file is just opened. On Windows a file that exists is
    locked, and goes once it is closed.

    Raises:
        BlockingIOError: if another process holds the lock.
    """
    if fcntl is None:
        try:
            return os.open(file, os.O_CREAT | os.O_EXCL | getattr(os, "O_TEMPORARY", 0), 0o600)
        except FileExistsError:
            raise _is_writing(output) from None
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If there is another file of this name, or none, its owner has just removed the locked one.
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return descriptor
    os.close(descriptor)
    raise _is_writing(output)


def _is_writing(output: Path) -> BlockingIOError:
    """Return the error of an output that another process is writing."""
    return BlockingIOError(f"Another process is writing {output}: wait for it, or write elsewhere.")


@contextmanager
def written_whole(file: str | Path, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary name; what is written there becomes ``file`` if the block succeeds.

    If ``file`` is a link, its target is replaced.

    Args:
        file: the file.
        overwrite: replace a file that exists, maybe since another process wrote it meanwhile.

    Raises:
        OSError: if it exists and must not be replaced, or cannot be written.
    """
    with staged(file) as folder:
        if not overwrite:
            check_writable(file)
        partial = folder / Path(file).name
        partial.touch()
        mode = partial.stat().st_mode
        try:
            yield partial
        except OSError as error:  # E.g. the disk is full: the system's message names no file.
            raise type(error)(f"{file} could not be written: {error.strerror or error}") from error
        partial.chmod(mode)  # safetensors makes files that other users cannot read.
        os.replace(partial, Path(file).resolve())


def publish(folder: Path, target: Path, names: Sequence[str]) -> None:
    """Move a folder of files that belong together from inside :func:`staged` to its target.

    In a target that exists, ``names[-1]`` is removed first and written last. It gives the others
    their meaning, so readers never see a mixed folder. Files of these names that the new folder
    lacks are removed; all others remain.

    Args:
        folder: the new folder.
        target: its final place.
        names: names of the files that belong together.
    """
    target = target.resolve()
    if not target.is_dir():
        os.replace(folder, target)
        return
    (target / names[-1]).unlink(missing_ok=True)
    for name in names:
        if (folder / name).exists():
            os.replace(folder / name, target / name)
        elif (target / name).exists():
            (target / name).unlink()


def write_json(file: str | Path, contents: dict[str, Any], overwrite: bool = True) -> None:
    """Write results, and the versions of the libraries, as JSON.

    NaN and infinity, which JSON lacks, become null. ``overwrite`` is as for :func:`written_whole`.
    """
    versions = {"timm_moe": __version__, "timm": timm.__version__, "torch": torch.__version__}
    finite = json.loads(
        json.dumps({**contents, "versions": versions}, default=str),
        parse_constant=lambda name: None,
    )
    with written_whole(file, overwrite) as partial:
        partial.write_text(json.dumps(finite, indent=2) + "\n", encoding="utf-8")
