"""Calls that are known to need this rank's block alone: the one memory of all operations.

The first call of an operation aligns its operands. If no block had to move or to be cut for that, the next call with
equal arguments and layouts computes on the blocks at once: its result has the layout of the first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from meshdist.runtime.plan_cache import remember
from meshdist.tensor.agreement import Origin, inherited
from meshdist.tensor.array_layout import ArrayLayout

# From a call's arguments and its result, what computes the blocks when it is called with blocks in place of DTensors;
# None for a call that needs more than its blocks.
Localizer: TypeAlias = "Callable[..., Callable[..., Any] | None]"

_LARGEST_VALUE = 64  # elements of a plain array that is part of a key

# The result of a ufunc that runs on the blocks as they are, by the ufunc and the operands' layouts.
known_ufuncs: dict[tuple[Any, ...], ArrayLayout] = {}
# What computes the blocks, and the result's layout and origin, by function, coordinate in the mesh and arguments.
_known_functions: dict[Hashable, tuple[Callable[..., Any], ArrayLayout, Origin]] = {}
_localizers: dict[Any, Localizer] = {}


class _Changes(threading.local):
    """How many operands this thread had to bring to a different layout."""

    count = 0


changes = _Changes()


class _Memory:
    """Whether this process remembers ufuncs."""

    is_used = True


_memory = _Memory()


def remember_ufunc(ufunc: Any, layouts: Sequence[ArrayLayout | None], result: ArrayLayout) -> None:
    """Let operators call `ufunc` on the blocks as they are for operands of these layouts (None: a Python number)."""
    if _memory.is_used:
        remember(known_ufuncs, (ufunc, *layouts), result)


def use_known_ufuncs(wanted: bool) -> None:
    """Remember ufuncs from now on, or forget them, so that every operator calls its ufunc with the arrays."""
    _memory.is_used = wanted
    if not wanted:
        known_ufuncs.clear()


def the_function(function: Any) -> Localizer:
    """Return the localizer of a function that does with blocks what it does with arrays."""
    return lambda result, *args, **kwargs: function


def localizes(*functions: Any) -> Callable[[Localizer], Localizer]:
    """Register how calls of these functions of NumPy are repeated on the blocks, where no operand had to move.

    The decorated function takes the result of the first call and its arguments.
    """

    def register(localizer: Localizer) -> Localizer:
        for function in functions:
            _localizers[function] = localizer
        return localizer

    return register


def on_blocks(*functions: Any) -> None:
    """Register functions of NumPy that do with blocks what they do with arrays, where no operand has to move."""
    for function in functions:
        _localizers[function] = the_function(function)


def on_blocks_of_lists(*functions: Any) -> None:
    """Register functions, as `on_blocks` does, that take a list of arrays: an array in its place is one of its rows."""
    for function in functions:
        _localizers[function] = _of_lists(function)


def _of_lists(function: Any) -> Localizer:
    def localizer(result: Any, *args: Any, **kwargs: Any) -> Any:
        return function if args and type(args[0]) in (list, tuple) else None

    return localizer


def called(function: Any, implementation: Callable[..., Any], args: Any, kwargs: Any, like: Any) -> Any:
    """Call a function of NumPy on arguments of which `like` is one: on the blocks, if that is known to be enough."""
    localizer, kind = _localizers.get(function), type(like)
    if localizer is None:
        result = implementation(*args, **kwargs)
        if type(result) is kind and not result._layout.pending:
            return result
        return inherited(result, kind, args, kwargs)
    mesh = like._mesh
    key: list[Any] = [function, mesh.get_coordinate()]
    blocks = _blocks(args, kind, mesh, key)
    if blocks is None or (kwargs and not _named(kwargs, key)):
        return inherited(implementation(*args, **kwargs), kind, args, kwargs)
    found = tuple(key)
    known = _known_functions.get(found)
    if known is not None:
        compute, layout, origin = known
        return kind._wrapped(compute(*blocks, **kwargs), layout, mesh, origin)
    before = changes.count
    result = inherited(implementation(*args, **kwargs), kind, args, kwargs)
    if changes.count == before and type(result) is kind and not any(result is given for given in args):
        local = localizer(result, *args, **kwargs)
        if local is not None:
            remember(_known_functions, found, (local, result._layout, result._origin))
    return result


def _blocks(values: Sequence[Any], kind: type, mesh: Any, key: list[Any]) -> list[Any] | None:
    """Return the arguments with blocks in place of DTensors, and add what they are to the key.

    None: They are not hashable, or not what a function takes beside these blocks: CuPy's take no tables of the host.
    """
    blocks: list[Any] = []
    for value in values:
        of = type(value)
        if of is kind:
            if value._mesh is not mesh:
                return None
            key.append(value._layout)
            key.append(value._local.dtype)
            if value._origin is not None:
                key.append(value._origin)
            blocks.append(value._local)
        elif of in _PLAIN:
            key.append(of)
            key.append(value)
            blocks.append(value)
        elif of is list or of is tuple:
            key.append((of, len(value)))
            inner = _blocks(value, kind, mesh, key)
            if inner is None or (of is list and mesh.device_type != "cpu" and not any(type(x) is kind for x in value)):
                return None
            blocks.append(inner if of is list else tuple(inner))
        elif (
            of is np.ndarray
            and value.size <= _LARGEST_VALUE
            and value.dtype.kind in "biufc"
            and mesh.device_type == "cpu"
        ):
            key.append((value.dtype, value.shape, value.tobytes()))
            blocks.append(value)
        else:
            return None
    return blocks


_PLAIN = frozenset((int, type(None), float, bool, str, complex))


def _named(kwargs: dict[str, Any], key: list[Any]) -> bool:
    """Add keyword arguments to a key; return whether all are plain values."""
    for name, value in kwargs.items():
        if type(value) is tuple:
            if any(type(part) is not int for part in value):
                return False
        elif type(value) not in _PLAIN:
            return False
        key.append(name)
        key.append(type(value))
        key.append(value)
    return True
