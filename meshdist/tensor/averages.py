"""Averages, deviations and covariances. A mean is a pending sum; a deviation computes it first."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast
from warnings import warn

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.array_reductions import NOT_GIVEN, nansum, reduce, reduced_dims
from meshdist.tensor.dispatch import implements, may_redistribute, refuse
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.index_parts import uncut
from meshdist.tensor.index_space import trailing
from meshdist.tensor.operands import aligned, as_operand, checked_out, mesh_of, require, resolved, written

# Whether NumPy takes one row with rowvar=False as one observation, as since 2.3, or as one variable.
_TRANSPOSES_A_ROW = np.cov(np.zeros((1, 2)), rowvar=False, ddof=0).ndim == 2


def _given(value: Any, default: Any) -> Any:
    return default if value is NOT_GIVEN else value


def _mask(name: str, where: Any, a: DTensor) -> Any:
    """Return `where` as a mask of the shape of `a`, sharded where one of them is; True for none."""
    if where is True or where is NOT_GIVEN:
        return True
    mask = as_operand(name, where, a.mesh)
    if np.broadcast_shapes(a.shape, mask.shape) != a.shape:
        raise ValueError(f"{name}: where= must broadcast to the shape {a.shape}, got {mask.shape}")
    module = array_module(a.mesh)
    like = wrap(module.broadcast_to(module.zeros((), bool), a.to_local().shape), a.layout.resolved(), a.mesh)
    (shaped, block), alignment, mesh = aligned(name, (like, mask), (trailing(like), trailing(mask)))
    return wrap(module.broadcast_to(block, shaped.shape), alignment.targets[0], mesh)


def _count(a: DTensor, axis: Any, keepdims: bool, mask: Any) -> Any:
    """Return the number of elements that are averaged: an integer, or of a mask an array without pending sums."""
    if mask is True:
        return math.prod([a.shape[dim] for dim in reduced_dims(a.ndim, axis)])
    return resolved(reduce(np.add, mask, axis, np.intp, None, keepdims))


def _is_any(count: Any, condition: Callable[[Any], Any]) -> bool:
    return bool(condition(count.to_local()).any() if isinstance(count, DTensor) else condition(count))


def _divided(total: DTensor, count: Any) -> DTensor:
    """Return `total`, divided in place by a number or by an array that is sharded the same way."""
    total = total if total.dtype.kind in "fc" else resolved(total)
    local = total.to_local()
    divisor = count.to_local() if isinstance(count, DTensor) else count
    np.true_divide(local, divisor, out=local, casting="unsafe")
    return total


def _cast(array: DTensor, dtype: Any) -> DTensor:
    return wrap(array.to_local().astype(dtype), array.layout, array.mesh)


@implements(np.mean)
def mean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """Return the mean over dimensions, as a pending sum where they are sharded; see `numpy.mean`."""
    a = as_operand("np.mean", a, mesh_of("np.mean", (a, out, where)))
    out, keepdims, axis = checked_out("np.mean", out), _given(keepdims, False), _checked_axis(a, axis)
    mask = _mask("np.mean", where, a)
    count = _count(a, axis, keepdims, mask)
    if _is_any(count, lambda number: number == 0):
        warn("Mean of empty slice", RuntimeWarning, stacklevel=2)
    is_half = dtype is None and a.dtype == np.float16
    if dtype is None:
        dtype = np.float64 if a.dtype.kind in "biu" else np.float32 if is_half else None if out is None else out.dtype
    result = _divided(reduce(np.add, a, axis, dtype, None, keepdims, NOT_GIVEN, mask), count)
    if out is not None:
        checked_out("np.mean", out, result.shape)
    return written("np.mean", _cast(resolved(result), np.float16) if is_half else result, out, "unsafe")


def _checked_axis(a: DTensor, axis: Any) -> Any:
    """Return `axis`; raise as NumPy's averages do, but not its sums, for a dimension of an array without dimensions."""
    return normalized(axis, 0) if not a.ndim and axis is not None and not isinstance(axis, tuple) else axis


