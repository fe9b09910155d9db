"""Trees of arrays and small values: a name for each array, and the structure as JSON."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from meshdist.arrays.device_types import device_type_of
from meshdist.arrays.host import AnyArray, as_array, check_dtype
from meshdist.checkpoint.stored_types import name_of
from meshdist.tensor.dtensor import DTensor

# What one array alone is called.
ONLY = "array"


@dataclass(frozen=True)
class PerRank:
    """An array that differs between ranks, each of which saves and loads its own.

    Attributes:
        array: This rank's array.

    Example:
        >>> import numpy as np
        >>> from meshdist.checkpoint import PerRank
        >>> PerRank(np.arange(2)).array
        array([0, 1])
    """

    array: Any


def per_rank(array: AnyArray) -> PerRank:
    """Mark an array of a tree as different on every rank, such as the state of a random generator.

    Args:
        array: This rank's array, of any shape and dtype.

    Example:
        >>> import numpy as np
        >>> from meshdist.checkpoint import per_rank
        >>> tree = {"weights": np.ones(3), "noise": per_rank(np.arange(2))}
    """
    return PerRank(array)


def per_rank_name(name: str, rank: int) -> str:
    """Return the name of a rank's own array."""
    return f"{name}.rank{rank:05}"


def own_arrays(stored_names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the stored names of the ranks' own arrays, by name and rank."""
    found: dict[str, dict[int, str]] = {}
    for stored in stored_names:
        if match := re.fullmatch(r"(.*)\.rank(\d{5,7})", stored, re.DOTALL):
            found.setdefault(match[1], {})[int(match[2])] = stored
    return found


class Named:
    """The arrays of a tree by name, and its structure.

    The name of an array is the keys and indices on the way to it, joined by dots, as in torch's state dicts.

    Attributes:
        arrays: The DTensors, arrays and PerRanks by name.
        structure: The tree with the arrays' names in place of the arrays: nested lists that JSON takes.
    """

    def __init__(self, tree: Any) -> None:
        self.arrays: dict[str, Any] = {}
        self._around: dict[int, str] = {}  # where the containers around the current place are, by id
        self.structure = self._taken(tree, "", "tree")

    def _taken(self, x: Any, name: str, place: str) -> list[Any]:
        if id(x) in self._around:
            raise ValueError(f"{place} is {self._around[id(x)]}, which contains it: a tree cannot contain itself")
        if not isinstance(x, (dict, list, tuple)) and not is_record(x):
            return self._named(x, name or ONLY, place) if is_array(x) else ["value", encoded(x, place)]
        self._around[id(x)] = place
        taken = self._parts_taken(x, name, place)
        del self._around[id(x)]
        return taken

    def _parts_taken(self, x: Any, name: str, place: str) -> list[Any]:
        if isinstance(x, dict):
            return ["dict", [[key, self._taken(x[key], joined(name, key, place), f"{place}[{key!r}]")] for key in x]]
        if isinstance(x, (list, tuple)):
            kind = "list" if isinstance(x, list) else "tuple"
            parts = enumerate(x)
            return [kind, [self._taken(item, joined(name, n, place), f"{place}[{n}]") for n, item in parts]]
        named = record_fields(x)
        return ["dict", [[k, self._taken(named[k], joined(name, k, place), f"{place}.{k}")] for k in named]]

    def _named(self, x: Any, name: str, place: str) -> list[Any]:
        if name in self.arrays or name == "__metadata__":
            why = "names the header of safetensors" if name == "__metadata__" else "is the name of two arrays"
            raise ValueError(f"{place}: {name!r} {why}; rename a key")
        if isinstance(x, DTensor):
            kind = "array"
        elif isinstance(x, PerRank):
            kind, x = "per_rank", PerRank(on_host(x.array, place))
        else:
            kind = "scalar" if isinstance(x, np.generic) else "array"
            x = on_host(x, place)
        check_dtype(x.array if kind == "per_rank" else x, place, "; lists of strings and numbers are saved as they are")
        try:
            name_of(x.array.dtype if kind == "per_rank" else x.dtype)
        except TypeError as error:
            raise TypeError(f"{place}: {error}") from None
        self.arrays[name] = x
        return [kind, name]


def joined(name: str, key: Any, place: str) -> str:
    """Return the name of what has this key in the part of a tree that has the name `name`."""
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise TypeError(f"{place}: keys must be strings or integers, got {key!r} ({type(key).__name__})")
    return f"{name}.{key}" if name else str(key)


def is_array(x: Any) -> bool:
    """Return whether `x` is saved as an array; else it is a small value."""
    if isinstance(x, (DTensor, PerRank, np.ndarray, np.generic)):
        return True
    return any(hasattr(x, name) for name in ("__array_interface__", "__dlpack__", "__cuda_array_interface__"))


def on_host(x: Any, place: str) -> Any:
    """Return an array or NumPy scalar of any library as a NumPy array, without a copy if it is in host memory."""
    if isinstance(x, DTensor):
        raise TypeError(f"{place}: per_rank takes a plain array, got a DTensor; pass its to_local()")
    if isinstance(x, np.generic):
        return np.asarray(x)
    return x.get() if device_type_of(x) == "cuda" else as_array(x, place)


def encoded(x: Any, place: str) -> Any:
    """Return a small Python value as JSON has it; a pair of kind and text for what JSON lacks."""
    if x is None or isinstance(x, (bool, int, str)):
        return x
    if isinstance(x, float):
        return x if math.isfinite(x) else ["float", repr(x)]
    if isinstance(x, complex):
        return ["complex", repr(x)]
    if isinstance(x, bytes):
        return ["bytes", base64.b64encode(x).decode()]
    raise TypeError(
        f"{place}: expected arrays, numbers, strings, bytes, None, and dicts, lists, tuples and dataclasses of them,"
        f" got {type(x).__name__}; nothing is pickled: save what it consists of"
    )


_DECODED: dict[str, Callable[[str], Any]] = {"float": float, "complex": complex, "bytes": base64.b64decode}


def decoded(x: Any) -> Any:
    """Return the value of which `encoded` made `x`."""
    return _DECODED[x[0]](x[1]) if isinstance(x, list) else x


def rebuilt(structure: list[Any], array: Callable[[str, str], Any]) -> Any:
    """Return the tree of a structure, with `array(kind, name)` for its arrays."""
    kind, content = structure
    if kind == "dict":
        return {key: rebuilt(part, array) for key, part in content}
    if kind in ("list", "tuple"):
        parts = [rebuilt(part, array) for part in content]
        return parts if kind == "list" else tuple(parts)
    return decoded(content) if kind == "value" else array(kind, content)


def check_names(structure: list[Any]) -> None:
    """Raise ValueError if two arrays of a tree have one name, or one that the ranks' own arrays are stored under."""
    own: list[str] = []
    others: list[str] = []
    rebuilt(structure, lambda kind, name: (own if kind == "per_rank" else others).append(name))
    for name, count in Counter(own + others).items():
        if count > 1:
            raise ValueError(f"{name!r} is the name of two arrays, on different ranks; rename a key")
    for name, by_rank in own_arrays(others).items():
        if name in own:
            raise ValueError(
                f"{min(by_rank.values())!r} is the name of two arrays: per_rank arrays {name!r} are stored under such"
                " names; rename a key"
            )


def check_structure(structure: Any, arrays: Iterable[str]) -> None:
    """Raise ValueError unless `structure` is that of a tree with these arrays; or TypeError, KeyError."""
    names, own = set(arrays), own_arrays(arrays)
    parts = [structure]
    while parts:
        kind, content = parts.pop()
        if kind == "dict":
            for key, part in content:
                joined("", key, "tree")
                parts.append(part)
        elif kind in ("list", "tuple"):
            parts.extend(content)
        elif kind == "value":
            if encoded(decoded(content), "tree") != content:
                raise ValueError(f"{content!r:.80} is not a value")
        elif kind not in ("array", "scalar", "per_rank") or content not in (own if kind == "per_rank" else names):
            raise ValueError(f"the tree has {content!r:.80} of kind {kind!r:.80}, which is not an array")


def has_arrays(tree: Any) -> bool:
    """Return whether there are arrays in a tree, and not small values alone."""
    if isinstance(tree, (dict, list, tuple)):
        return any(map(has_arrays, tree.values() if isinstance(tree, dict) else tree))
    return is_array(tree) or (is_record(tree) and has_arrays(record_fields(tree)))


def is_record(x: Any) -> bool:
    """Return whether `x` is an object of a dataclass, which is saved as the dict of its fields."""
    return is_dataclass(x) and not isinstance(x, type) and not is_array(x)


def record_fields(x: Any) -> dict[str, Any]:
    """Return the fields of an object of a dataclass that its class takes as arguments."""
    return {field.name: getattr(x, field.name) for field in fields(x) if field.init}


def of_types(like: Any, found: Any) -> Any:
    """Return `found`, with the dataclasses and named tuples that `like` has in place of dicts and tuples.

    Raises:
        ValueError: The dataclass or named tuple has other fields.
    """
    if is_record(like) and isinstance(found, dict):
        known = record_fields(like)
        if unknown := found.keys() - known.keys():
            raise ValueError(f"{type(like).__name__} has no field {min(unknown, key=str)!r}, which the checkpoint has")
        return replace(like, **{key: of_types(known[key], part) for key, part in found.items()})
    if isinstance(like, dict) and isinstance(found, dict):
        return {key: of_types(like.get(key), part) for key, part in found.items()}
    if hasattr(like, "_fields") and isinstance(found, (list, tuple)):
        if len(found) != len(like):
            raise ValueError(f"{type(like).__name__} has {len(like)} fields, and the checkpoint has {len(found)}")
        return type(like)(*map(of_types, like, found))
    if isinstance(like, (list, tuple)) and isinstance(found, (list, tuple)) and len(like) == len(found):
        return type(found)(map(of_types, like, found))
    return found


def filled(
    tree: Any,
    array: Callable[[str, Any], Any],
    value: Callable[[str, Any], Any],
    is_value: Callable[[str], bool],
    name: str = "",
) -> Any:
    """Return `tree` with others in place of its arrays and values.

    Args:
        tree: The tree.
        array: Returns what is put in place of an array, from its name and the array.
        value: The same for a value; also for a list or dict without arrays whose name `is_value`.
        is_value: See there.
        name: The name of the tree.
    """
    if is_array(tree) or not (isinstance(tree, (dict, list, tuple)) or is_record(tree)):
        return array(name or ONLY, tree) if is_array(tree) else value(name or ONLY, tree)
    if name and is_value(name) and not has_arrays(tree):
        return of_types(tree, value(name, tree))
    if is_record(tree):
        return replace(tree, **filled(record_fields(tree), array, value, is_value, name))
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    made = {key: filled(x, array, value, is_value, joined(name, key, "like")) for key, x in parts}
    if isinstance(tree, dict):
        return made
    items = list(made.values())
    return items if isinstance(tree, list) else type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)


