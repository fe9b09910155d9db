"""Counts of values: bincount and histogram. Each rank counts its elements; of a sharded array it is a pending sum."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from meshdist.tensor.agreement import origin_of, words_of
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.array_reductions import joined, reduced_by_name
from meshdist.tensor.dispatch import implements, refuse
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.operands import aligned, as_operand, mesh_of, resolved


def _with_weights(name: str, x: Any, weights: Any) -> tuple[Any, Any, ArrayLayout, Any]:
    """Return the blocks of the elements and of their weights, sharded alike; the elements' layout, and the mesh."""
    mesh = mesh_of(name, (x, weights))
    x = resolved(as_operand(name, x, mesh))
    if weights is None:
        return x.to_local(), None, x.layout, mesh
    weights = resolved(as_operand(name, weights, mesh))
    labels = tuple(range(x.ndim))
    (block, of_block), alignment, _ = aligned(name, (x, weights), (labels, labels))
    return block, of_block, alignment.targets[0], mesh


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", None) or np.asarray(x).dtype


def _sample(x: Any, weights: Any) -> tuple[Any, Any]:
    """Return one element and one weight of the dtypes of these; none of an empty array.

    NumPy refuses some dtypes only where there are elements, which may be on some of the ranks alone.
    """
    count = min(1, math.prod(np.shape(x)))
    dtype = _dtype(x)
    of_x = np.zeros(count, np.uint8 if dtype.kind == "b" else dtype)
    return of_x, None if weights is None else np.zeros(count, _dtype(weights))


def _cutting(layout: ArrayLayout) -> tuple[int, ...]:
    return tuple(sorted(axis for dim in range(layout.ndim) for axis in layout.axes_of(dim)))


def _extrema(name: str, block: Any, layout: ArrayLayout, mesh: Any) -> tuple[Any, Any]:
    """Return the least and the greatest element of all ranks' blocks, not all of which are empty."""
    found = []
    for ufunc in (np.minimum, np.maximum):
        own = reduced_by_name(array_module(mesh), ufunc, block, tuple(range(block.ndim)), block.dtype, False)
        whole = joined(own.reshape(1), ufunc, _cutting(layout), mesh, words_of(name, layout))
        found.append((whole.get() if hasattr(whole, "get") else whole)[0])
    return found[0], found[1]


def _counts(local: Any, layout: ArrayLayout, mesh: Any) -> DTensor:
    pending = dict.fromkeys(_cutting(layout), "sum")
    return wrap(local, ArrayLayout.of_cuts(local.shape, mesh.shape, (None,), pending), mesh, origin_of(layout))


@implements(np.bincount)
def bincount(x: Any, /, weights: Any = None, minlength: int = 0) -> DTensor:
    """Count the occurrences of each integer, as a pending sum where `x` is sharded; see `numpy.bincount`.

    The ranks agree on the greatest integer, which is the length of the result.
    """
    if np.ndim(x) != 1:
        raise ValueError("object of too small depth for desired array" if np.ndim(x) == 0 else "object too deep")
    np.bincount(np.zeros(1, getattr(x, "dtype", np.intp)), minlength=minlength)  # raises what NumPy does
    if weights is not None and np.shape(weights) != np.shape(x):
        raise ValueError("The weights and list don't have the same length.")
    np.bincount(*_sample(x, weights), minlength)
    block, of_block, layout, mesh = _with_weights("np.bincount", x, weights)
    length = operator.index(minlength)
    if layout.shape[0]:
        least, most = _extrema("np.bincount", block, layout, mesh)
        if least < 0:
            raise ValueError("'list' argument must have no negative elements")
        length = max(length, int(most) + 1)
    counts = array_module(mesh).bincount(block, of_block, length)
    if of_block is not None and layout.shape[0]:
        counts = counts.astype(np.float64, copy=False)  # of an empty block they are integers
    return _counts(counts, layout, mesh)


def _range_of(name: str, a: Any, bins: Any, limits: Any, layout: ArrayLayout, mesh: Any) -> Any:
    """Return `range=` of a histogram as all ranks must have it: the extrema of the array where none is given."""
    if isinstance(bins, str):
        refuse("np.histogram(bins=) as the name of an estimator")
    if limits is not None or np.ndim(bins):
        return limits
    return _extrema(name, a, layout, mesh) if 0 not in layout.shape else (0, 1)


def _refuse_complex(name: str, a: Any, bins: Any, limits: Any) -> None:
    """Refuse what NumPy counts for some values, and fails for others, which may be on some of the ranks alone.

    Raises:
        TypeError: Complex numbers and bins of equal width.
    """
    if np.ndim(bins) == 0 and "c" in (_dtype(a).kind, np.asarray(limits).dtype.kind):
        raise TypeError(
            f"{name}: cannot count complex numbers in bins of equal width; count x.real, x.imag or abs(x), or pass the"
            " edges of the bins"
        )


@implements(np.histogram)
def histogram(a: Any, bins: Any = 10, range: Any = None, density: Any = None, weights: Any = None) -> Any:
    """Return the counts of elements in bins, a pending sum where `a` is sharded, and the edges; see `numpy.histogram`.

    Complex numbers are counted between given edges only.
    """
    _refuse_complex("np.histogram", a, bins, range)
    if isinstance(bins, DTensor):
        bins = bins.full()
    np.histogram(np.zeros(0), bins if not isinstance(bins, str) else 1, range)  # raises what NumPy does
    if weights is not None and np.shape(weights) != np.shape(a):
        raise ValueError("weights should have the same shape as a.")
    sample, of_weights = _sample(a, weights)
    np.histogram(sample, bins if np.ndim(bins) else 1, range, weights=of_weights)
    block, of_block, layout, mesh = _with_weights("np.histogram", a, weights)
    block = block.astype(np.uint8) if block.dtype == bool else block
    limits = _range_of("np.histogram", block, bins, range, layout, mesh)
    counts, edges = array_module(mesh).histogram(block, bins, limits, weights=of_block)
    made = _counts(counts, layout, mesh)
    held = wrap(edges, ArrayLayout.of_cuts(edges.shape, mesh.shape, (None,), {}), mesh)
    if density:
        whole = resolved(made)
        counts = whole.to_local()
        widths = array_module(mesh).asarray(np.diff(edges), float)
        made = wrap(counts / widths / counts.sum(), whole.layout, mesh)
    return made, held


@implements(np.histogram_bin_edges)
def histogram_bin_edges(a: Any, bins: Any = 10, range: Any = None, weights: Any = None) -> DTensor:
    """Return the edges of the bins of a histogram, the same on all ranks; see `numpy.histogram_bin_edges`."""
    if isinstance(bins, DTensor):
        bins = bins.full()
    np.histogram_bin_edges(np.zeros(0), bins if not isinstance(bins, str) else 1, range)  # raises what NumPy does
    if weights is not None and np.shape(weights) != np.shape(a):
        raise ValueError("weights should have the same shape as a.")
    block, _, layout, mesh = _with_weights("np.histogram_bin_edges", a, weights)
    block = block.astype(np.uint8) if block.dtype == bool else block
    limits = _range_of("np.histogram_bin_edges", block, bins, range, layout, mesh)
    # They depend on the limits alone, and CuPy has no such function.
    edges = array_module(mesh).asarray(np.histogram_bin_edges(np.zeros(0, block.dtype), bins, limits))
    return wrap(edges, ArrayLayout.of_cuts(edges.shape, mesh.shape, (None,), {}), mesh)