def _variance(
    name: str, a: Any, axis: Any, dtype: Any, out: Any, ddof: Any, keepdims: Any, where: Any, mean: Any, correction: Any
) -> DTensor:
    """Return the variance, and above it the mean: in two passes, as NumPy does."""
    keepdims = _given(keepdims, False)
    if correction is not NOT_GIVEN:
        if ddof != 0:
            raise ValueError("ddof and correction can't be provided simultaneously.")
        ddof = correction
    a = resolved(as_operand(name, a, mesh_of(name, (a, out, where))))
    axis, mask = _checked_axis(a, axis), _mask(name, where, a)
    count = _count(a, axis, keepdims, mask)
    if _is_any(count, lambda number: ddof >= number):
        warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=3)
    if dtype is None and a.dtype.kind in "biu":
        dtype = np.float64
    if mean is NOT_GIVEN or mean is None:
        number = count if mask is True or keepdims else _count(a, axis, True, mask)
        # The whole sum is divided, as NumPy does: parts that are divided are rounded, and equal elements would vary.
        mean = _divided(resolved(reduce(np.add, a, axis, dtype, None, True, NOT_GIVEN, mask)), number)
    mean = as_operand(name, mean, a.mesh)
    (block, center), alignment, mesh = aligned(name, (a, mean), (trailing(a), trailing(mean)))
    deviation = block - center
    if deviation.dtype.kind == "c":
        squared = deviation.real**2 + deviation.imag**2
    else:
        squared = np.square(deviation)
    total = reduce(np.add, wrap(squared, alignment.targets[0], mesh), axis, dtype, None, keepdims, NOT_GIVEN, mask)
    if isinstance(count, DTensor):
        return _divided(total, np.maximum(count.to_local() - ddof, 0))
    return _divided(total, max(count - ddof, 0))


def _of_deviations(name: str, finish: Callable[[DTensor], DTensor]) -> Callable[..., Any]:
    def function(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        ddof: Any = 0,
        keepdims: Any = False,
        *,
        where: Any = True,
        mean: Any = NOT_GIVEN,
        correction: Any = NOT_GIVEN,
    ) -> Any:
        out = checked_out(name, out)
        result = finish(_variance(name, a, axis, dtype, out, ddof, keepdims, where, mean, correction))
        if out is not None:
            checked_out(name, out, result.shape)
        return written(name, result, out, "unsafe")

    return function


def _root(variance: DTensor) -> DTensor:
    computed = resolved(variance)
    root = np.sqrt(computed.to_local()).astype(computed.dtype, copy=False)
    return wrap(root, computed.layout, computed.mesh)


# A variance is a pending sum along the cuts of what it reduces; its root is none.
implements(np.var)(_of_deviations("np.var", lambda variance: variance))
implements(np.std)(_of_deviations("np.std", _root))


@implements(np.nanmean)
def nanmean(
    a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True
) -> Any:
    """Return the mean of the elements that are numbers; see `numpy.nanmean`."""
    a = as_operand("np.nanmean", a, mesh_of("np.nanmean", (a, out, where)))
    if a.dtype.kind not in "fc":
        return mean(a, axis, dtype, out, keepdims, where=where)
    out, keepdims, a = checked_out("np.nanmean", out), _given(keepdims, False), resolved(a)
    mask = _mask("np.nanmean", where, a)
    held = ~np.isnan(a)
    count = _count(a, axis, keepdims, held if mask is True else held & mask)
    result = _divided(nansum(a, axis, dtype, None, keepdims, where=mask), count)
    if out is not None:
        checked_out("np.nanmean", out, result.shape)
    if _is_any(count, lambda number: number == 0):
        warn("Mean of empty slice", RuntimeWarning, stacklevel=2)
    return written("np.nanmean", result, out)


@implements(np.average)
def average(a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *, keepdims: Any = NOT_GIVEN) -> Any:
    """Return the weighted average over dimensions, and with `returned` the sum of the weights; see `numpy.average`."""
    mesh = mesh_of("np.average", (a, weights))
    a, keepdims = as_operand("np.average", a, mesh), _given(keepdims, False)
    dims = reduced_dims(a.ndim, _checked_axis(a, axis))
    if weights is None:
        result = mean(a, axis, keepdims=keepdims)
        if not returned:
            return result
        scale = result.dtype.type(a.size / result.size)
        whole = array_module(mesh).full(result.to_local().shape, scale)
        return result, wrap(whole, result.layout.resolved(), mesh)
    weights = as_operand("np.average", weights, mesh)
    listed = tuple(dim % a.ndim for dim in (axis if isinstance(axis, tuple) else (axis,))) if axis is not None else dims
    if weights.shape == a.shape:
        listed = tuple(range(a.ndim))
    elif axis is None:
        raise TypeError("Axis must be specified when shapes of a and weights differ.")
    elif weights.shape != tuple(a.shape[dim] for dim in listed):
        raise ValueError("Shape of weights must be consistent with shape of a along specified axis.")
    dtype = np.result_type(a.dtype, weights.dtype, *((np.float64,) if a.dtype.kind in "biu" else ()))
    (block, factor), alignment, _ = aligned(
        "np.average", (a, weights), (tuple(range(a.ndim)), listed), what=("a", "weights")
    )
    factor = factor.transpose(tuple(int(at) for at in np.argsort(listed)))
    factor = factor.reshape([block.shape[dim] if dim in listed else 1 for dim in range(a.ndim)])
    layout = alignment.targets[0]
    spread = wrap(np.broadcast_to(factor, block.shape), layout, mesh)
    scale = reduce(np.add, spread, dims, dtype, None, keepdims) if a.ndim else spread
    scale = resolved(scale)
    zeros = reduce(np.logical_or, wrap(scale.to_local() == 0, scale.layout, mesh), None)
    if bool(zeros):
        raise ZeroDivisionError("Weights sum to zero, can't be normalized")
    product = wrap(np.multiply(block, factor, dtype=dtype), layout, mesh)
    result = _divided(reduce(np.add, product, dims, None, None, keepdims), scale)
    return (result, scale) if returned else result


