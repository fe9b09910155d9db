"""Values in nested lists, tuples and dicts: the arguments and results of a job, in which some are exchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any


def exchanged(nested: Any, exchange: Callable[[Any], Any]) -> Any:
    """Return `nested` with `exchange(value)` in place of each value within its lists, tuples and dicts.

    Containers of which nothing is exchanged are those of `nested`, and the others are new ones of the same type. Keys
    of dicts stay.

    Example:
        >>> exchanged({"a": [1, (2, 3)], "b": 4}, lambda value: value * 10)
        {'a': [10, (20, 30)], 'b': 40}
    """
    if isinstance(nested, dict):
        found = {key: exchanged(value, exchange) for key, value in nested.items()}
        if all(found[key] is value for key, value in nested.items()):
            return nested
        made = copy.copy(nested)
        made.update(found)
        return made
    if isinstance(nested, (list, tuple)):
        items = [exchanged(value, exchange) for value in nested]
        if all(item is value for item, value in zip(items, nested, strict=True)):
            return nested
        kind = type(nested)
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return exchange(nested)


def values_in(nested: Any) -> Iterator[Any]:
    """Yield the values within nested lists, tuples and dicts, in the order in which `exchanged` meets them.

    Example:
        >>> list(values_in({"a": [1, (2, 3)], "b": 4}))
        [1, 2, 3, 4]
    """
    if isinstance(nested, (dict, list, tuple)):
        for each in nested.values() if isinstance(nested, dict) else nested:
            yield from values_in(each)
    else:
        yield nested
