"""Training by other libraries: each has a module here, the only one that changes its objects."""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Import the module of a library once it is asked for, since the library may be missing."""
    if name in ("lightning", "transformers"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
