"""More of numpy.linalg, made of products, singular values and norms that the arrays have."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from meshdist.tensor.array_reductions import reduce as reduce_dims
from meshdist.tensor.dispatch import implements, may_redistribute
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.linear_algebra import reduced_svd, singular_values, whole
from meshdist.tensor.norms import norm
from meshdist.tensor.operands import aligned, as_operand, mesh_of, resolved
from meshdist.tensor.placements import PlacementError

_linalg: Any = np.linalg


@implements(np.linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: Any = None) -> tuple[DTensor, DTensor, int, DTensor]:
    """Return the least-squares solution, the residuals, the rank and the singular values; see `numpy.linalg.lstsq`.

    `a` may be a tall matrix that is sharded along its rows, and `b` is sharded the same way: its rows do not move.
    """
    name = "np.linalg.lstsq"
    mesh = mesh_of(name, (a, b))
    a, b = (resolved(as_operand(name, x, mesh)) for x in (a, b))
    if a.ndim != 2 or b.ndim not in (1, 2) or a.shape[0] != b.shape[0]:
        raise np.linalg.LinAlgError(f"lstsq: incompatible dimensions, a has the shape {a.shape} and b {b.shape}")
    rows, columns = a.shape
    u, s, vh = reduced_svd(name, a)
    (_, block), alignment, _ = aligned(name, (u, b), ((0, 1), (0, 2)[: b.ndim]))
    b = wrap(block, alignment.targets[1], mesh)
    sizes = s.to_local()
    least = np.finfo(sizes.dtype).eps * max(rows, columns) if rcond is None else max(rcond, np.finfo(sizes.dtype).eps)
    counts = sizes > least * sizes.max(initial=0)
    inverse = np.where(counts, 1 / np.where(counts, sizes, 1), 0).astype(sizes.dtype)
    shares = resolved(np.conjugate(u).T @ b)
    x = np.conjugate(vh).T @ (shares * (inverse if b.ndim == 1 else inverse[:, None]))
    rank = int(counts.sum())
    residuals = np.zeros(0, sizes.dtype)
    if rank == columns and rows > columns:
        residuals = reduce_dims(np.add, np.square(np.abs(b - a @ x)), 0, None, None, b.ndim == 1)
    return x, as_operand(name, residuals, mesh), rank, s


@implements(np.linalg.multi_dot)
def multi_dot(arrays: Any, *, out: Any = None) -> Any:
    """Return the product of several arrays, from the left to the right; see `numpy.linalg.multi_dot`."""
    ndims = [np.ndim(x) for x in arrays]
    if len(ndims) < 2:
        raise ValueError("Expecting at least two arrays.")
    for ndim in ndims[1:-1] if len(ndims) > 2 else ():
        if ndim != 2:
            raise np.linalg.LinAlgError(f"{ndim}-dimensional array given. Array must be two-dimensional")
    product, last = arrays[0], len(arrays) - 1
    for number, array in enumerate(arrays[1:], 1):
        before = "arrays[0]" if number == 1 else f"the product of the arrays before arrays[{number}]"
        try:
            product = np.dot(product, array, out=out) if number == last else np.dot(product, array)
        except PlacementError as error:
            error.args = (str(error).replace("operand 0", before).replace("operand 1", f"arrays[{number}]"),)
            raise
    return product


@implements(np.linalg.matrix_power)
def matrix_power(a: DTensor, n: int) -> Any:
    """Return a square matrix raised to a power, by squaring; see `numpy.linalg.matrix_power`."""
    np.linalg.matrix_power(np.ones((1,) * a.ndim if a.shape[-1:] == a.shape[-2:-1] else a.shape), abs(n))
    if n < 0:
        return matrix_power(cast(Any, np.linalg.inv(cast(Any, a))), -n)
    if n == 0:
        power = np.zeros_like(cast(Any, a))
        power += np.eye(a.shape[-1], dtype=a.dtype)
        return power
    if n > 1 and not may_redistribute.get():  # else the products redistribute it
        a = whole("np.linalg.matrix_power", a, 2)
    half = a if n < 2 else matrix_power(a, n // 2)
    squared = half if n < 2 else half @ half
    return squared @ a if n > 2 and n % 2 else squared


if hasattr(_linalg, "vector_norm"):

    @implements(_linalg.svdvals)
    def svdvals(x: Any, /) -> Any:
        """Return the singular values; see `numpy.linalg.svdvals`."""
        return singular_values("np.linalg.svdvals", x)

    @implements(_linalg.vector_norm)
    def vector_norm(x: DTensor, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
        """Return the norm of vectors, of all elements by default; see `numpy.linalg.vector_norm`."""
        if axis is not None and not isinstance(axis, tuple):
            return norm(x, ord, axis, keepdims)
        dims = tuple(range(x.ndim)) if axis is None else tuple(dim % x.ndim for dim in axis)
        order = (*dims, *(dim for dim in range(x.ndim) if dim not in dims))
        lines: Any = np.reshape(np.transpose(x, order), (-1, *(x.shape[dim] for dim in order[len(dims) :])))
        found = norm(lines, ord, 0)
        return np.reshape(found, [1 if d in dims else r for d, r in enumerate(x.shape)]) if keepdims else found

    @implements(_linalg.matrix_norm)
    def matrix_norm(x: DTensor, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
        """Return the norms of the matrices in the last two dimensions; see `numpy.linalg.matrix_norm`."""
        return norm(x, ord, (-2, -1), keepdims)

    # The names of the array API for functions that are there.
    implements(_linalg.matmul)(lambda x1, x2, /: np.matmul(x1, x2))
    implements(_linalg.outer)(lambda x1, x2, /: np.outer(x1, x2))
    implements(_linalg.tensordot)(lambda x1, x2, /, *, axes=2: np.tensordot(x1, x2, axes))
    implements(_linalg.cross)(lambda x1, x2, /, *, axis=-1: np.cross(x1, x2, axis=axis))
    implements(_linalg.vecdot)(lambda x1, x2, /, *, axis=-1: np.vecdot(*(np.moveaxis(x, axis, -1) for x in (x1, x2))))
    implements(_linalg.diagonal)(lambda x, /, *, offset=0: np.diagonal(x, offset, -2, -1))
    implements(_linalg.trace)(lambda x, /, *, offset=0, dtype=None: np.trace(x, offset, -2, -1, dtype))
    implements(_linalg.matrix_transpose)(lambda x, /: np.matrix_transpose(x))
