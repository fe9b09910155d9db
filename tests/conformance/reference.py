"""What every collective means, in NumPy: from the arrays of all ranks to the arrays of all ranks."""

from __future__ import annotations

import numpy as np

from meshdist import ReduceOp

COMBINE = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def reduced(arrays, op):
    total = np.array(arrays[0])
    for array in arrays[1:]:
        COMBINE[op](total, array, out=total)
    if op is ReduceOp.AVG:
        # Real and imaginary parts each by themselves: dividing by a complex number rounds more than once.
        for part in (total.real, total.imag) if total.dtype.kind == "c" else (total,):
            np.divide(part, part.dtype.type(len(arrays)), out=part)
    return total


def all_reduce(arrays, op):
    total = reduced(arrays, op)
    return [total] * len(arrays)


def reduce(arrays, op, root):
    total = reduced(arrays, op)
    return [total if rank == root else array for rank, array in enumerate(arrays)]


def reduce_scatter(lists, op):
    return [reduced(blocks, op) for blocks in zip(*lists, strict=True)]


def broadcast(arrays, root):
    return [arrays[root]] * len(arrays)


def all_gather(arrays):
    return [list(arrays)] * len(arrays)


def all_to_all(lists):
    return [list(blocks) for blocks in zip(*lists, strict=True)]
