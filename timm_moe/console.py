"""Lines for a terminal or a log, and values in messages.

Names from files in them can neither begin a line nor steer the terminal.
"""

import difflib
import errno
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any


def printable(text: Any) -> str:
    r"""Write a text on one line.

    What a terminal would obey or cannot show becomes an escape, as ``\x1b``.
    """
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)
    )


def show(*lines: str) -> None:
    """Print lines.

    If the reader has closed the pipe, as ``head`` does, these lines and all later ones are dropped.
    """
    try:
        print("\n".join(map(printable, lines)), flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EINVAL):  # Windows says EINVAL.
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class PrintableFormatter(logging.Formatter):
    """Formatter of a log that writes each message on one line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message of a record as :func:`printable` text."""
        return printable(super().formatMessage(record))


def describe(error: Exception) -> str:
    """Describe an error in one line of at most 504 letters.

    The line begins with the error's class if its text is empty or only a key.
    """
    text = printable(" ".join(str(error).split()))
    if not text or isinstance(error, KeyError):
        text = f"{type(error).__name__} {text}".strip()
    return shortened(text, 500)


def shortened(text: str, length: int) -> str:
    """Cut a text to a number of letters, and mark where it was cut."""
    return text if len(text) <= length else text[:length] + " ..."


def in_layers(number: int) -> str:
    """Say in how many layers of a model something is."""
    return f"in each of {number} layers" if number > 1 else "in one layer"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the end of a sentence that asks for the name a mistyped one is nearest to.

    It reads ``"; did you mean num_experts?"``, or ``"."`` if none is near.

    Args:
        name: the mistyped name.
        names: those that there are.
        cutoff: how alike the names must be, from 0 to 1.
    """
    nearest = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return f"; did you mean {nearest[0]}?" if nearest else "."


def shown(value: Any) -> str:
    """Shorten any value for a message.

    Of what is nested in it only types are written, since its text may have no end.
    """
    text = _word(value)
    if type(value) in (list, tuple):
        left, right = "[]" if type(value) is list else "()"
        text = f"{left}{', '.join(map(_word, value[:80]))}{right}"
    return shortened(text, 80)


def shown_name(name: str) -> str:
    """Shorten a name for a message, without quotes; what cannot be printed is escaped."""
    return shortened(_word(name)[1:-1], 80)


def _word(value: Any) -> str:
    """Write a single value, at most its first 81 letters, or the type of another value."""
    if not is_single(value):
        return f"{type(value).__name__} ..."
    return repr(value[:81] if isinstance(value, str) else value)


def is_single(value: Any) -> bool:
    """Tell if a value is None, a text, or a number that can be written out."""
    return type(value) in (str, bool, float, type(None)) or (
        type(value) is int and value.bit_length() < 256
    )
