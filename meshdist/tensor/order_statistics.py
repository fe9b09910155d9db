"""Medians, quantiles and percentiles; along what is sharded, by distributed selection, without moving the elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from warnings import warn

import numpy as np

from meshdist.arrays.device import cupy_module
from meshdist.groups.process_group import ProcessGroup
from meshdist.tensor.agreement import words_of
from meshdist.tensor.array_layout import ArrayLayout, is_whole
from meshdist.tensor.array_reductions import NOT_GIVEN, reduced_dims, without_dims
from meshdist.tensor.dispatch import implements
from meshdist.tensor.distributed_selection import narrowed, selected
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.moves import group_of
from meshdist.tensor.operands import as_operand, checked_out, mesh_of, require, resolved, written

# ---- The places that a quantile is between, as NumPy has them (Hyndman and Fan 1996, American Statistician 50)

_BOUNDARIES: dict[str, tuple[float, float]] = {  # alpha and beta
    "interpolated_inverted_cdf": (0, 1),
    "hazen": (0.5, 0.5),
    "weibull": (0, 0),
    "median_unbiased": (1 / 3.0, 1 / 3.0),
    "normal_unbiased": (3 / 8.0, 3 / 8.0),
}

_METHODS_OF_CUPY = ("linear", "lower", "higher", "midpoint", "nearest")


def _whole_places(method: str, n: Any, q: Any) -> Any:
    """Return the places of the elements themselves; None for a method that interpolates."""
    if method in ("lower", "higher", "nearest"):
        function: Any = {"lower": np.floor, "higher": np.ceil, "nearest": np.around}[method]
        return function((n - 1) * q)
    if method not in ("inverted_cdf", "closest_observation"):
        return None
    index = n * q - (1 if method == "inverted_cdf" else 1.5)
    before = np.floor(index)
    takes_next = index > before if method == "inverted_cdf" else (index != before) | (before % 2 != 1)
    return np.maximum(np.where(takes_next, before + 1, before), 0)


def _places(method: str, n: Any, q: Any) -> tuple[Any, Any, Any]:
    """Return the places of the elements before and after each quantile, and the share of the second; None for none."""
    whole = _whole_places(method, n, q)
    if whole is not None:
        return whole, whole, None
    if method in _BOUNDARIES:
        alpha, beta = _BOUNDARIES[method]
        virtual = n * q + (alpha + q * (1 - alpha - beta)) - 1
    elif method == "averaged_inverted_cdf":
        virtual = n * q - 1
    else:
        virtual = (n - 1) * q
        if virtual.dtype.kind in "iu" and method == "linear":
            return virtual, virtual, None
    if method == "midpoint":
        virtual = 0.5 * (np.floor(virtual) + np.ceil(virtual))
    before = np.floor(virtual)
    after = before + 1
    above, below = virtual >= n - 1, virtual < 0
    before, after = np.where(above, -1, before), np.where(above, -1, after)
    before, after = np.where(below, 0, before), np.where(below, 0, after)
    share = virtual - before
    if method == "averaged_inverted_cdf":
        share = np.where(share == 0, 0.5, 1.0)
    elif method == "midpoint":
        share = np.where(virtual % 1 == 0, 0.0, 0.5)
    return np.where(before < 0, n - 1, before), np.where(after < 0, n - 1, after), share.astype(virtual.dtype)


def _between(low: Any, high: Any, share: Any, is_weak: bool) -> Any:
    """Interpolate as NumPy does, from the nearer end."""
    difference, rest = high - low, 1 - share
    nearer_high = share >= 0.5
    if is_weak and low.dtype.kind == "f":
        share, rest = share.astype(low.dtype), rest.astype(low.dtype)
    return np.where(nearer_high, high - difference * rest, low + difference * share)


# ---- NumPy's functions


def _reduced(
    name: str,
    function: Callable[..., Any],
    a: DTensor,
    axis: Any,
    keepdims: bool,
    places: Callable[[Any], tuple[Any, Any, Any]],
    combined: Callable[[Any, Any, Any], Any],
    leading: tuple[int, ...] = (),
) -> DTensor:
    """Return order statistics over dimensions, with the dimensions `leading` before those that are kept.

    Args:
        name: The function of NumPy that the user calls.
        function: What computes them of a block: `function(block, axis=, keepdims=)`.
        a: The array.
        axis: The dimensions.
        keepdims: Whether they stay, with one row each.
        places: From the number of elements of each line, the places of the elements before and after, and the share.
        combined: The results from the elements before and after and the share.
        leading: The dimensions of the results of one line.
    """
    dims = reduced_dims(a.ndim, tuple(axis) if isinstance(axis, list) else axis)
    # NumPy says what it does not take.
    probe = np.zeros([0 if rows == 0 else 1 for rows in a.shape], a.dtype)
    with np.errstate(all="ignore"):
        made = function(probe, axis=dims if a.ndim else axis, keepdims=keepdims)
    a = resolved(a)
    kept = without_dims(a.layout.uncut(dims), dims, keepdims)
    if np.ndim(made) != len(leading) + kept.ndim:
        leading = ()  # as `np.nanquantile` of no elements
    result = ArrayLayout.of_cuts(
        leading + kept.shape, kept.mesh_shape, (None,) * len(leading) + kept.cuts, kept.pending
    )
    module, block = array_module(a.mesh), a.to_local()
    if 0 in a.shape:
        block = module.zeros(a.layout.uncut(dims).local_shape(coordinate_in(a.mesh)), a.dtype)
    shape = result.local_shape(coordinate_in(a.mesh))
    if 0 in shape:  # this rank holds no lines; NumPy cannot flatten some of these blocks
        return wrap(module.zeros(shape, np.asarray(made).dtype), result, a.mesh)
    if is_whole(a.layout, dims) or 0 in a.shape:
        values = function(block, axis=dims if a.ndim else None, keepdims=keepdims)
        # NumPy may choose another dtype where a line has NaN alone: that of other ranks' blocks.
        values = module.asarray(values).astype(np.asarray(made).dtype, copy=False)
        return wrap(values.reshape(shape), result, a.mesh)
    lines = module.moveaxis(block, dims, range(len(dims)))
    lines = lines.reshape(math.prod(lines.shape[: len(dims)]), math.prod(lines.shape[len(dims) :]))
    axes = tuple(sorted(at for dim in dims for at in a.layout.axes_of(dim) if a.mesh.shape[at] > 1))
    words = words_of(name, a.layout)
    values = _of_lines(function, lines, group_of(a.mesh, axes), module, places, combined, words)
    local = values.astype(np.asarray(made).dtype, copy=False)
    return wrap(local.reshape(shape), result, a.mesh)


def _of_lines(
    function: Callable[..., Any], lines: Any, group: ProcessGroup, module: Any, places: Any, combined: Any, words: str
) -> Any:
    """Return the statistics of lines, (results, lines); of what the ranks of the group hold together.

    The ranks compare `words`, which tell the operation and the layout of its array.
    """
    skips_nan = getattr(function, "skips_nan", False)
    is_float = lines.dtype.kind in "fc"
    counts = (~module.isnan(lines)).sum(axis=0) if is_float else module.full(lines.shape[1], len(lines), np.intp)
    told = module.stack([counts, module.full(lines.shape[1], len(lines), np.intp)])
    with group.hooks.comparing(words):
        group.all_reduce(told)
    held, total = (told.get() if hasattr(told, "get") else told)[:, None]
    before, after, share = places(held if skips_nan else total[:, :1])
    empty = held == 0 if skips_nan else held < total
    share = None if share is None else module.asarray(share)
    wanted = np.stack([before, after]).astype(np.intp)
    wanted = np.where(empty, -1, np.broadcast_to(wanted, (*wanted.shape[:2], lines.shape[1])))
    flat = wanted.reshape(-1, lines.shape[1])
    if lines.shape[1] == 1:
        line = lines[~module.isnan(lines)] if is_float else lines.reshape(-1)
        line, flat = narrowed(line, flat, int(held[0, 0]), group, module)
        lines, counts = line.reshape(-1, 1), module.full(1, len(line), np.intp)
    lines, flat = module.sort(lines, axis=0), module.asarray(np.ascontiguousarray(flat))
    low, high = selected(lines, counts, flat, group, module).reshape(wanted.shape)
    with np.errstate(all="ignore"):
        values = combined(low, high, share)
    if empty.any():
        values = module.where(module.asarray(empty), values.dtype.type(np.nan), values)
        if skips_nan:
            warn("All-NaN slice encountered", RuntimeWarning, stacklevel=5)
    return values


def _median(function: Any) -> None:
    name, skips_nan = f"np.{function.__name__}", "nan" in function.__name__

    def of_block(block: Any, **options: Any) -> Any:
        return _of_block(function, block, **options)

    of_block.skips_nan = skips_nan  # type: ignore[attr-defined]

    def combined(low: Any, high: Any, share: Any) -> Any:
        middle = np.stack([low, high]).mean(axis=0)
        return np.where(share, low.astype(middle.dtype), middle)

    @implements(function)
    def median(a: Any, axis: Any = None, out: Any = None, overwrite_input: bool = False, keepdims: Any = False) -> Any:
        del overwrite_input
        out = checked_out(name, out)
        a = as_operand(name, a, mesh_of(name, (a, out)))
        keepdims = keepdims is not NOT_GIVEN and bool(keepdims)
        places = lambda n: ((n - 1) // 2, n // 2, (n % 2).astype(bool))  # noqa: E731
        result = _reduced(name, of_block, a, axis, keepdims, places, combined)
        if out is not None:
            checked_out(name, out, result.shape)
        return written(name, result, out)


def _quantile(function: Any, hundred: bool) -> None:
    name, skips_nan = f"np.{function.__name__}", "nan" in function.__name__

    @implements(function)
    def quantile(
        a: Any,
        q: Any,
        axis: Any = None,
        out: Any = None,
        overwrite_input: bool = False,
        method: str = "linear",
        keepdims: Any = False,
        *,
        weights: Any = None,
        interpolation: Any = None,
    ) -> Any:
        del overwrite_input
        if weights is not None:
            return _weighted(function, name, (a, q, axis, out, method, keepdims), weights)
        method = method if interpolation is None else interpolation
        out = checked_out(name, out)
        a = as_operand(name, a, mesh_of(name, (a, out)))
        is_weak = type(q) in (int, float)
        of_all = np.asanyarray(q)
        keepdims = keepdims is not NOT_GIVEN and bool(keepdims)

        def of_block(block: Any, **options: Any) -> Any:
            wanted = q if of_all.ndim == 0 else of_all.reshape(-1)
            made = _of_block(function, block, wanted, method=method, **options)
            if of_all.ndim < 2:
                return made
            return made.reshape(of_all.shape + made.shape[1:]) if made.shape[:1] == (of_all.size,) else made

        of_block.skips_nan = skips_nan  # type: ignore[attr-defined]
        shares = (
            np.asanyarray(np.true_divide(q, a.dtype.type(100) if a.dtype.kind == "f" else 100)) if hundred else of_all
        )
        shares = shares.reshape(-1, 1)
        result = _reduced(
            name,
            of_block,
            a,
            axis,
            keepdims,
            lambda n: _places(method, n, shares),
            lambda low, high, share: low if share is None else _between(low, high, share, is_weak),
            of_all.shape,
        )
        if out is not None:
            checked_out(name, out, result.shape)
        return written(name, result, out)


def _of_block(function: Any, block: Any, *q: Any, **options: Any) -> Any:
    """Return order statistics of a block, a NumPy or CuPy array; what CuPy does not compute, of a copy on the CPU."""
    if isinstance(block, np.ndarray):
        return function(block, *q, **options)
    cupy = cupy_module()
    known = hasattr(cupy, function.__name__) and options.get("method", "linear") in _METHODS_OF_CUPY
    if not known or not block.size or not block.ndim:
        return cupy.asarray(function(block.get(), *q, **options))
    # It takes numbers, and arrays of its own.
    return function(block, *[number if np.ndim(number) == 0 else cupy.asarray(number) for number in q], **options)


def _weighted(function: Any, name: str, args: Any, weights: Any) -> DTensor:
    """Return weighted quantiles of lines that are whole on every rank; the weights are those of every element."""
    a, q, axis, out, method, keepdims = args
    mesh = mesh_of(name, (a, out, weights))
    a, weights = (resolved(as_operand(name, x, mesh)) for x in (a, weights))
    keepdims = keepdims is not NOT_GIVEN and bool(keepdims)
    dims = reduced_dims(a.ndim, tuple(axis) if isinstance(axis, list) else axis)
    if weights.shape != a.shape:
        if len(dims) != 1 or weights.shape != (a.shape[dims[0]],):
            raise TypeError(f"{name}: weights must have the shape {a.shape} of the array, or be those of one axis")
        weights = np.broadcast_to(weights.reshape([-1 if d == dims[0] else 1 for d in range(a.ndim)]), a.shape)
    source = a.layout.uncut(dims)
    why = "a weighted quantile needs whole lines"
    block, of_block = (require(name, x, source, why, what) for x, what in ((a, "x"), (weights, "weights")))
    options = {"axis": dims if a.ndim else axis, "method": method, "keepdims": keepdims}
    if 0 in a.shape:
        block, of_block = (np.ones(a.shape, x.dtype) for x in (a, weights))  # NumPy says what that is
    elif 0 in block.shape:
        block, of_block = (np.ones([max(rows, 1) for rows in block.shape], x.dtype) for x in (block, of_block))
    values = function(block, q, weights=of_block, **options)
    kept = without_dims(source, dims, keepdims)
    leading = np.shape(q)
    result = ArrayLayout.of_cuts(leading + kept.shape, kept.mesh_shape, (None,) * len(leading) + kept.cuts, {})
    local = array_module(mesh).asarray(values)[tuple(map(slice, result.local_shape(coordinate_in(mesh))))]
    return written(name, wrap(local, result, mesh), checked_out(name, out, result.shape))


_median(np.median)
_median(np.nanmedian)
for _function, _hundred in (
    (np.quantile, False),
    (np.percentile, True),
    (np.nanquantile, False),
    (np.nanpercentile, True),
):
    _quantile(_function, _hundred)
