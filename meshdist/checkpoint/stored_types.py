"""Dtypes in files: what safetensors calls them, and what stands for those that a format lacks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

# By the codes of safetensors: the names of dtypes of NumPy or ml_dtypes.
CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
# Of what is quoted in messages.
MOST_SHOWN = 80
_NAMES = {name: code for code, name in CODES.items()}
# Older versions of safetensors refuse a whole file for C64, and none has 128: a pair of numbers opens everywhere.
_PAIRS = {"complex64": "float32", "complex128": "float64"}
_BITS = {1: "uint8", 2: "uint16", 4: "uint32"}


def checked_shape(shape: Any, dtype: str) -> tuple[int, ...]:
    """Return the shape that a header gives for an array of this dtype.

    Raises:
        ValueError: It is not a shape, no array can have it, or arrays of the dtype are not stored.
    """
    if not isinstance(shape, list) or not all(type(rows) is int and rows >= 0 for rows in shape):
        raise ValueError(f"{str(shape)[:MOST_SHOWN]} is not a shape")
    if not isinstance(dtype, str):
        raise ValueError(f"{dtype!r:.80} is not a dtype")
    found = dtype_of(dtype if is_known(dtype) else "uint8")  # where an array is read, it is told what is lacking
    if found.hasobject or found.itemsize == 0 or not found.isbuiltin or found.kind not in "biufcV":
        raise ValueError(f"{dtype!r} is not a numeric dtype")
    np.ndarray(shape, found, bytes(found.itemsize), strides=(0,) * len(shape))  # takes no memory
    return tuple(shape)


class InFile(NamedTuple):
    """What stands for a dtype in a file.

    Attributes:
        name: The name of a dtype: the same bytes, read as that.
        pair: An element is two of them, in a last dimension.
    """

    name: str
    pair: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, 2) if self.pair else shape


def in_safetensors(name: str) -> InFile:
    """Return what stands for the dtype `name` in safetensors."""
    if name in _PAIRS:
        return InFile(_PAIRS[name], pair=True)
    return InFile(name) if name in _NAMES else InFile(_BITS[dtype_of(name).itemsize])


def in_numpy(name: str) -> InFile:
    """Return what stands for the dtype `name` in files that are read with NumPy alone: bits for those of ml_dtypes."""
    dtype = dtype_of(name)
    return InFile(name) if dtype.isbuiltin == 1 else InFile(_BITS[dtype.itemsize])


def code_of(name: str) -> str:
    """Return the code of safetensors for a dtype that it has."""
    return _NAMES[name]


@lru_cache(maxsize=1000)
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype in checkpoints.

    Raises:
        TypeError: A dtype that differs between machines, such as longdouble.
    """
    if dtype.char in "gG":
        raise TypeError(f"dtype {dtype} differs between machines; save it as float64 or complex128")
    return str(dtype.newbyteorder("=").name)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        TypeError: A dtype that is unknown, or that needs ml_dtypes, which is not installed.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"dtype {name} needs the package ml_dtypes: pip install ml_dtypes") from None
    if not hasattr(ml_dtypes, name):
        raise TypeError(f"dtype {name} is unknown to this version of meshdist and ml_dtypes")
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def is_known(name: str) -> bool:
    """Return whether `dtype_of` knows the dtype of a name."""
    try:
        dtype_of(name)
    except TypeError:
        return False
    return True