def visit(
    tree: Any,
    array: Callable[[str, Any], object],
    value: Callable[[str, Any], object],
    is_value: Callable[[str], bool],
) -> None:
    """Call `array` and `value` with the names of what `filled` replaces, and with that itself."""

    def noting(note: Callable[[str, Any], object]) -> Callable[[str, Any], Any]:
        def call(name: str, leaf: Any) -> Any:
            note(name, leaf)
            return leaf

        return call

    filled(tree, noting(array), noting(value), is_value)


def values_of(structure: list[Any], name: str = "") -> dict[str, Any]:
    """Return the small values of a structure by name, and the lists, tuples and dicts that have no arrays."""
    kind, content = structure
    if kind == "value":
        return {name or ONLY: decoded(content)}
    if kind not in ("dict", "list", "tuple"):
        return {}
    found: dict[str, Any] = {}
    names = []
    for key, part in content if kind == "dict" else enumerate(content):
        names.append(joined(name, key, "tree"))
        found |= values_of(part, names[-1])
    if name and all(part in found for part in names):
        found[name] = rebuilt(structure, lambda kind, name: None)
    return found


def names_of(structure: list[Any], values: Mapping[str, Any], name: str = "") -> set[str]:
    """Return the names of all arrays and values of a structure; lists and dicts among `values` have one."""
    kind, content = structure
    if kind not in ("dict", "list", "tuple") or name in values:
        return {name or ONLY}
    parts = content if kind == "dict" else enumerate(content)
    return {found for key, part in parts for found in names_of(part, values, joined(name, key, "tree"))}


