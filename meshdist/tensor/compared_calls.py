"""At debug level DETAIL, the ranks compare every operation on arrays of a mesh before they compute it.

Operations that send nothing have no messages in which their ranks could be compared. The methods of DTensor by which
operations begin are hidden, while the level is DETAIL, by ones that compare first: at other levels this costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import wraps
from hashlib import blake2b
from typing import Any

import numpy as np

from meshdist.debug.debug_level import shows_all_frames
from meshdist.groups.hook_registry import level_watchers
from meshdist.tensor import dispatch, known_calls
from meshdist.tensor.agreement import compare, comparing_group, with_origin
from meshdist.tensor.dtensor import DTensor
from meshdist.tensor.placements import Partial, Replicate, Shard

_MOST_ELEMENTS = 16  # of a plain array whose values are shown
_MOST_LETTERS = 300  # of an argument


class _Calls(threading.local):
    """Whether this thread is within an operation, whose own calls are not the user's."""

    is_inside = False


_calls = _Calls()


def compare_call(name: str, args: Iterable[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Compare a call between the ranks of the mesh of its first DTensor, where all compare their calls; else return.

    Raises:
        DistBackendError: The calls differ; on all ranks, with the calls and their lines.
    """
    args, kwargs = tuple(args), kwargs or {}
    array = _first_array((*args, *kwargs.values()))
    group = None if array is None else comparing_group(array.mesh)
    if group is not None:
        words = [_words(arg) for arg in args] + [f"{key}={_words(value)}" for key, value in sorted(kwargs.items())]
        compare(group, name, ", ".join(words))


def _first_array(values: Iterable[Any]) -> DTensor | None:
    for value in values:
        if isinstance(value, DTensor):
            return value
        if isinstance(value, (tuple, list)) and (found := _first_array(value)) is not None:
            return found
    return None


def _words(value: Any) -> str:
    """Return what is compared of an argument, in words: of a DTensor all but the values."""
    text = _text(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS // 2]}... (checksum {_sum(text.encode())})"


def _text(value: Any) -> str:
    if isinstance(value, DTensor):
        return with_origin(f"{value.dtype} {value.layout.describe(value.mesh.mesh_dim_names)}", value._origin)
    if isinstance(value, np.ndarray):
        return _array_text(value)
    if isinstance(value, (list, tuple)):
        begin, end = "[]" if isinstance(value, list) else "()"
        return f"{begin}{', '.join(map(_text, value))}{',' * (len(value) == 1 and begin == '(')}{end}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{_text(key)}: {_text(each)}' for key, each in value.items()))}}}"
    if value is None or value is Ellipsis or isinstance(value, _SHOWN):
        return repr(value)
    if isinstance(value, slice):
        parts = ["" if part is None else _text(part) for part in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    if isinstance(value, type):
        return value.__name__
    if callable(value):  # those of the ranks may differ, and compute the same
        return "a function"
    return f"{type(value).__name__} {getattr(value, 'shape', '')}".rstrip()


# What a `repr` shows alike on all ranks.
_SHOWN = (bool, int, float, complex, str, bytes, np.generic, np.dtype, Enum, Shard, Replicate, Partial)


def _array_text(array: np.ndarray[Any, Any]) -> str:
    if array.dtype.hasobject:
        return f"{array.dtype} {array.shape}"
    if array.size <= _MOST_ELEMENTS:
        return f"{array.dtype} {array.shape} {array.tolist()}"
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return f"{array.dtype} {array.shape} with checksum {_sum(data)}"


def _sum(data: Any) -> str:
    return blake2b(data, digest_size=8).hexdigest()


# ---- The methods by which operations begin


def _of_ufunc(array: DTensor, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
    if _defers(inputs):
        return None
    return dispatch.name_of_ufunc(ufunc, method), inputs, kwargs


def _of_function(array: DTensor, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    if function in _QUESTIONS or not dispatch.deferring.isdisjoint(types):
        return None
    return dispatch.name_of(function), args, kwargs


def _of_method(name: str) -> Callable[..., Any]:
    return lambda array, *args, **kwargs: (name, (array, *args), kwargs)


def _defers(operands: Iterable[Any]) -> bool:
    """Return whether another type computes the operation, which then calls it with arrays."""
    return bool(dispatch.deferring) and any(type(operand) in dispatch.deferring for operand in operands)


# They ask about an array, as its attributes do.
_QUESTIONS = frozenset((np.shape, np.ndim, np.size, np.result_type, np.iscomplexobj, np.isrealobj))

# By the name of a method, what is compared of its call: a name and the arguments, or None for nothing. What one rank
# may call alone, such as `print` and `to_local`, is not here.
_BEGINNINGS: dict[str, Callable[..., Any]] = {
    "__array_ufunc__": _of_ufunc,
    "__array_function__": _of_function,
    "__getitem__": _of_method("getitem"),
    "__setitem__": _of_method("setitem"),
    **{name: _of_method(name) for name in ("astype", "cpu", "cuda", "full", "item", "redistribute")},
}
_hidden = {name: getattr(DTensor, name) for name in _BEGINNINGS}


def _comparing(begin: Callable[..., Any], call_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that compares its call before it makes it, unless it is part of another."""

    @wraps(begin)
    def compared(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        call = None if _calls.is_inside else call_of(*args, **kwargs)
        if call is None:
            return begin(*args, **kwargs)
        compare_call(*call)
        _calls.is_inside = True
        try:
            return begin(*args, **kwargs)
        finally:
            _calls.is_inside = False

    return compared


def _compare_at_detail() -> None:
    """Let operations compare their calls if the debug level is DETAIL now."""
    wanted = shows_all_frames()
    if wanted == (dispatch.comparer is not None):
        return
    known_calls.use_known_ufuncs(not wanted)
    dispatch.comparer = compare_call if wanted else None
    for name, call_of in _BEGINNINGS.items():
        setattr(DTensor, name, _comparing(_hidden[name], call_of) if wanted else _hidden[name])


level_watchers.append(_compare_at_detail)
_compare_at_detail()
