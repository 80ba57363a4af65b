"""Checks of single Python values, shared by every host-side constructor."""

import numbers
from collections.abc import Iterable

from jaxsched.core.config import MAX_COUNT


def check_count(field: str, value: object, low: int = 0, high: int = MAX_COUNT) -> int:
    """`value` as an int in [low, high].

    Raises:
      ValueError: naming the field and the value, if it is not an integer in range.
        Booleans and floats are not integers here.
    """
    if type(value) is int and low <= value <= high:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{field} must be an integer, got {value!r}")
    if not low <= value <= high:
        wanted = f">= {low}" if value < low else f"<= {high}"
        raise ValueError(f"{field} must be {wanted}, got {value}")
    return int(value)


def check_counts(field: str, values: object, low: int = 0) -> list[int]:
    """`values` as a list of ints >= low.

    Raises:
      ValueError: naming the field and the entry.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise ValueError(f"{field} must be a list of integers, got {values!r}")
    return [check_count(f"{field}[{i}]", v, low) for i, v in enumerate(values)]


def check_flag(field: str, value: object) -> bool:
    """`value` as a bool.

    Raises:
      ValueError: naming the field and the value, if it is not True or False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{field} must be true or false, got {value!r}")
    return value
