"""Array arguments as NumPy arrays over the same memory; packing of strided ones.

Backends get contiguous, aligned arrays in native byte order only. This module converts the user's arrays.
"""

from __future__ import annotations

import math
import sys
from binascii import crc32
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import numpy as np

from meshdist.arrays.interchange import (
    OBJECTS,
    hint_of_both,
    hint_of_input,
    hint_of_output,
    is_copied,
    shared_array,
)
from meshdist.arrays.overlap import repeats_elements, shared_pair
from meshdist.system.plurals import counted

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
# What signatures say of arguments and results that type checkers cannot check; docs/api/types.md explains the names.
AnyArray: TypeAlias = Any
ArrayTree: TypeAlias = Any
OutputOrWork: TypeAlias = Any

# By the kind of an unsupported dtype: what to do instead.
_HINTS = {
    "M": "; pass {name}.view('int64')",
    "m": "; pass {name}.view('int64')",
    "O": OBJECTS,
    "U": OBJECTS,
    "S": "; pass {name}.view('uint8')",
    "T": OBJECTS,
    "V": "; pass its fields one by one, or its bytes: {name}.view('uint8')",
}


def as_array(value: Any, name: str, hint: Callable[[Any, str], str] | None = None) -> Array:
    """Return `value` as a NumPy array over the same memory, never a copy to be written.

    Accepts NumPy arrays and subclasses that lose only their methods (`matrix`, `memmap`, `recarray`), but not masked
    arrays, which would lose their masks; and what `shared_array` accepts.

    Raises:
        TypeError: `value` is not an array, or its memory cannot be shared.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        masked_class = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
        if masked_class is not None and isinstance(value, masked_class):
            raise TypeError(
                f"{name} is a masked array, and its mask is not sent; pass {name}.data, with"
                f" np.ma.getmaskarray({name}) in a separate call, or {name}.filled(...)"
            )
        return np.asarray(value)  # a subclass may define indexing differently, as np.matrix does
    if isinstance(value, np.generic):
        raise TypeError(f"{name} must be an array, got the scalar {value!r}{(hint or hint_of_input)(value, name)}")
    return shared_array(value, name, hint)


def as_buffers(
    value: Any, name: str, is_list: bool, of: str = "", *, is_read: bool = True, is_written: bool = False
) -> Array | list[Array] | None:
    """Return an argument as an array or, if `is_list`, a list of arrays, of supported dtypes; None stays None.

    For messages: `of` is the name of the collective, which reads the argument, or writes it, or both.

    Raises:
        TypeError: A list for one array, no list for several, or as `as_array` and `check_dtype`.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        if is_list and not isinstance(value, np.ndarray):
            raise TypeError(f"{name} must be a list of arrays, got {type(value).__name__}")
        if type(value) is np.ndarray:
            array = value
        else:
            array = as_array(value, name, partial(_hint(is_read, is_written), of=of))
        check_dtype(array, name)
        return array
    if not is_list:
        has_arrays = any(hasattr(item, "__len__") or hasattr(item, "dtype") for item in value)
        in_place = is_read and is_written
        hint = _hint(is_read, is_written)(value, name, of) if value and (in_place or not has_arrays) else ""
        raise TypeError(
            f"{name} must be one array, got a {type(value).__name__} of {counted(len(value), 'element')}{hint}"
        )
    arrays = [as_array(item, f"{name}[{k}]") for k, item in enumerate(value)]
    for k, array in enumerate(arrays):
        check_dtype(array, f"{name}[{k}]")
    return arrays


def _hint(is_read: bool, is_written: bool) -> Callable[..., str]:
    return hint_of_input if not is_written else hint_of_both if is_read else hint_of_output


_SHORT = 60  # characters
# How the dtypes of pickles begin, as the names of dtypes travel.
OBJECTS_PREFIX = "objects"


@lru_cache(maxsize=256)
def dtype_of_objects(number: int | None) -> np.dtype[Any]:
    """Return the dtype of the pickle of a list of `number` objects; None is any number. No user's array has it."""
    return np.dtype([(OBJECTS_PREFIX + ("" if number is None else f"{number:x}"), np.uint8)])


def is_of_objects(dtype: np.dtype[Any]) -> bool:
    return dtype.names is not None and dtype.names[0].startswith(OBJECTS_PREFIX)


def describe_objects(dtype: np.dtype[Any]) -> str:
    """Return what a message with a dtype of objects has, as in "2 objects"."""
    number = "" if dtype.names is None else dtype.names[0].removeprefix(OBJECTS_PREFIX)
    return counted(int(number, 16), "object") if number else "objects"


# The title of the field of a labelled dtype.
_LABELLED = "label"


@lru_cache(maxsize=1024)
def label_of(shape: tuple[int, ...], terms: tuple[Any, ...]) -> str:
    """Return five characters that stand for the shape of an array, and for other things that ranks must agree on."""
    return f"{crc32(repr((shape, terms)).encode()) >> 12:05x}"


