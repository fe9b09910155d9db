"""Contents that every rank can make by itself, and arrays somewhere in memory that hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

import meshdist as dist

Array = NDArray[np.generic]

DTYPES = (
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)
UFUNCS = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
# A prime: no chunk or block of a transport is a multiple of it, so data at a wrong place is wrong data.
_PERIOD = 10_007
_AROUND = 0x55


def ops_of(dtype: str) -> list[str]:
    """Return the reductions that are defined for a dtype."""
    kind = np.dtype(dtype).kind
    if kind == "c":
        return ["sum", "avg"]
    return [op for op in UFUNCS if op != "avg"] if kind in "biu" else ["sum", "avg", "product", "min", "max"]


@functools.cache
def _pool(dtype: str, for_products: bool) -> Array:
    # Sums and products of a few ranks are exact in every dtype, so the order of a reduction does not show.
    kind, rng = np.dtype(dtype), np.random.default_rng(7)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        return rng.integers(info.min, info.max, _PERIOD, kind, endpoint=True)
    if kind.kind == "b":
        return rng.integers(0, 2, _PERIOD).astype(bool)
    if for_products:
        return np.array([-1.0, 1.0, 2.0, 0.5])[rng.integers(4, size=_PERIOD)].astype(kind)
    largest = 50 if dtype == "float16" else 1000
    numbers = rng.integers(-largest, largest, _PERIOD, endpoint=True).astype(np.float64)
    return (numbers + 1j * np.roll(numbers, 1) if kind.kind == "c" else numbers).astype(kind)


def content(dtype: str, shape: Sequence[int], key: Sequence[int], for_products: bool = False) -> Array:
    """Return the array of a key: other keys have others."""
    pool, count = _pool(dtype, for_products), int(np.prod(shape))
    begin = hash(tuple(key)) % _PERIOD
    if begin + count <= _PERIOD:
        return pool[begin : begin + count].reshape(shape)
    return np.resize(np.concatenate([pool[begin:], pool[:begin]]), count).reshape(shape)


def reduced(arrays: Sequence[Array], op: str) -> Array:
    """Return the reduction of arrays in their order."""
    total = np.array(arrays[0])
    for array in arrays[1:]:
        UFUNCS[op](total, array, out=total)
    if op == "avg":
        # Real and imaginary parts each by themselves: dividing by a complex number rounds more than once.
        for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
            np.divide(part, part.dtype.type(len(arrays)), out=part)
    return total


def _plain(memory: Array, shape: tuple[int, ...]) -> Array:
    return memory[: int(np.prod(shape))].reshape(shape)


def _inside(memory: Array, shape: tuple[int, ...]) -> Array:
    return memory[8 : 8 + int(np.prod(shape))].reshape(shape)


def _every_second(memory: Array, shape: tuple[int, ...]) -> Array:
    wide = _inside(memory, (*shape[:-1], 2 * shape[-1] + 1) if shape else (1,))
    return wide[..., 1::2] if shape else wide.reshape(())


def _backwards(memory: Array, shape: tuple[int, ...]) -> Array:
    return _inside(memory, shape)[(..., *[slice(None, None, -1)] * len(shape))]


def _transposed(memory: Array, shape: tuple[int, ...]) -> Array:
    return _inside(memory, shape[::-1]).T


def _unaligned(memory: Array, shape: tuple[int, ...]) -> Array:
    dtype = memory.dtype
    raw = memory.view(np.uint8)[1 : 1 + int(np.prod(shape)) * dtype.itemsize]
    return raw.view(dtype).reshape(shape)


_PLACES: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "plain": _plain,
    "inside": _inside,
    "every second": _every_second,
    "backwards": _backwards,
    "transposed": _transposed,
    "unaligned": _unaligned,
    "swapped": _inside,
    "shared": _plain,
    "shared, inside": _inside,
    "shared, every second": _every_second,
}
LAYOUTS = tuple(_PLACES)


class Placed:
    """An array somewhere in memory, with bytes around it that nobody may touch.

    Attributes:
        layout: How it lies; one of LAYOUTS.
        view: The array.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], layout: str) -> None:
        self.layout = layout
        self._shape = shape
        count = int(np.prod(shape))
        if _PLACES[layout] is _every_second and shape:
            count = int(np.prod(shape[:-1])) * (2 * shape[-1] + 1)
        length = count if _PLACES[layout] is _plain else count + 16
        dtype = dtype.newbyteorder("S") if layout == "swapped" else dtype
        self._memory = dist.empty(length, dtype) if layout.startswith("shared") else np.empty(length, dtype)
        self.view = self._place(self._memory)
        self._before = self._memory.copy()

    def _place(self, memory: Array) -> Array:
        return _PLACES[self.layout](memory, self._shape)

    def fill(self, values: Array) -> None:
        """Give the array a content, and the bytes around it theirs."""
        self._memory.view(np.uint8)[...] = _AROUND
        self.view[...] = values
        self._before = self._memory.copy()

    def fault(self, wanted: Array) -> str:
        """Return what is wrong with the content, or with the bytes around it; nothing where all is right."""
        expected = self._before.copy()
        self._place(expected)[...] = wanted
        if expected.tobytes() == self._memory.tobytes():
            return ""
        there, due = self.view.reshape(-1), np.asarray(wanted).reshape(-1)
        wrong = np.flatnonzero(there != due)
        if not len(wrong):
            return "bytes around the array were written"
        first = int(wrong[0])
        return (
            f"{len(wrong)} of {len(due)} elements are wrong, from {first} to {int(wrong[-1])}: "
            f"element {first} is {there[first]!r}, expected {due[first]!r}"
        )
