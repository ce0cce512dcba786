"""Validation of option values."""

import math
from collections.abc import Iterable
from typing import Any


def check_number(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    or_none: bool = False,
) -> None:
    """Raise ValueError unless an option's value is a finite number in a range.

    Args:
        name: name of the option.
        value: its value.
        low: lowest possible value.
        high: highest possible value.
        above: the value must be above ``low``.
        or_none: None is possible.
    """
    if or_none and value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_possible = is_number and math.isfinite(value) and low <= value <= high
    if not is_possible or (above and value == low):
        bound = f"{'above' if above else 'of at least'} {low}"
        bound += f" and at most {high}" if high < math.inf else ""
        raise ValueError(
            f"{name} must be a number {bound}{' or None' if or_none else ''}, got {value!r}."
        )


def check_integer(
    name: str, value: Any, low: int, high: int | None = None, or_none: bool = False
) -> None:
    """Raise ValueError unless an option's value is an integer from ``low`` to ``high``.

    Args:
        name: name of the option.
        value: its value.
        low: lowest possible value.
        high: highest possible value; None for no limit.
        or_none: None is possible.
    """
    if or_none and value is None:
        return
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(
            f"{name} must be an integer {bound}{' or None' if or_none else ''}, got {value!r}."
        )


def check_flag(name: str, value: Any) -> None:
    """Raise ValueError unless an option's value is a bool.

    timm's ``--model-kwargs`` makes a string of ``false``, which would count as true.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_choice(name: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError unless an option's value is one of the allowed names."""
    if value not in list(allowed):
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")
