"""Objects that checkpoints hold beside tensors.

They are read without running code of the file, some of them as plainer objects.
"""

import argparse
import datetime
import types
from pathlib import PurePath
from typing import Any

import numpy as np

#: numpy's types of single numbers.
_CODES = "?bhilqBHILQefd"


class _Ignored:
    """Takes the place of a numpy array, which no model needs."""

    def __init__(self, *args: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __repr__(self) -> str:
        return "array"


class _Type(_Ignored):
    """Takes the place of a numpy type, whose own state could lie about its memory."""

    def __init__(self, code: str, *args: Any):
        self.code, self.order = str(code), "="

    def __setstate__(self, state: Any) -> None:
        self.order = str(state[1])


def _number(kind: _Type, data: Any = None) -> Any:
    """Read a numpy scalar as a number of Python; other scalars are ignored."""
    dtype = np.dtype(kind.order + kind.code)
    return np.frombuffer(data, dtype)[0].item() if dtype.char in _CODES else _Ignored()


_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_NUMPY = {
    "multiarray.scalar": _number,
    "multiarray._reconstruct": _Ignored,
    "numeric._frombuffer": _Ignored,
}
_DATES = ("date", "datetime", "time", "timedelta", "timezone")
#: For ``torch.serialization.safe_globals``: the substitute of a class or function, and the name
#: that the class or function has in a file.
SAFE_GLOBALS: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    (types.SimpleNamespace, "types.SimpleNamespace"),
    (lambda *args: {}, "collections.defaultdict"),  # pickle adds its items afterwards
    # The default factories of a defaultdict.
    *((kind, f"builtins.{kind.__name__}") for kind in (dict, list, set, int, float)),
    *((getattr(datetime, name), f"datetime.{name}") for name in _DATES),
    *(
        (lambda *parts: str(PurePath(*parts)), f"pathlib.{place}{name}")
        for place in ("", "_local.")
        for name in _PATHS
    ),
    *(
        (kind, f"numpy.{core}.{name}")
        for core in ("_core", "core")
        for name, kind in _NUMPY.items()
    ),
    (_Type, "numpy.dtype"),
    (_Ignored, "numpy.ndarray"),
]
