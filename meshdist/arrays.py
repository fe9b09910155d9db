"""Any array a user may pass, as a NumPy array over the same memory; packing of strided ones.

Backends see plain C-contiguous arrays only. What a user passed is brought there here, and what was written is
brought back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def as_array(value: Any, name: str) -> Array:
    """Return `value` as a NumPy array over the same memory, never a copy.

    Takes NumPy arrays and whatever offers `__array_interface__` or DLPack on the CPU (a torch CPU tensor, say).

    Args:
        value: The user's array.
        name: The argument's name, for the error.

    Raises:
        TypeError: Not an array, or one whose memory cannot be shared.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        raise TypeError(f"{name} must be an array, got the scalar {value!r}; use np.array({value!r})")
    if hasattr(value, "__array_interface__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        try:
            return np.from_dlpack(value)
        except (TypeError, ValueError, RuntimeError, BufferError) as error:
            raise TypeError(
                f"{name}: {type(value).__name__} does not share its memory through DLPack: {error}"
            ) from error
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def check_dtype(array: Array, name: str) -> None:
    """Raise TypeError for a dtype that does not travel: objects, structures, dates, the other byte order."""
    dtype = array.dtype
    if not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype.str}, of the other byte order; use {name}.astype({dtype.name!r})")
    # Extension dtypes such as ml_dtypes.bfloat16 call themselves void but registered themselves with NumPy (2).
    registered = dtype.isbuiltin == 2
    if dtype.kind not in "biufc" and not registered:
        raise TypeError(
            f"{name} has dtype {dtype}; known are bool, the integers, floating and complex ones, bfloat16 and float8"
        )


def check_writable(array: Array, name: str) -> None:
    """Raise ValueError where `array` cannot be written, or where writing one element would write another."""
    if not array.flags.writeable:
        raise ValueError(f"{name} is read-only, and this call writes it; pass {name}.copy()")
    if array.size and any(stride == 0 and size > 1 for stride, size in zip(array.strides, array.shape, strict=True)):
        raise ValueError(
            f"{name} repeats elements in memory (np.broadcast_to?), and this call writes it; pass {name}.copy()"
        )


def is_plain(array: Array) -> bool:
    """Return True for an array that a backend can take as it is: aligned and C-contiguous."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def pack(array: Array, *, keep: bool = True) -> Array:
    """Return a plain array of the same shape: `array` itself where it is plain, else a new one.

    Args:
        array: Any strides.
        keep: Copy the elements; False where they are going to be written anyway.
    """
    if is_plain(array):
        return array
    packed = np.empty(array.shape, array.dtype)
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
