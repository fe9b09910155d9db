"""The NCCL datatype and operation of each reduction, and substitutes for those that NCCL lacks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.backends.nccl import library as nccl

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
# Two numbers each, added separately.
_PARTS = {"complex64": nccl.FLOAT32, "complex128": nccl.FLOAT64}
# Twice the bits; the lower half is the result, so that sums and products wrap as in the narrow dtype.
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {
    ReduceOp.SUM: nccl.SUM,
    ReduceOp.PRODUCT: nccl.PROD,
    ReduceOp.MIN: nccl.MIN,
    ReduceOp.MAX: nccl.MAX,
    ReduceOp.AVG: nccl.AVG,
}
# For bytes that are 0 or 1: "or" is the maximum, "and" the minimum, and "xor" the lowest bit of the sum.
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
    """How NCCL reduces arrays of one dtype by one op."""

    dtype: int  # NCCL's datatype
    op: int  # NCCL's operation
    parts: int = 1  # NCCL elements per element of ours
    wide: np.dtype[Any] | None = None  # the dtype to convert to before and from after; None for none
    is_parity: bool = False  # only the lowest bit of the result counts
    takes_factor: bool = False  # NCCL can do PREMUL_SUM


def reduction_of(dtype: np.dtype[Any], op: ReduceOp) -> Reduction | None:
    """Return how NCCL reduces arrays of `dtype` by `op`; None if it cannot.

    In that case, such as for bitwise operations and products of complex numbers, every rank gathers all arrays and
    reduces them itself.
    """
    name = dtype.name
    if name == "bool":
        return Reduction(nccl.UINT8, _OPS_OF_BOOL[op], is_parity=op is ReduceOp.BXOR)
    if op not in _OPS:
        return None
    if name in _PARTS:
        # A product of complex numbers is not that of their parts.
        if op is ReduceOp.PRODUCT:
            return None
        return Reduction(_PARTS[name], _OPS[op], parts=2)
    if name in _WIDER:
        wide = np.dtype(_WIDER[name])
        return Reduction(_NATIVE[wide.name], _OPS[op], wide=wide)
    if name in _NATIVE:
        return Reduction(_NATIVE[name], _OPS[op], takes_factor=op is ReduceOp.SUM and "8" not in name)
    return None