def merged(structures: list[list[Any]], place: str = "tree") -> list[Any]:
    """Return the structure that has what any rank's has: dicts may have other keys on other ranks.

    Raises:
        ValueError: Ranks have different things in one place.
    """
    if all(structure == structures[0] for structure in structures[1:]):
        return structures[0]
    # None stands for what a rank does not have.
    structures = [structure for structure in structures if structure != ["value", None]]
    kind, content = structures[0]
    others = [other for other, _ in structures]
    if any(other != kind for other in others):
        another = next(other for other in others if other != kind)
        raise ValueError(f"{place} is not the same kind of thing on all ranks: {kind} on one, {another} on another")
    if kind == "dict":
        keys: Mapping[Any, None] = {key: None for _, parts in structures for key, _ in parts}
        by_rank = [dict(parts) for _, parts in structures]
        return [kind, [[k, merged([p[k] for p in by_rank if k in p], f"{place}[{k!r}]")] for k in keys]]
    if kind in ("list", "tuple"):
        lengths = sorted({len(parts) for _, parts in structures})
        if len(lengths) > 1:
            raise ValueError(f"{place} is a {kind} of {lengths[0]} on one rank and of {lengths[-1]} on another")
        return [kind, [merged([s[1][n] for s in structures], f"{place}[{n}]") for n in range(lengths[0])]]
    return [kind, content]
