"""Differences of neighbours: diff, gradient and trapezoid. Along a sharded dimension, ranks exchange the edge rows."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout, Cut, is_whole
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.halos import with_ghosts
from meshdist.tensor.index_keys import along, normalized
from meshdist.tensor.known_calls import localizes
from meshdist.tensor.operands import as_operand, mesh_of, require, resolved


def with_rows_around(of: str, x: DTensor, dim: int, before: int, after: int) -> Any:
    """Return this rank's block with rows before and after it on one dimension, for a function `of` of NumPy."""
    ahead, behind = ([width if other == dim else 0 for other in range(x.ndim)] for width in (before, after))
    return with_ghosts(of, x.to_local(), x.layout, x.mesh, ahead, behind, (False,) * x.ndim)


@implements(np.diff)
def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = np._NoValue, append: Any = np._NoValue) -> DTensor:
    """Compute differences on the blocks with the rows that follow them; the last blocks get fewer rows."""
    if n < 0:
        raise ValueError(f"order must be non-negative but got {n!r}")
    if n == 0:
        return cast(DTensor, a)  # as NumPy
    if np.ndim(a) == 0:
        raise ValueError("diff requires input that is at least one dimensional")
    dim = normalized(axis, np.ndim(a))
    if prepend is not np._NoValue or append is not np._NoValue:
        row = (*np.shape(a)[:dim], 1, *np.shape(a)[dim + 1 :])
        ends = [
            np.broadcast_to(end, row) if end is not np._NoValue and np.ndim(end) == 0 else end
            for end in (prepend, append)
        ]
        parts = [part for part in (ends[0], a, ends[1]) if part is not np._NoValue]
        return diff(np.concatenate(parts, axis=dim), n, dim)
    if a.dtype == np.bool_ or not set(a.layout.pending.values()) <= {"sum", "avg"}:
        a = resolved(a)
    layout = shortened(a.layout, dim, n)
    rows = layout.local_shape(coordinate_in(a.mesh))[dim]
    block = np.diff(with_rows_around("np.diff", a, dim, 0, n), n, dim)
    return wrap(block[(slice(None),) * dim + (slice(0, rows),)], layout, a.mesh, a._origin)


@localizes(np.diff)
def _differences_alike(result: DTensor, a: DTensor, n: int = 1, axis: int = -1, *args: Any, **kwargs: Any) -> Any:
    return np.diff if is_whole(a.layout, kwargs.get("axis", axis)) else None


@lru_cache(maxsize=10_000)
def shortened(layout: ArrayLayout, dim: int, by: int) -> ArrayLayout:
    """Return the layout of what lacks the last rows."""
    shape, cuts = list(layout.shape), list(layout.cuts)
    shape[dim] = rows = max(0, shape[dim] - by)
    cut = cuts[dim]
    if cut is not None:
        starts = [min(start, rows) for start in accumulate(cut.sizes, initial=0)]
        cuts[dim] = Cut(cut.axes, tuple(b - a for a, b in pairwise(starts)))
    return ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, layout.pending)


@implements(np.gradient)
def gradient(f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Compute central differences on the blocks with two rows around them."""
    if not isinstance(f, DTensor):
        raise TypeError("np.gradient: a spacing is a DTensor, but the array is not; pass spacing.full()")
    ndim = f.ndim
    axes = tuple(range(ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    dims = tuple(normalized(each, ndim) for each in axes)
    if len(set(dims)) != len(dims):
        raise ValueError("repeated axis")
    spacings = _spacings(f, varargs, dims)
    if edge_order > 2:
        raise ValueError("'edge_order' greater than 2 not supported")
    for dim in dims:
        if f.shape[dim] < edge_order + 1:
            raise ValueError(
                "Shape of array too small to calculate a numerical gradient, at least (edge_order + 1) elements are"
                " required."
            )
    f = resolved(f)
    results = tuple(_gradient(f, dim, spacing, edge_order) for dim, spacing in zip(dims, spacings, strict=True))
    return results[0] if len(dims) == 1 else results


def _spacings(f: DTensor, varargs: tuple[Any, ...], dims: tuple[int, ...]) -> list[Any]:
    """Return a number, or an array of coordinates, for each dimension."""
    if not varargs:
        return [1.0] * len(dims)
    if len(varargs) == 1 and np.ndim(varargs[0]) == 0:
        varargs = varargs * len(dims)
    if len(varargs) != len(dims):
        raise TypeError("invalid number of arguments")
    spacings = []
    for dim, spacing in zip(dims, varargs, strict=True):
        if np.ndim(spacing) > 1:
            raise ValueError("distances must be either scalars or 1d")
        if np.ndim(spacing) and np.shape(spacing)[0] != f.shape[dim]:
            raise ValueError("when 1d, distances must match the length of the corresponding dimension")
        if isinstance(spacing, DTensor):
            whole = ArrayLayout.of_cuts(spacing.shape, spacing.mesh.shape, (None,) * spacing.ndim, {})
            spacing = require("np.gradient", spacing, whole, "every rank needs all coordinates")
        spacings.append(spacing if np.ndim(spacing) == 0 else np.asarray(spacing))
    return spacings


def _gradient(f: DTensor, dim: int, spacing: Any, edge_order: int) -> DTensor:
    block = with_rows_around("np.gradient", f, dim, 2, 2)
    held = f.layout.index(coordinate_in(f.mesh))[dim]
    first = max(held.start - 2, 0)
    rows = (slice(None),) * dim + (slice(held.start - first, held.stop - first),)
    if held.start == held.stop:  # the rows around may be too few; what counts is the dtype
        module = array_module(f.mesh)
        dtype = np.gradient(np.ones(3, f.dtype), spacing if np.ndim(spacing) == 0 else np.arange(3)).dtype
        return wrap(module.empty(f.to_local().shape, dtype), f.layout, f.mesh)
    if np.ndim(spacing):
        spacing = spacing[first : first + block.shape[dim]]
    result = np.gradient(block, spacing, axis=dim, edge_order=cast(Any, edge_order))
    return wrap(result[rows], f.layout, f.mesh)


def _trapezoid(function: Any) -> None:
    @implements(function)
    def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
        """Return the area under lines through points; see `numpy.trapezoid`."""
        y, dim = as_operand("np.trapezoid", y, mesh_of("np.trapezoid", (y, x))), normalized(axis, y.ndim)
        y = resolved(y)
        layout, block = shortened(y.layout, dim, 1), with_rows_around("np.trapezoid", y, dim, 0, 1)
        rows = layout.local_shape(coordinate_in(y.mesh))[dim]
        sums = block[along(dim, slice(1, rows + 1))] + block[along(dim, slice(0, rows))]
        widths: Any = dx
        if x is not None:
            widths = np.diff(x) if np.ndim(x) == 1 else np.diff(x, axis=dim)
            if np.ndim(x) == 1:
                widths = widths.reshape([-1 if at == dim else 1 for at in range(y.ndim)])
        return np.sum(widths * wrap(sums, layout, y.mesh) / 2.0, axis=dim)


for _function in (getattr(np, "trapezoid", None), getattr(np, "trapz", None)):
    if _function is not None:
        _trapezoid(_function)
