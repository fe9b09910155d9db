"""Trees: nested lists, tuples and dicts, of arrays and numbers or of any values, taken apart and put together again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import lru_cache
from numbers import Number
from typing import Any

import numpy as np

from meshdist.arrays.device_types import taken


def is_tree(x: Any) -> bool:
    """Return whether `x` is a list, tuple, dict or number, and no array."""
    return isinstance(x, (list, tuple, dict, Number, np.generic))


class Tree:
    """The leaves of nested lists, tuples (named ones too) and dicts, and their structure; None has no leaves.

    A number is a leaf, and becomes a NumPy scalar in results. Dicts are equal if they have equal keys, in any order.

    Attributes:
        leaves: The arrays, in an order that follows from the structure.
        names: How messages name them, such as `x['w'][0]`.
        text: The structure in words, with dtypes and shapes: equal for trees that fit each other.

    Args:
        x: The nested arrays.
        name: How messages name `x`.
        leaf: Returns the array of a leaf that is no number from it and its name.

    Raises:
        TypeError: A leaf that is neither an array nor a number.

    Example:
        >>> tree = Tree({"w": [np.zeros((2, 3)), np.ones(1)], "b": 4})
        >>> tree.text, tree.names
        ("{'b': int64[], 'w': [float64[2, 3], float64[1]]}", ["x['b']", "x['w'][0]", "x['w'][1]"])
        >>> tree.rebuilt([leaf + 1 for leaf in tree.leaves])
        {'w': [array([[1., 1., 1.],
               [1., 1., 1.]]), array([2.])], 'b': np.int64(5)}
    """

    def __init__(self, x: Any, name: str = "x", leaf: Callable[[Any, str], Any] = taken) -> None:
        self.leaves: list[Any] = []
        self.names: list[str] = []
        self._leaf = leaf
        self.text, self._rebuild = self._taken_apart(x, name)

    def rebuilt(self, leaves: list[Any]) -> Any:
        """Return these leaves in the structure of the tree; those of numbers as NumPy scalars."""
        return self._rebuild(iter(leaves))

    def _taken_apart(self, x: Any, name: str) -> tuple[str, Callable[[Iterator[Any]], Any]]:
        if x is None:
            return "None", lambda leaves: None
        if isinstance(x, dict):
            return self._of_dict(x, name)
        if isinstance(x, (list, tuple)):
            return self._of_list(x, name)
        is_number = isinstance(x, (Number, np.generic))
        array = np.asarray(x) if is_number else self._leaf(x, name)
        self.leaves.append(array)
        self.names.append(name)
        return _described(array.dtype, array.shape), (lambda leaves: next(leaves)[()]) if is_number else next

    def _of_dict(self, x: dict[Any, Any], name: str) -> tuple[str, Callable[[Iterator[Any]], Any]]:
        # All ranks take the leaves in one order, whatever the order in which they made their dicts.
        keys = sorted(x, key=lambda key: (type(key).__name__, repr(key)))
        parts = [self._taken_apart(x[key], f"{name}[{key!r}]") for key in keys]

        def rebuild(leaves: Iterator[Any]) -> Any:
            made = copy.copy(x)
            for key, (_, part) in zip(keys, parts, strict=True):
                made[key] = part(leaves)
            return made

        return f"{{{', '.join(f'{key!r}: {text}' for key, (text, _) in zip(keys, parts, strict=True))}}}", rebuild

    def _of_list(self, x: Any, name: str) -> tuple[str, Callable[[Iterator[Any]], Any]]:
        parts = [self._taken_apart(item, f"{name}[{number}]") for number, item in enumerate(x)]
        texts, kind = ", ".join(text for text, _ in parts), type(x)

        def rebuild(leaves: Iterator[Any]) -> Any:
            return _of_kind(kind, [part(leaves) for _, part in parts])

        if isinstance(x, list):
            return f"[{texts}]", rebuild
        return f"{kind.__name__ if hasattr(kind, '_fields') else ''}({texts})", rebuild


@lru_cache(4096)  # NumPy takes microseconds to format a dtype
def _described(dtype: Any, shape: tuple[int, ...]) -> str:
    name = dtype.newbyteorder("=") if isinstance(dtype, np.dtype) else dtype
    return f"{name}[{', '.join(map(str, shape))}]"


def _of_kind(kind: Any, items: list[Any]) -> Any:
    """Return a list or tuple of this type."""
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


# ---- Trees of any values


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
        return _of_kind(type(nested), items)
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