@lru_cache(maxsize=1024)
def labelled_dtype(dtype: np.dtype[Any], label: str) -> np.dtype[Any]:
    """Return a dtype with a label, which no array of a user has: messages of two labels do not fit."""
    return np.dtype([((_LABELLED, label), dtype)])


def element_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype without its label, if it has one."""
    return dtype[0] if label_in(dtype) else dtype


def label_in(dtype: np.dtype[Any]) -> str:
    """Return the label of a dtype; an empty string if it has none."""
    names = dtype.names
    return names[0] if names and dtype.fields is not None and dtype.fields[names[0]][2:] == (_LABELLED,) else ""


def check_dtype(array: Array, name: str, hint: str | None = None) -> None:
    """Raise TypeError for an unsupported dtype: objects, texts, structures, dates.

    The message ends with `hint`; None: that for messages and collectives.
    """
    dtype = array.dtype
    # Extension dtypes such as ml_dtypes.bfloat16 have kind void, but are registered with NumPy (2).
    if (dtype.kind in "biufc" or dtype.isbuiltin == 2) and not dtype.hasobject:
        return
    hint = _HINTS.get(dtype.kind, "") if hint is None else hint
    raise TypeError(
        f"{name} has the unsupported dtype {dtype}; supported are bool, the integer, floating-point and complex"
        f" dtypes, and those of ml_dtypes, such as bfloat16 and float8_e4m3fn{hint.format(name=name)}"
    )


def native(array: Array) -> Array:
    """Return a view in native byte order, with shape and dtype of the array but not its values; `pack` swaps bytes."""
    return array if array.dtype.isnative else array.view(array.dtype.newbyteorder("="))


def check_writable(array: Array, name: str, value: Any = None) -> None:
    """Raise if `array`, which `as_array` made of `value`, cannot be written, or if its elements share memory.

    Raises:
        TypeError: NumPy gets the elements of `value` as a copy.
        ValueError: `array` is read-only, or repeats elements in memory.
    """
    if not array.flags.writeable:
        if is_copied(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}, of which NumPy makes a copy, and this call would write to the"
                f" copy; pass an array, np.array({name})"
            )
        writable = f"bytearray({name})" if isinstance(value, bytes) else f"{name}.copy()"
        raise ValueError(f"{name} is read-only, and this call writes to it; pass {writable}")
    if not array.flags.c_contiguous and repeats_elements(array):
        raise ValueError(
            f"{name} repeats elements in memory (np.broadcast_to?), and this call writes to it; pass {name}.copy()"
        )


def check_apart(arrays: Sequence[Array], name: str) -> None:
    """Raise ValueError if two arrays of a list that is written share memory."""
    shared = shared_pair(arrays) if len(arrays) > 1 else None
    if shared is not None:
        one, other = shared
        raise ValueError(
            f"{name}[{one}] and {name}[{other}] share memory, and this call writes to both; pass arrays that do not"
        )


def is_plain(array: Array) -> bool:
    """Return True for an array that a backend can take: native, aligned and contiguous."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def pack(array: Array, *, keep: bool = True) -> Array:
    """Return a plain array of the same shape: `array` itself if it is plain, else a new one.

    With `keep`, a new one holds the elements; otherwise it is uninitialized.
    """
    if is_plain(array):
        return array
    dtype = array.dtype  # the same object, which the core tells kinds of messages by
    packed = np.empty(array.shape, dtype if dtype.isnative else dtype.newbyteorder("="))
    if keep:
        packed[...] = array
    return packed


def split_rows(array: Array, num_blocks: int) -> list[Array]:
    """Return `num_blocks` equal, flat views of a plain array, in memory order."""
    flat = array.reshape(-1)
    size = flat.size // num_blocks
    return [flat[k * size : (k + 1) * size] for k in range(num_blocks)]


def describe_array(array: Array) -> str:
    """Return dtype and shape as messages show them: `float32[4, 3]`."""
    return f"{element_dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"


def describe_value(value: Any) -> str:
    """Return what was passed in place of a number, in one line: an array by its dtype and shape unless it is short."""
    from textwrap import shorten  # an error alone needs it

    text = repr(value)
    if len(text) <= _SHORT and "\n" not in text:
        return text
    if isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype"):
        return f"the array {describe_array(value)}"
    return shorten(text, _SHORT, placeholder=" ...")


def as_bytes(array: Array) -> Array:
    """Return the bytes of a plain array, flat."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)


def consecutive_views(flat: Any, shapes: Iterable[Sequence[int]]) -> list[Any]:
    """Return consecutive parts of a flat array, of NumPy or CuPy, as views of these shapes.

    Example:
        >>> [view.tolist() for view in consecutive_views(np.arange(5), [(2, 2), ()])]
        [[[0, 1], [2, 3]], 4]
    """
    views, begin = [], 0
    for shape in shapes:
        end = begin + math.prod(shape)
        views.append(flat[begin:end].reshape(shape))
        begin = end
    return views
