"""Which NCCL datatype and operation a reduction takes, and what becomes of what NCCL does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdist.backends.nccl import library as nccl
from meshdist.reduce_op import ReduceOp

_NATIVE = {
    "int8": nccl.INT8,
    "uint8": nccl.UINT8,
    "int32": nccl.INT32,
    "uint32": nccl.UINT32,
    "int64": nccl.INT64,
    "uint64": nccl.UINT64,
    "float16": nccl.FLOAT16,
    "float32": nccl.FLOAT32,
    "float64": nccl.FLOAT64,
    "bfloat16": nccl.BFLOAT16,
    "float8_e4m3fn": nccl.FLOAT8_E4M3,
    "float8_e5m2": nccl.FLOAT8_E5M2,
}
# Two numbers each, which are added one by one.
_PARTS = {"complex64": nccl.FLOAT32, "complex128": nccl.FLOAT64}
# Of twice the bits, whose lower half is the result: sums and products wrap as those of the narrow dtype do.
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {
    ReduceOp.SUM: nccl.SUM,
    ReduceOp.PRODUCT: nccl.PROD,
    ReduceOp.MIN: nccl.MIN,
    ReduceOp.MAX: nccl.MAX,
    ReduceOp.AVG: nccl.AVG,
}
# Of bytes that are 0 or 1: "or" is their maximum, "and" their minimum, and their sum is odd where "xor" is 1.
_OPS_OF_BOOL = {
    ReduceOp.SUM: nccl.MAX,
    ReduceOp.MAX: nccl.MAX,
    ReduceOp.BOR: nccl.MAX,
    ReduceOp.PRODUCT: nccl.MIN,
    ReduceOp.MIN: nccl.MIN,
    ReduceOp.BAND: nccl.MIN,
    ReduceOp.BXOR: nccl.SUM,
}


@dataclass(frozen=True)
class Reduction:
    """How NCCL reduces arrays of one dtype by one op.

    Attributes:
        dtype: NCCL's datatype.
        op: NCCL's operation.
        parts: How many of its elements make up one of ours.
        wide: The dtype that the array is converted to before, and from after; None where it goes as it is.
        is_parity: Of what comes out only the last bit is wanted.
        takes_factor: PREMUL_SUM can be left to NCCL.
    """

    dtype: int
    op: int
    parts: int = 1
    wide: np.dtype[Any] | None = None
    is_parity: bool = False
    takes_factor: bool = False


def reduction_of(dtype: np.dtype[Any], op: ReduceOp) -> Reduction | None:
    """Return how NCCL reduces arrays of `dtype` by `op`; None where it cannot.

    Then the ranks gather all arrays, and each reduces them by itself: so it is for the bits of integers.

    Example:
        >>> reduction_of(np.dtype("complex64"), ReduceOp.SUM)
        Reduction(dtype=7, op=0, parts=2, wide=None, is_parity=False, takes_factor=False)
        >>> reduction_of(np.dtype("int32"), ReduceOp.BXOR) is None
        True
    """
    name = dtype.name
    if name == "bool":
        return Reduction(nccl.UINT8, _OPS_OF_BOOL[op], is_parity=op is ReduceOp.BXOR)
    if op not in _OPS:
        return None
    if name in _PARTS:
        return Reduction(_PARTS[name], _OPS[op], parts=2)
    if name in _WIDER:
        wide = np.dtype(_WIDER[name])
        return Reduction(_NATIVE[wide.name], _OPS[op], wide=wide)
    if name in _NATIVE:
        return Reduction(_NATIVE[name], _OPS[op], takes_factor=op is ReduceOp.SUM and "8" not in name)
    return None
