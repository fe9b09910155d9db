"""The values that both sides start from."""

from __future__ import annotations

import zlib

import numpy as np
from both_sides import dtype_of

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG")

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (1,), (7,), (3, 5))
# Around what meshdist carries in one step, in slots, in one copy, and in many chunks.
_LARGE_BYTES = (8, 4096, 64 << 10, (64 << 10) + 8, 256 << 10, (256 << 10) + 8, (5 << 20) + 24)


def large_bytes(size: int) -> tuple[int, ...]:
    """Return the sizes for a world of `size` ranks: the largest for small worlds alone, to save time."""
    return _LARGE_BYTES if size < 4 else _LARGE_BYTES[:-1]


def _rng(*of: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(of).encode()))


def zeros(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return zeros, for outputs."""
    return np.zeros(shape, dtype_of(name))


def any_bits(name: str, shape: tuple[int, ...], *of: object) -> np.ndarray:
    """Return any bits, for what is only moved: NaN, infinities and negative zeros among them."""
    dtype, rng = dtype_of(name), _rng(name, shape, of)
    if name == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape)


def exact(name: str, shape: tuple[int, ...], op: str, *of: object) -> np.ndarray:
    """Return values whose reduction over a few ranks rounds nowhere, so that its order does not show.

    Integers wrap, which is exact whatever they are.
    """
    dtype, rng = dtype_of(name), _rng(name, shape, op, of)
    if name == "bool" or dtype.kind in "iu":
        return any_bits(name, shape, op, of)
    if op == "PRODUCT":
        return rng.choice([0.5, 1.0, -1.0, 2.0, -2.0], shape).astype(dtype)
    real = rng.integers(-8, 9, shape)
    return (real + 1j * rng.integers(-8, 9, shape)).astype(dtype) if dtype.kind == "c" else real.astype(dtype)


def rounding(name: str, shape: tuple[int, ...], *of: object) -> np.ndarray:
    """Return values that round when they are added or multiplied: from 0.5 to 1.5, of either sign."""
    dtype, rng = dtype_of(name), _rng(name, shape, of)
    parts = (rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 1], shape) for _ in range(2))
    real, imaginary = parts
    return (real + 1j * imaginary).astype(dtype) if dtype.kind == "c" else real.astype(dtype)


def unit_roundoff(name: str) -> float:
    """Return half the distance from 1 to the next number: what one operation may be off, relative to its result."""
    bits = {"float16": 11, "bfloat16": 8, "float32": 24, "complex64": 24, "float64": 53, "complex128": 53}[name]
    return float(2.0**-bits)