def _of_numbers(name: str, of_all: Any) -> Any:
    """Return a deviation that leaves NaN out: they are masked."""

    def function(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        ddof: Any = 0,
        keepdims: Any = False,
        **kwargs: Any,
    ) -> Any:
        a = as_operand(name, a, mesh_of(name, (a, out)))
        if a.dtype.kind in "fc":
            where = kwargs.pop("where", True)
            kwargs["where"] = ~np.isnan(a) if where is True or where is NOT_GIVEN else ~np.isnan(a) & where
            reduced_dims(a.ndim, axis)
            axis = axis if a.ndim else None  # as in NumPy's sums, of which these are made
        return of_all(a, axis, dtype, out, ddof, keepdims, **kwargs)

    return function


implements(np.nanvar)(_of_numbers("np.nanvar", np.var))
implements(np.nanstd)(_of_numbers("np.nanstd", np.std))


@implements(np.cov)
def cov(
    m: Any,
    y: Any = None,
    rowvar: bool = True,
    bias: bool = False,
    ddof: int | None = None,
    fweights: Any = None,
    aweights: Any = None,
    *,
    dtype: Any = None,
) -> DTensor:
    """Return the covariances of variables, a pending sum where the observations are sharded; see `numpy.cov`."""
    if fweights is not None or aweights is not None:
        refuse("np.cov(fweights=, aweights=)")
    if ddof is not None and ddof != int(ddof):
        raise ValueError("ddof must be integer")
    mesh = mesh_of("np.cov", (m, y))
    arrays = [as_operand("np.cov", x, mesh) for x in (m, y) if x is not None]
    if any(x.ndim > 2 for x in arrays):
        raise ValueError(f"{'m' if arrays[0].ndim > 2 else 'y'} has more than 2 dimensions")
    by_column = [
        not rowvar and x.ndim == 2 and (x.shape[0] != 1 or (x is arrays[0] and _TRANSPOSES_A_ROW)) for x in arrays
    ]
    for what, x, turned in zip("my", arrays, by_column, strict=False):
        if x.ndim == 2 and not may_redistribute.get():  # else the product moves them
            uncut("np.cov", x, (int(turned),), "the variables must not be sharded", what)
    dtype = np.result_type(*arrays, np.float64) if dtype is None else dtype
    rows: list[Any] = []
    for x, turned in zip(arrays, by_column, strict=True):
        made: Any = np.atleast_2d(resolved(x).astype(dtype))
        rows.append(made.T if turned else made)
    observed: Any = rows[0] if len(rows) == 1 else np.concatenate(rows, 0)
    if observed.shape[0] == 0:
        return wrap(array_module(mesh).zeros((0, 0)), ArrayLayout.of_cuts((0, 0), mesh.shape, (None, None), {}), mesh)
    number = observed.shape[1] - (ddof if ddof is not None else 0 if bias else 1)
    if number <= 0:
        warn("Degrees of freedom <= 0 for slice", RuntimeWarning, stacklevel=2)
    centered = observed - _divided(resolved(reduce(np.add, observed, 1, keepdims=True)), max(observed.shape[1], 1))
    product: Any = centered @ centered.T.conj()
    scaled = product * np.true_divide(1, max(number, 0)) if number > 0 else resolved(product) / 0.0
    return cast(DTensor, np.squeeze(scaled))


@implements(np.corrcoef)
def corrcoef(x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None) -> DTensor:
    """Return the correlation coefficients of variables; see `numpy.corrcoef`."""
    covariances: Any = resolved(cov(x, y, rowvar, dtype=dtype))
    if not covariances.ndim:
        return cast(DTensor, covariances / covariances)
    layout, mesh = covariances.layout, covariances.mesh
    whole: Any = wrap(
        require("np.corrcoef", covariances, layout.uncut((0, 1)), "it divides by the diagonal"),
        layout.uncut((0, 1)),
        mesh,
    )
    local = whole.to_local()
    deviations = np.sqrt(np.diagonal(local).real)
    made = local / deviations[:, None] / deviations[None, :]
    np.clip(made.real, -1, 1, out=made.real)
    if made.dtype.kind == "c":
        np.clip(made.imag, -1, 1, out=made.imag)
    return wrap(made, whole.layout, mesh)
