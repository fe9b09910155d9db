"""What the conformance suite runs over: dtypes, shapes, layouts in memory, values; and how it compares.

A program runs on every rank and makes the arrays of all ranks, so it knows by itself what it has to get.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

import meshdist as dist
from meshdist import ReduceOp

try:
    import ml_dtypes
except ModuleNotFoundError:
    ml_dtypes = None

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
DTYPES = ["bool", *INTEGERS, "float16", "float32", "float64", "complex64", "complex128"]
# They need ml_dtypes; tests that use them are skipped without it.
EXTENSION_DTYPES = ["bfloat16", "float8_e4m3fn"]
OPS = list(ReduceOp)

# Small shapes, and how their elements lie in memory.
SMALL = [
    ((), "plain"),
    ((0,), "plain"),
    ((0, 4), "plain"),
    ((3, 0), "transposed"),
    ((1,), "plain"),
    ((7,), "plain"),
    ((3, 5), "plain"),
    ((7,), "every second"),
    ((7,), "backwards"),
    ((3, 5), "columns of more"),
    ((5, 3), "transposed"),
    ((2, 3, 4), "Fortran"),
]
KIB = 1024
# Bytes that take each way there is but the longest: in one step, then chunks through slots; just below, at and above
# where the ways change; several chunks.
LARGE_BYTES = (
    6 * KIB,
    8 * KIB,
    8 * KIB + 16,
    32 * KIB,
    32 * KIB + 16,
    100 * KIB,
    256 * KIB,
    256 * KIB + 16,
    512 * KIB - 16,
    512 * KIB + 16,
    1536 * KIB,
)
_POOL = 10007


def dtype_of(name: str) -> np.dtype:
    """Return the dtype, of NumPy or of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENSION_DTYPES else np.dtype(name)


def is_defined(op: ReduceOp, dtype: np.dtype) -> bool:
    """Return whether the documentation has `op` for `dtype`."""
    if dtype.kind in "biu":
        return op is not ReduceOp.AVG
    if dtype.kind == "c":
        return op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.AVG)
    return op not in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@functools.cache
def _pool(name: str, product: bool) -> np.ndarray:
    # Values whose sums and products over five ranks are exact, so that the order of a reduction does not show; wrapping
    # integers are exact whatever they are.
    dtype, rng = dtype_of(name), np.random.default_rng(7)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, _POOL, dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.integers(0, 2, _POOL).astype(bool)
    if product and dtype.kind == "c":
        # No part of a product is zero: its sign would depend on the order.
        return rng.choice([2 + 1j, -1 + 2j, -2 - 1j, 0.5 - 1j], _POOL).astype(dtype)
    if product:
        return rng.choice([-1.0, 1.0, 2.0, 0.5], _POOL).astype(dtype)
    largest = {"float8_e4m3fn": 1, "bfloat16": 8, "float16": 50}.get(name, 1000)
    values = rng.integers(-largest, largest, _POOL, endpoint=True).astype(np.float64)
    if dtype.kind == "c":
        return (values + 1j * np.roll(values, 1)).astype(dtype)
    return values.astype(dtype)


def values(name: str, shape: tuple[int, ...], rank: int, salt: int = 0, product: bool = False) -> np.ndarray:
    """Return the array of `rank`; everybody can make it. Other ranks and salts have others."""
    pool = _pool(name, product)
    size, begin = int(np.prod(shape)), (rank * 1237 + salt * 101) % (_POOL // 2)
    if size > _POOL // 2:
        return np.resize(pool[begin:], size).reshape(shape)
    return pool[begin : begin + size].reshape(shape)


class Placed:
    """An array somewhere in memory, with elements around it that nobody may touch.

    Attributes:
        view: The array.
    """

    def __init__(self, content: np.ndarray, layout: str) -> None:
        self._layout = layout
        self._memory = np.empty(_memory_shape(content.shape, layout), content.dtype)
        self._memory.view(np.uint8)[...] = 0x55
        self.view = _place(self._memory, content.shape, layout)
        self.view[...] = content
        self._before = self._memory.copy()

    def check(self, expected: np.ndarray, what: str) -> None:
        """Compare to the last bit, the elements around it as well."""
        wanted = self._before.copy()
        _place(wanted, self.view.shape, self._layout)[...] = expected
        if wanted.tobytes() != self._memory.tobytes():
            inside = self.view.tobytes() == np.ascontiguousarray(expected).tobytes()
            got = "elements outside the array were written" if inside else f"got\n{self.view}\nexpected\n{expected}"
            raise AssertionError(f"{where()}, {what}, {self._layout}: {got}")

    def check_unchanged(self, what: str) -> None:
        """Check that neither the array nor anything around it was written."""
        if self._before.tobytes() != self._memory.tobytes():
            raise AssertionError(f"{where()}, {what}, {self._layout}: an input was changed")


def _memory_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if layout == "plain":
        return (int(np.prod(shape)) + 16,)
    if layout in ("every second", "columns of more", "backwards"):
        return (*shape[:-1], 2 * shape[-1] + 1)
    return (shape[-1] + 2, *reversed(shape[:-1]))


def _place(memory: np.ndarray, shape: tuple[int, ...], layout: str) -> np.ndarray:
    if layout == "plain":
        return memory[8 : memory.size - 8].reshape(shape)
    if layout == "every second":
        return memory[..., 1::2]
    if layout == "backwards":
        return memory[..., -2::-2]
    if layout == "columns of more":
        return memory[..., 1 : shape[-1] + 1]
    return memory[1:-1].T  # "transposed", "Fortran"


def where() -> str:
    """Return rank and world size, for messages."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def describe(name: str, shape: tuple[int, ...], op: ReduceOp | None = None, root: int | None = None) -> str:
    """Return a case in words, for messages."""
    parts = [f"{name}{list(shape)}", f"op {op.name}" if op else "", f"root {root}" if root is not None else ""]
    return ", ".join(filter(None, parts))


def same(actual: object, expected: object, what: str) -> None:
    """Compare two things that are no arrays."""
    if actual != expected:
        raise AssertionError(f"{where()}, {what}: got {actual!r}, expected {expected!r}")


def reductions(names: list[str]) -> Iterator[tuple[str, tuple[int, ...], str, ReduceOp, int]]:
    """Return every dtype with every small shape and every op defined for it, and a number that changes."""
    combinations = itertools.product(names, SMALL, OPS)
    for number, (name, (shape, layout), op) in enumerate(combinations):
        if is_defined(op, dtype_of(name)):
            yield name, shape, layout, op, number


def large(
    names: tuple[str, ...], sizes: tuple[int, ...] = LARGE_BYTES
) -> Iterator[tuple[str, tuple[int, ...], str, int]]:
    """Return large shapes of these dtypes, plain and strided."""
    for number, (num_bytes, name) in enumerate(itertools.product(sizes, names)):
        count = num_bytes // dtype_of(name).itemsize
        layouts = ("plain", "every second") if num_bytes == 100 * KIB else ("plain",)
        for layout in layouts:
            yield name, (count,), layout, number
