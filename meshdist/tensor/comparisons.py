"""Comparisons: whether arrays are equal, and where the extrema are."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from meshdist.runtime.context import current_slot
from meshdist.tensor.agreement import words_of
from meshdist.tensor.array_layout import ArrayLayout, is_whole
from meshdist.tensor.array_operators import is_incomparable
from meshdist.tensor.array_reductions import (
    NOT_GIVEN,
    hashable_axis,
    identity_of,
    joined,
    reduce,
    without_dims,
    without_nan,
)
from meshdist.tensor.dispatch import NUMBERS, implements
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_space import trailing
from meshdist.tensor.known_calls import localizes, on_blocks
from meshdist.tensor.operands import aligned, as_operand, checked_out, mesh_of, resolved, written


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Any:
    """Return where two arrays are equal within a tolerance; see `numpy.isclose`."""
    operands = [x if isinstance(x, NUMBERS) or hasattr(x, "ndim") else np.asarray(x) for x in (a, b, rtol, atol)]
    shape = np.broadcast_shapes(*map(np.shape, operands))
    blocks, alignment, mesh = aligned("np.isclose", operands, [trailing(x) for x in operands])
    layout = ArrayLayout.of_cuts(shape, mesh.shape, alignment.cuts_of(range(-len(shape), 0)), {})
    x, y, relative, absolute = blocks
    return wrap(np.isclose(x, y, relative, absolute, equal_nan), layout, mesh)


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> bool:
    """Return whether two arrays are equal within a tolerance, on every rank; see `numpy.allclose`."""
    return bool(reduce(np.logical_and, isclose(a, b, rtol, atol, equal_nan), None))


@implements(np.array_equal)
def array_equal(a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    """Return whether two arrays have the same shape and elements, on every rank; see `numpy.array_equal`."""
    return np.shape(a1) == np.shape(a2) and _are_equal("np.array_equal", a1, a2, equal_nan)


@implements(np.array_equiv)
def array_equiv(a1: Any, a2: Any) -> bool:
    """Return whether two arrays are equal where one is broadcast to the other; see `numpy.array_equiv`."""
    try:
        np.broadcast_shapes(np.shape(a1), np.shape(a2))
    except ValueError:
        return False
    return _are_equal("np.array_equiv", a1, a2, False)


def _are_equal(name: str, a1: Any, a2: Any, equal_nan: bool) -> bool:
    mesh = mesh_of(name, (a1, a2))
    if is_incomparable(a1) or is_incomparable(a2):
        return 0 in np.broadcast_shapes(np.shape(a1), np.shape(a2))
    a, b = as_operand(name, a1, mesh), as_operand(name, a2, mesh)
    same = np.equal(a, b)
    if equal_nan and a.dtype.kind in "fc" and b.dtype.kind in "fc":
        same = same | (np.isnan(a) & np.isnan(b))
    return bool(reduce(np.logical_and, same, None))


# ---- Where the extrema are: of the ranks along a cut, those with the extremum compare their indices

_NOWHERE = np.iinfo(np.intp).max


def _index_of(function: Callable[..., Any], ufunc: np.ufunc) -> Callable[..., Any]:
    name = f"np.{function.__name__}"

    def index_of(a: Any, axis: int | None = None, out: Any = None, keepdims: Any = False) -> Any:
        out = checked_out(name, out)
        mesh = mesh_of(name, (a, out))
        a = as_operand(name, a, mesh)
        axis, keepdims = hashable_axis(axis), keepdims is not NOT_GIVEN and bool(keepdims)
        probe, dims = _probed(function, a.shape, a.dtype, axis, keepdims)
        result = without_dims(a.layout.resolved() if a.layout.pending else a.layout, dims, keepdims)
        if out is not None:
            checked_out(name, out, result.shape)
            function(probe, axis, np.empty([1] * len(result.shape), out.dtype), keepdims=keepdims)
        a = resolved(a)
        local = _located(function, ufunc, a, dims)
        return written(name, wrap(local.reshape(result.local_shape(coordinate_in(mesh))), result, mesh), out, "unsafe")

    return index_of


@lru_cache(1000)
def _probed(
    function: Callable[..., Any], shape: tuple[int, ...], dtype: Any, axis: Any, keepdims: bool
) -> tuple[Any, tuple[int, ...]]:
    """Return a small array to call the function with, and the dimensions it goes along; raise what NumPy does."""
    function(np.zeros(shape if 0 in shape else (1,) * len(shape), dtype), axis, keepdims=keepdims)
    ndim = len(shape)
    # A 0-d array is one of one row.
    dims = tuple(range(ndim)) if axis is None or not ndim else (operator.index(axis) % ndim,)
    return np.zeros((1,) * ndim, dtype), dims


def _located(function: Callable[..., Any], ufunc: np.ufunc, a: DTensor, dims: tuple[int, ...]) -> Any:
    """Return the index of the first extremum, of NaN if there are any, along one dimension or of all elements."""
    block, layout, module = a.to_local(), a.layout, array_module(a.mesh)
    axes = tuple(sorted(axis for dim in dims for axis in layout.axes_of(dim)))
    whole = len(dims) == a.ndim
    lines = block.reshape(1, -1) if whole else module.moveaxis(block, dims[0], -1)
    if not axes:
        return function(lines, axis=-1)
    start = [part.start for part in layout.index(coordinate_in(a.mesh))]
    if lines.shape[-1]:
        at = function(lines, axis=-1)
        values = module.take_along_axis(lines, at[..., None], -1)[..., 0]
        if whole:
            places = module.unravel_index(at, block.shape)
            at = sum(
                (
                    (place + first) * stride
                    for place, first, stride in zip(places, start, _strides(a.shape), strict=True)
                ),
                module.zeros_like(at),
            )
        else:
            at = at + start[dims[0]]
    else:
        at = module.full(lines.shape[:-1], _NOWHERE, np.intp)
        values = module.full(lines.shape[:-1], identity_of(ufunc, a.dtype), a.dtype)
    words = words_of(f"np.{function.__name__}", layout)
    best = joined(values.copy(), ufunc, axes, a.mesh, words)
    # Where the extremum is NaN, the ranks that hold a NaN have it.
    return joined(module.where((values == best) | (values != values), at, _NOWHERE), np.minimum, axes, a.mesh, words)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[dim + 1 :], dtype=np.int64)) for dim in range(len(shape)))


argmax = implements(np.argmax)(_index_of(np.argmax, np.maximum))
argmin = implements(np.argmin)(_index_of(np.argmin, np.minimum))


def _of_numbers(function: Callable[..., Any], of_all: Callable[..., Any], fill: float) -> None:
    @implements(function)
    def index_of(a: Any, axis: int | None = None, out: Any = None, *, keepdims: Any = False) -> Any:
        if isinstance(a, DTensor) and a.dtype.kind in "fc":
            none = reduce(np.logical_and, np.isnan(a), hashable_axis(axis))
            is_any = bool(reduce(np.logical_or, resolved(none), None))
            if is_any and current_slot().dry is None:  # a dry run does not know the blocks of others
                raise ValueError("All-NaN slice encountered")
            a = without_nan(a, fill)
        return of_all(a, axis, out, keepdims)


_of_numbers(np.nanargmax, argmax, -np.inf)
_of_numbers(np.nanargmin, argmin, np.inf)


@localizes(np.argmax)
def _argmax_alike(result: DTensor, a: DTensor, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    return np.argmax if is_whole(a.layout, axis) else None


@localizes(np.argmin)
def _argmin_alike(result: DTensor, a: DTensor, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
    return np.argmin if is_whole(a.layout, axis) else None


on_blocks(np.isclose)
