"""Diagonals and traces: where rows or columns of a matrix are sharded, each rank holds a part of the diagonal."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.array_reductions import reduce
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.operands import checked_out, require, written


@implements(np.diagonal)
def diagonal(a: DTensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> DTensor:
    """Return the diagonals of two dimensions, of which one may be sharded; see `numpy.diagonal`."""
    np.diagonal(np.empty((0,) * a.ndim), offset, axis1, axis2)  # NumPy says what it does not take
    dims = (axis1 % a.ndim, axis2 % a.ndim)
    source, result = _diagonal_layouts(a.layout, offset, dims)
    block = a.to_local()
    if source is not a.layout:
        block = require("np.diagonal", a, source, "at most one of the two dimensions may be sharded")
    index = source.index(coordinate_in(a.mesh))
    # Of a block that begins at row r and column c, the diagonal is that of offset + r - c.
    local = np.diagonal(block, offset + index[dims[0]].start - index[dims[1]].start, *dims)
    return wrap(local, result, a.mesh, a._origin)


@lru_cache(1000)
def _diagonal_layouts(layout: ArrayLayout, offset: int, dims: tuple[int, int]) -> tuple[ArrayLayout, ArrayLayout]:
    rows, columns = dims
    source = layout
    if layout.cuts[rows] is not None and layout.cuts[columns] is not None:
        source = layout.with_cuts([None if dim == columns else cut for dim, cut in enumerate(layout.cuts)])
    first = (max(0, -offset), max(0, offset))  # row and column of the first element
    length = max(0, min(layout.shape[rows] - first[0], layout.shape[columns] - first[1]))
    cut = None
    for dim, start in zip(dims, first, strict=True):
        found = source.cuts[dim]
        if found is not None:
            ends = np.cumsum((0, *found.sizes)) - start
            cut = Cut(found.axes, tuple(int(size) for size in np.diff(np.clip(ends, 0, length))))
    kept = [dim for dim in range(layout.ndim) if dim not in dims]
    return source, ArrayLayout.of_cuts(
        (*(layout.shape[dim] for dim in kept), length),
        layout.mesh_shape,
        (*(source.cuts[dim] for dim in kept), cut),
        source.pending,
    )


@implements(np.trace)
def trace(a: DTensor, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None, out: Any = None) -> Any:
    """Return the sums of the diagonals of two dimensions; see `numpy.trace`."""
    out = checked_out("np.trace", out)
    result = reduce(np.add, diagonal(a, offset, axis1, axis2), -1, dtype)
    if out is not None:
        checked_out("np.trace", out, result.shape)
    return written("np.trace", result, out)


@implements(np.diag)
def diag(v: DTensor, k: int = 0) -> DTensor:
    """Return the diagonal of a matrix, or the matrix with a vector on its diagonal; see `numpy.diag`.

    For a sharded vector, the rows of the matrix are sharded the same way. Off the main diagonal, the vector must be
    unsharded.
    """
    if v.ndim != 1:
        if v.ndim != 2:
            raise ValueError("Input must be 1- or 2-d.")
        return diagonal(v, k)
    if k:
        whole = v.layout.with_cuts((None,))
        block = np.diag(require("np.diag", v, whole, f"the matrix has {abs(k)} rows more than the vector"), k)
        layout = ArrayLayout.of_cuts(block.shape, v.mesh.shape, (None, None), whole.pending)
        return wrap(block, layout, v.mesh, v._origin)
    layout = ArrayLayout.of_cuts(v.shape * 2, v.mesh.shape, (v.layout.cuts[0], None), v.layout.pending)
    (held,) = v.layout.index(coordinate_in(v.mesh))
    block = array_module(v.mesh).zeros(layout.local_shape(coordinate_in(v.mesh)), v.dtype)
    rows = np.arange(held.stop - held.start)
    block[rows, rows + held.start] = v.to_local()
    return wrap(block, layout, v.mesh, v._origin)
