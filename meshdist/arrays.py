"""Any array a user may pass, as a NumPy array over the same memory; packing of strided ones.

Backends see plain C-contiguous arrays only, in the byte order of the machine. What a user passed is brought there here,
and what was written is brought back.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from meshdist.interchange import is_copied, shared_array
from meshdist.overlap import repeats_elements, shared_pair

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# By the kind of a dtype that does not travel: what to do instead.
_HINTS = {
    "M": "; pass {name}.view('int64')",
    "m": "; pass {name}.view('int64')",
    "O": "; objects travel by broadcast_object_list, all_gather_object and their like",
    "U": "; texts travel as objects, by all_gather_object and its like",
    "S": "; pass {name}.view('uint8')",
    "T": "; texts travel as objects, by all_gather_object and its like",
    "V": "; pass its fields one by one, or its bytes: {name}.view('uint8')",
}


def as_array(value: Any, name: str) -> Array:
    """Return `value` as a NumPy array over the same memory, never a copy that could be written to in vain.

    Takes NumPy arrays and those of subclasses, which share their memory and lose nothing but their own methods
    (`matrix`, `memmap`, `recarray`); not masked arrays, whose masks would stay behind. Takes what `shared_array` takes:
    torch tensors, `__array_interface__`, DLPack, buffers, and `__array__` for what is only read.

    Args:
        value: The user's array.
        name: The argument's name, for the error.

    Raises:
        TypeError: Not an array, or one whose memory cannot be shared.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ndarray):
        masked_class = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
        if masked_class is not None and isinstance(value, masked_class):
            raise TypeError(
                f"{name} is a masked array, and its mask does not travel; pass {name}.data, with"
                f" np.ma.getmaskarray({name}) in a call of its own, or {name}.filled(...)"
            )
        return np.asarray(value)  # a subclass may have its own idea of what indexing means, as np.matrix has
    if isinstance(value, np.generic):
        raise TypeError(f"{name} must be an array, got the scalar {value!r}; use np.array({value!r})")
    return shared_array(value, name)


def as_buffers(value: Any, name: str, is_list: bool) -> Array | list[Array] | None:
    """Return an argument as the array or the list of arrays that it is, of dtypes that travel; None stays.

    Args:
        value: The argument.
        name: Its name, for the error.
        is_list: Whether it is to be a list of arrays.

    Raises:
        TypeError: A list for one array, no list for several, or what `as_array` and `check_dtype` raise.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        if is_list and not isinstance(value, np.ndarray):
            raise TypeError(f"{name} must be a list of arrays, got {type(value).__name__}")
        array = as_array(value, name)
        check_dtype(array, name)
        return array
    if not is_list:
        numbers = bool(value) and not any(hasattr(item, "__len__") or hasattr(item, "dtype") for item in value)
        hint = f"; use np.array({name})" if numbers else ""
        raise TypeError(f"{name} must be one array, got a {type(value).__name__} of {len(value)} elements{hint}")
    arrays = [as_array(item, f"{name}[{k}]") for k, item in enumerate(value)]
    for k, array in enumerate(arrays):
        check_dtype(array, f"{name}[{k}]")
    return arrays


def check_dtype(array: Array, name: str) -> None:
    """Raise TypeError for a dtype that does not travel: objects, texts, structures, dates."""
    dtype = array.dtype
    # Extension dtypes such as ml_dtypes.bfloat16 call themselves void but registered themselves with NumPy (2).
    if (dtype.kind in "biufc" or dtype.isbuiltin == 2) and not dtype.hasobject:
        return
    hint = _HINTS.get(dtype.kind, "")
    raise TypeError(
        f"{name} has dtype {dtype}; known are bool, the integers, floating and complex ones, and those of ml_dtypes,"
        f" such as bfloat16 and float8_e4m3fn{hint.format(name=name)}"
    )


def native(array: Array) -> Array:
    """Return a view of the array's bytes in the byte order of this machine: its shape and dtype are what it stands for.

    Backends see native arrays only; `pack` swaps the bytes. The values of the view are those of the wrong order.
    """
    return array if array.dtype.isnative else array.view(array.dtype.newbyteorder("="))


def check_writable(array: Array, name: str, value: Any = None) -> None:
    """Raise where `array` cannot be written, or where writing one element would write another.

    Args:
        array: What `as_array` returned.
        name: The argument's name, for the error.
        value: What the user passed, where it is at hand.

    Raises:
        TypeError: NumPy gets the elements of `value` as a copy.
        ValueError: `array` is read-only, or some of its elements are one in memory.
    """
    if not array.flags.writeable:
        if is_copied(value):
            raise TypeError(
                f"{name} is a {type(value).__name__}, whose elements NumPy gets as a copy, and this call would write"
                f" that; pass an array, np.array({name})"
            )
        raise ValueError(f"{name} is read-only, and this call writes it; pass {name}.copy()")
    if not array.flags.c_contiguous and repeats_elements(array):
        raise ValueError(
            f"{name} repeats elements in memory (np.broadcast_to?), and this call writes it; pass {name}.copy()"
        )


def check_apart(arrays: Sequence[Array], name: str) -> None:
    """Raise ValueError where two arrays of a list that is written share memory."""
    shared = shared_pair(arrays) if len(arrays) > 1 else None
    if shared is not None:
        one, other = shared
        raise ValueError(
            f"{name}[{one}] and {name}[{other}] share memory, and this call writes both; pass arrays that do not"
        )


def is_plain(array: Array) -> bool:
    """Return True for an array that a backend can take as it is: native, aligned and C-contiguous."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def pack(array: Array, *, keep: bool = True, copy: bool = False) -> Array:
    """Return a plain array of the same shape: `array` itself where it is plain, else a new one.

    Args:
        array: Any strides.
        keep: Copy the elements; False where they are going to be written anyway.
        copy: Return a new one also for a plain array.
    """
    if is_plain(array) and not copy:
        return array
    packed = np.empty(array.shape, array.dtype.newbyteorder("="))
    if keep:
        packed[...] = array
    return packed


def split_rows(array: Array, num_blocks: int) -> list[Array]:
    """Return `num_blocks` equal, flat views of a plain array, in memory order."""
    flat = array.reshape(-1)
    size = flat.size // num_blocks
    return [flat[k * size : (k + 1) * size] for k in range(num_blocks)]


def describe_array(array: Array) -> str:
    """Return dtype and shape as the messages show them: `float32[4, 3]`."""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def as_bytes(array: Array) -> Array:
    """Return the bytes of a plain array, flat."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(np.uint8)
