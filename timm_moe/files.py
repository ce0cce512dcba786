"""Files that appear under their name only once they are complete."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch

from .version import __version__


def check_writable(file: str | Path, overwrite: bool = False) -> None:
    """Raise OSError if a file exists and must not be replaced, or has no folder to be written in."""
    file = Path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder; the output must be a file.")
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists; pass --overwrite (overwrite=True) to replace it.")
    if not file.absolute().parent.is_dir():
        raise FileNotFoundError(f"There is no folder {file.parent} to write {file.name} in.")


@contextmanager
def written_whole(file: str | Path) -> Iterator[Path]:
    """A temporary name beside ``file`` to write to; it becomes ``file`` if the block ends without an error."""
    file = Path(file)
    partial = file.with_name(f".{file.name}.partial")
    try:
        yield partial
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def write_json(file: str | Path, contents: dict[str, Any]) -> None:
    """Write results with the versions of what computed them; NaN and infinity, which JSON has not, become null."""
    versions = {"timm_moe": __version__, "timm": timm.__version__, "torch": torch.__version__}
    with written_whole(file) as partial:
        text = json.dumps(_finite({**contents, "versions": versions}), indent=2, allow_nan=False)
        partial.write_text(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
