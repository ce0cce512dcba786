"""Lines for a terminal or a log.

Names from files in them can neither begin a line nor steer the terminal.
"""

import logging
import os
import sys
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
    except BrokenPipeError:
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
