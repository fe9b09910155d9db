"""The MPI datatype and operation of each reduction.

MPI reduces the usual integers, floats and complex numbers. Other dtypes (float16 and those of ml_dtypes) are described
to MPI as contiguous unsigned integers of the same length; an operation of ours maps that datatype back to the dtype and
reduces by NumPy. So do minimum and maximum of floating-point numbers, for which MPI does not define NaN, and sums and
products of integers that the library does not wrap on overflow: Open MPI saturates those of 8 and 16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp, quietly
from meshdist.backends.mpi.library import Session

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_REALS = {"float32": "FLOAT", "float64": "DOUBLE", "longdouble": "LONG_DOUBLE"}
_COMPLEX = {"complex64": "C_FLOAT_COMPLEX", "complex128": "C_DOUBLE_COMPLEX"}
_OPS = {
    ReduceOp.SUM: "SUM",
    ReduceOp.AVG: "SUM",
    ReduceOp.PRODUCT: "PROD",
    ReduceOp.MIN: "MIN",
    ReduceOp.MAX: "MAX",
    ReduceOp.BAND: "BAND",
    ReduceOp.BOR: "BOR",
    ReduceOp.BXOR: "BXOR",
}
# NumPy's arithmetic on bool, for bytes that are 0 or 1.
_OPS_OF_BOOL = {**_OPS, ReduceOp.SUM: "BOR", ReduceOp.MAX: "BOR", ReduceOp.PRODUCT: "BAND", ReduceOp.MIN: "BAND"}
# Divisible by no vector length, so that vector instructions and the remainder loop are both tried.
_TRIED = 257


class Arithmetic:
    """Datatypes and operations of reductions, created at first use: MPI may hold few of them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        mpi = session.mpi
        self._known: dict[np.dtype[Any], Any] = {
            **{np.dtype(name): getattr(mpi, f"{name.upper()}_T") for name in _INTEGERS},
            **{np.dtype(name): getattr(mpi, word) for name, word in {**_REALS, **_COMPLEX}.items()},
            np.dtype(bool): mpi.UINT8_T,
        }
        self._ours: dict[np.dtype[Any], Any] = {}
        self._dtypes: dict[int, np.dtype[Any]] = {}  # by the handle of the MPI datatype
        self._ops: dict[str, Any] = {}

    def of(self, dtype: np.dtype[Any], op: ReduceOp) -> tuple[Any, Any]:
        """Return the MPI datatype and the MPI operation that reduce arrays of `dtype` by `op`."""
        if dtype in self._known and self._is_numpys(dtype, op):
            names = _OPS_OF_BOOL if dtype.kind == "b" else _OPS
            return self._known[dtype], getattr(self._session.mpi, names[op])
        with self._session.lock:
            datatype = self._ours.get(dtype) or self._make_datatype(dtype)
            name = _OPS[op]
            made = self._ops.get(name)
            if made is None:
                made = self._ops[name] = self._session.mpi.Op.Create(self._combiner(op), commute=True)
            return datatype, made

    def moved(self, dtype: np.dtype[Any]) -> tuple[Any, int]:
        """Return the MPI datatype that moves elements of `dtype`, and its count per element."""
        length = dtype.itemsize
        mpi = self._session.mpi
        words = {1: mpi.UINT8_T, 2: mpi.UINT16_T, 4: mpi.UINT32_T, 8: mpi.UINT64_T}
        return (words[length], 1) if length in words else (mpi.UINT64_T, length // 8)

    def _is_numpys(self, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Return whether MPI's operation gives the same result as NumPy's, for a dtype that MPI knows."""
        if dtype.kind == "f":
            return op not in (ReduceOp.MIN, ReduceOp.MAX)
        if dtype.kind == "c":
            return op is not ReduceOp.PRODUCT  # libraries treat infinities differently, and round differently
        if dtype.kind not in "iu" or op not in (ReduceOp.SUM, ReduceOp.PRODUCT):
            return True
        # MPI does not define overflow: try it.
        largest = np.full(_TRIED, np.iinfo(dtype).max, dtype)
        found, known = largest.copy(), self._known[dtype]
        with self._session.lock:
            getattr(self._session.mpi, _OPS[op]).Reduce_local([largest, known], [found, known])
        return bool(np.array_equal(found, quietly(op.ufunc, largest, largest)))

    def _make_datatype(self, dtype: np.dtype[Any]) -> Any:
        plain, count = self.moved(dtype)
        datatype = plain.Create_contiguous(count)
        datatype.Commit()
        self._ours[dtype] = datatype
        self._dtypes[datatype.py2f()] = dtype
        return datatype

    def _combiner(self, op: ReduceOp) -> Any:
        ufunc = op.ufunc

        def combine(given: Any, total: Any, datatype: Any) -> None:
            dtype = self._dtypes[datatype.py2f()]
            result = np.frombuffer(total, dtype)
            quietly(ufunc, np.frombuffer(given, dtype), result, out=result)

        return combine
