"""ReduceOp: what a reduction does with two elements, and which dtypes it is defined for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

__all__ = ["ReduceOp", "as_reduce_op", "check_op_dtype"]


class ReduceOp(Enum):
    """The reductions.

    Every function that takes a ReduceOp takes its name in lower case as well: `op="max"`.

    SUM, PRODUCT, MIN and MAX mean what NumPy's `add`, `multiply`, `minimum` and `maximum` mean: integers wrap
    on overflow, a NaN in MIN or MAX propagates, `bool` adds as "or" and multiplies as "and". BAND, BOR and BXOR are
    for integers and bool. AVG is SUM divided by the group's size, for floating and complex dtypes.

    Example:
        >>> ReduceOp.SUM
        <ReduceOp.SUM: 'sum'>
        >>> as_reduce_op("Max") is ReduceOp.MAX
        True
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    AVG = "avg"

    # Plans are looked up by op on every call: hash the identity in C, not the name in Python.
    __hash__ = object.__hash__

    @property
    def ufunc(self) -> Callable[..., Any]:
        """The NumPy ufunc that combines two arrays; AVG combines as SUM and divides at the end."""
        return _UFUNCS[self]

    def finish(self, total: np.ndarray[Any, Any], num_ranks: int) -> None:
        """Make the combination of all ranks' arrays the result, in place: AVG divides by `num_ranks`."""
        if self is ReduceOp.AVG:
            np.divide(total, total.dtype.type(num_ranks), out=total)


_UFUNCS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
    ReduceOp.AVG: np.add,
}
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_NOT_FOR_COMPLEX = (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """Return the ReduceOp that `op` is or names.

    Raises:
        ValueError: An unknown name; the message lists the known ones.
        TypeError: Neither a ReduceOp nor a string.
    """
    if isinstance(op, ReduceOp):
        return op
    if not isinstance(op, str):
        raise TypeError(f"op must be a ReduceOp or its name, got {type(op).__name__}")
    try:
        return ReduceOp(op.lower())
    except ValueError:
        known = ", ".join(member.value for member in ReduceOp)
        raise ValueError(f"unknown op {op!r}; known are {known}") from None


def check_op_dtype(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Raise TypeError where `op` is not defined for `dtype`."""
    if dtype.kind == "c" and op in _NOT_FOR_COMPLEX:
        raise TypeError(f"op {op.name} is not defined for {dtype}: complex numbers take SUM and AVG")
    if op in _BITWISE and dtype.kind not in "biu":
        raise TypeError(f"op {op.name} is not defined for {dtype}: it takes integers and bool")
    if op is ReduceOp.AVG and dtype.kind in "biu":
        raise TypeError(
            f"op AVG is not defined for {dtype}: the mean of integers is none; use SUM, or a floating dtype"
        )
