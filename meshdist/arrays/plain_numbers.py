"""Arguments as Python's own numbers, by which earlier calls with equal arguments are found."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

_NUMBERS = frozenset((int, bool))
_NAMES = frozenset((int, str))


def plain_number(value: Any) -> Any:
    """Return an integer of NumPy as Python's; all else as it is, also times, which NumPy derives from integers."""
    return int(value) if isinstance(value, np.integer) and not isinstance(value, np.timedelta64) else value


def plain_truth(value: Any) -> Any:
    """Return True or False of NumPy as Python's; all else as it is."""
    return bool(value) if isinstance(value, np.bool_) else value


def plain_form(value: Any, plain: Callable[[Any], Any]) -> Hashable | None:
    """Return what is equal for equal numbers, sequences or dicts of numbers, and stays when one of these changes.

    None of all else, such as 1.0, which equals 1 and may be a wrong argument. `plain` is one of the functions above:
    what it does not return as a number may be wrong too.
    """
    kind = type(value)
    if kind is int or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        # Two keys may name one axis, of which the last one counts: in their order.
        names, numbers = tuple(map(plain_number, value)), tuple(map(plain, value.values()))
        are_plain = _NAMES.issuperset(map(type, names)) and _NUMBERS.issuperset(map(type, numbers))
        return (names, numbers) if are_plain else None
    if kind is tuple or kind is list or (kind is np.ndarray and value.ndim):
        numbers = tuple(map(plain, value))
        return numbers if _NUMBERS.issuperset(map(type, numbers)) else None
    number: int = plain(value)
    return number if type(number) in _NUMBERS else None
