"""Reductions: `ufunc.reduce` on the blocks. Along a dimension that is sharded, the result is a pending reduction.

Where no placement stands for the reduction (bitwise ones, `fmax`, a product of complex numbers), the ranks along the
dimension reduce their results at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp, identity
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.runtime.plan_cache import remember
from meshdist.tensor.agreement import Origin, merged, origin_of, words_of
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import implements, refuse
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_space import States
from meshdist.tensor.operands import aligned, as_operand, checked_out, mesh_of, require, resolved, written

PENDING: dict[np.ufunc, str] = {
    np.add: "sum",
    np.multiply: "product",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_or: "max",
    np.logical_and: "min",
}
REDUCE_OPS: dict[np.ufunc, ReduceOp] = {
    **{ufunc: ReduceOp(op) for ufunc, op in PENDING.items()},
    np.bitwise_and: ReduceOp.BAND,
    np.bitwise_or: ReduceOp.BOR,
    np.bitwise_xor: ReduceOp.BXOR,
}
# Associative and commutative, but no reduction of the collectives.
_GATHERED = frozenset((np.fmax, np.fmin, np.logical_xor, np.gcd, np.lcm, np.hypot, np.logaddexp, np.logaddexp2))

NOT_GIVEN: Any = getattr(np, "_NoValue", None)


class _Plan(NamedTuple):
    """How to reduce arrays of one layout.

    Attributes:
        dims: The dimensions that are reduced.
        dtype: The result's.
        source: The layout that the array must have.
        result: The result's layout, with its pending reductions.
        joined: The mesh axes along which the ranks reduce their results at once.
        once: The mesh axes whose first rank alone begins with `initial`.
        origin: The result's, if it is a pending reduction along axes that shard the array.
    """

    dims: tuple[int, ...]
    dtype: np.dtype[Any]
    source: ArrayLayout
    result: ArrayLayout
    joined: tuple[int, ...]
    once: tuple[int, ...]
    origin: Origin


_plans: dict[tuple[Any, ...], _Plan] = {}


@implements((None, "reduce"))
def reduce(
    ufunc: np.ufunc,
    array: Any,
    axis: Any = 0,
    dtype: Any = None,
    out: Any = None,
    keepdims: bool = False,
    initial: Any = NOT_GIVEN,
    where: Any = True,
) -> Any:
    """Reduce dimensions of an array by `ufunc`; see `numpy.ufunc.reduce`."""
    if where is True and out is None and type(array) is DTensor:
        mesh, mask = array._mesh, None
    else:
        name = f"np.{ufunc.__name__}.reduce"
        out = checked_out(name, out)
        mesh = mesh_of(name, (array, out, where))
        array, mask = as_operand(name, array, mesh), None if where is True else as_operand(name, where, mesh)
    if axis is not None and type(axis) is not int:
        axis = hashable_axis(axis)
    has_initial = initial is not NOT_GIVEN
    layout, block = array._layout, array._local
    key: tuple[Any, ...] = (ufunc, layout, block.dtype, axis, dtype, keepdims, has_initial, initial is None)
    if mask is not None or out is not None:
        of_mask = None if mask is None else (mask.shape, mask.dtype)
        key = (*key, of_mask, None if out is None else (out.shape, out.dtype))
    plan = _plans.get(key)
    if plan is None:
        plan = _planned(ufunc, array, axis, dtype, out, keepdims, initial, mask)
        remember(_plans, key, plan)
    elif has_initial and initial is not None and not (type(initial) in (int, float) and plan.dtype.kind in "fc"):
        # Only some ranks begin with it, and all must raise for one that does not fit the dtype.
        _probed(ufunc, array, axis, dtype, out, keepdims, initial, mask)
    options: dict[str, Any] = {}
    if mask is not None:
        array, options["where"] = _masked(f"np.{ufunc.__name__}.reduce", array, mask)
        if array._layout is not layout:  # cut further, as the mask is
            plan = _planned(ufunc, array, axis, dtype, out, keepdims, initial, mask)
    if plan.source is not array._layout:
        why = f"only unsharded dimensions can be reduced by np.{ufunc.__name__}"
        block = require(f"np.{ufunc.__name__}.reduce", array, plan.source, why)
    else:
        block = array._local
    if has_initial and all(mesh.get_local_rank(at) == 0 for at in plan.once):
        options["initial"] = initial
        if initial is None and 0 in block.shape:
            options["initial"] = identity_of(ufunc, plan.dtype)
    elif ufunc.identity is None and (0 in block.shape or mask is not None):
        options["initial"] = identity_of(ufunc, plan.dtype)
    if out is not None:
        options["out"] = array_module(mesh).empty(plan.result.local_shape(coordinate_in(mesh)), out.dtype)
    if isinstance(block, np.ndarray):
        local = ufunc.reduce(block, axis=plan.dims, dtype=dtype, keepdims=keepdims, **options)
    else:
        local = reduced_by_name(array_module(mesh), ufunc, block, plan.dims, plan.dtype, keepdims, **options)
    if plan.joined:
        local = joined(local, ufunc, plan.joined, mesh, words_of(f"np.{ufunc.__name__}.reduce", plan.source))
    result = wrap(local, plan.result, mesh, plan.origin)
    if array._origin is not None and plan.result.pending:
        result._origin = merged(array._origin, plan.origin)
    return result if out is None else written(f"np.{ufunc.__name__}.reduce", result, out)


_NAMES: dict[np.ufunc, str] = {
    np.add: "sum",
    np.multiply: "prod",
    np.maximum: "max",
    np.minimum: "min",
    np.logical_or: "any",
    np.logical_and: "all",
}


def reduced_by_name(
    module: Any,
    ufunc: np.ufunc,
    block: Any,
    dims: tuple[int, ...],
    dtype: np.dtype[Any],
    keepdims: bool,
    initial: Any = NOT_GIVEN,
    where: Any = None,
    out: Any = None,
) -> Any:
    """Return what `ufunc.reduce` does by functions that CuPy has: its ufuncs reduce without `initial` and `where`."""
    if ufunc not in _NAMES:
        refuse(f"np.{ufunc.__name__}.reduce on {module.__name__}")
    dtype = dtype if out is None else out.dtype
    neutral = identity_of(ufunc, dtype)
    if ufunc not in (np.logical_or, np.logical_and):
        block = block.astype(dtype, copy=False)
    if where is not None:
        block = module.where(where, block, module.asarray(neutral, block.dtype))
    if 0 in block.shape:
        kept = [dim for dim in range(block.ndim) if keepdims or dim not in dims]
        made = module.full([1 if dim in dims else block.shape[dim] for dim in kept], neutral, dtype)
    else:
        made = getattr(module, _NAMES[ufunc])(block, axis=dims, keepdims=keepdims).astype(dtype, copy=False)
    if initial is not NOT_GIVEN and initial is not None:
        made = ufunc(made, module.asarray(initial, dtype))
    if out is not None:
        out[...] = made
    return made if out is None else out


def hashable_axis(axis: Any) -> Any:
    """Return `axis=` of a reduction as an integer, a tuple of them, or None.

    Raises:
        TypeError: `axis` is neither an integer nor a tuple of integers.
    """
    if axis is None:
        return None
    if isinstance(axis, tuple):
        return tuple(map(hashable_axis, axis))
    if isinstance(axis, bool):
        raise TypeError("an integer is required for the axis")
    return operator.index(axis)


def reduced_dims(ndim: int, axis: Any) -> tuple[int, ...]:
    """Return the dimensions that `axis=` of a reduction names, ascending.

    Raises:
        AxisError: There is no such dimension.
        TypeError: `axis` is neither an integer nor a tuple of integers.
        ValueError: A dimension is given twice.
    """
    return _reduced_dims(ndim, hashable_axis(axis))


@lru_cache(1000)
def _reduced_dims(ndim: int, axis: Any) -> tuple[int, ...]:
    kept = np.add.reduce(np.empty((0,) * ndim), axis=axis, keepdims=True)
    return tuple(dim for dim in range(ndim) if kept.shape[dim])


@lru_cache(10_000)
def without_dims(
    layout: ArrayLayout, dims: tuple[int, ...], keepdims: bool, pending: tuple[tuple[int, str], ...] = ()
) -> ArrayLayout:
    """Return the layout of an array of `layout` whose dimensions `dims` are reduced."""
    kept = [dim for dim in range(layout.ndim) if keepdims or dim not in dims]
    return ArrayLayout.of_cuts(
        tuple(1 if dim in dims else layout.shape[dim] for dim in kept),
        layout.mesh_shape,
        tuple(None if dim in dims else layout.cuts[dim] for dim in kept),
        dict(pending),
    )


def _planned(
    ufunc: np.ufunc, array: DTensor, axis: Any, dtype: Any, out: Any, keepdims: bool, initial: Any, mask: Any
) -> _Plan:
    layout = array.layout
    dims = reduced_dims(array.ndim, axis)
    result_dtype = _probed(ufunc, array, axis, dtype, out, keepdims, initial, mask)
    axes = tuple(sorted(at for dim in dims for at in layout.axes_of(dim)))
    op = PENDING.get(ufunc)
    if result_dtype.kind == "c" and op != "sum":
        op = None
    source = layout if _passes(op, layout, array.dtype, result_dtype, initial) else layout.resolved()
    if axes and op is None and ufunc not in REDUCE_OPS and ufunc not in _GATHERED:
        axes = ()
        source = source.with_cuts([None if dim in dims else cut for dim, cut in enumerate(source.cuts)])
    pending = source.pending | (dict.fromkeys(axes, op) if op else {})
    result = without_dims(source, dims, bool(keepdims), tuple(pending.items()))
    if out is not None:
        checked_out(f"np.{ufunc.__name__}.reduce", out, result.shape)
    origin = origin_of(source) if axes and op else None
    return _Plan(dims, result_dtype, source, result, () if op else axes, (*axes, *source.pending), origin)


def _probed(
    ufunc: np.ufunc, array: DTensor, axis: Any, dtype: Any, out: Any, keepdims: bool, initial: Any, mask: Any
) -> np.dtype[Any]:
    """Return the dtype of the result; raise what NumPy does for these arguments."""
    options: dict[str, Any] = {"axis": axis, "dtype": dtype, "keepdims": keepdims}
    if initial is not NOT_GIVEN:
        options["initial"] = initial
    if mask is not None:
        options["where"] = np.ones((), mask.dtype)
        if np.broadcast_shapes(array.shape, mask.shape) != array.shape:
            raise ValueError(
                f"np.{ufunc.__name__}.reduce: where= must broadcast to the shape {array.shape}, got {mask.shape}"
            )
    probe = np.zeros(array.shape if 0 in array.shape else (1,) * array.ndim, array.dtype)
    with np.errstate(all="ignore"):
        made: Any = ufunc.reduce(probe, **options)
        if out is not None:
            made = ufunc.reduce(probe, out=np.empty(made.shape, out.dtype), **options)
    dtype_of: np.dtype[Any] = made.dtype
    return dtype_of


def _passes(
    op: str | None, layout: ArrayLayout, dtype: np.dtype[Any], result_dtype: np.dtype[Any], initial: Any
) -> bool:
    """Return whether pending reductions need not be computed first: where the order of the two does not matter."""
    ops = set(layout.pending.values())
    if dtype != result_dtype and not (dtype.kind in "fc" and result_dtype.kind in "fc"):
        return not ops  # in a different dtype, integers would wrap otherwise
    if op == "sum" and initial in (NOT_GIVEN, None):
        return ops <= {"sum", "avg"}
    return ops <= {op}


def _masked(name: str, array: DTensor, mask: DTensor) -> tuple[DTensor, Any]:
    """Return an array and the block of its mask, both sharded the same way."""
    labels = [tuple(range(-x.ndim, 0)) for x in (array, mask)]
    blocks, alignment, mesh = aligned(name, (array, mask), labels, _of_first)
    target = alignment.targets[0]
    return wrap(blocks[0], target, mesh, array._origin if target.pending else None), blocks[1]


def _of_first(states: States) -> tuple[str, States] | None:
    return None if states[0] is None or states[1] is not None else (states[0], states)


def identity_of(ufunc: np.ufunc, dtype: np.dtype[Any]) -> Any:
    """Return what changes nothing that it is reduced with."""
    if ufunc is np.bitwise_and:  # NumPy's -1 fits no unsigned integer
        return identity(ReduceOp.BAND, dtype)
    if ufunc.identity is not None:
        return ufunc.identity
    if ufunc in (np.fmax, np.fmin) and dtype.kind in "fc":
        return np.nan
    if ufunc is np.lcm:
        return 1
    op = ReduceOp.MAX if ufunc in (np.maximum, np.fmax) else ReduceOp.MIN
    return identity(op, dtype) if dtype.kind != "c" else complex(*[identity(op, dtype.type(0).real.dtype)] * 2)


def joined(local: Any, ufunc: np.ufunc, axes: Sequence[int], mesh: DeviceMesh, words: str) -> Any:
    """Return the reduction by `ufunc` of what the ranks along `axes` of the mesh hold; may write into `local`.

    The ranks compare `words`, which tell the operation and the layout of its array.
    """
    module = array_module(mesh)
    op = REDUCE_OPS.get(ufunc)
    local = module.asarray(local)
    for axis in axes:
        group = mesh.get_group(axis)
        local = module.ascontiguousarray(local).reshape(local.shape)
        with group.hooks.comparing(words):
            if op is not None and (local.dtype.kind != "c" or op is ReduceOp.SUM):
                group.all_reduce(local, op)
                continue
            every = module.empty((mesh.shape[axis], *local.shape), local.dtype)
            group.all_gather_into_tensor(every, local)
        if module is np:
            local = np.asarray(ufunc.reduce(every, axis=0))
        else:
            local = reduced_by_name(module, ufunc, every, (0,), every.dtype, False)
    return local


# ---- By NumPy's names


def _with_dtype(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(
        a: Any,
        axis: Any = None,
        dtype: Any = None,
        out: Any = None,
        keepdims: Any = False,
        initial: Any = NOT_GIVEN,
        where: Any = True,
    ) -> Any:
        return reduce(ufunc, a, axis, dtype, out, keepdims is True or _flag(keepdims), initial, where)

    return function


def _without_dtype(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(
        a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, initial: Any = NOT_GIVEN, where: Any = True
    ) -> Any:
        return reduce(ufunc, a, axis, None, out, keepdims is True or _flag(keepdims), initial, where)

    return function


def _of_truth(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False, *, where: Any = True) -> Any:
        where = True if where is NOT_GIVEN else where
        return reduce(ufunc, a, axis, None, out, keepdims is True or _flag(keepdims), NOT_GIVEN, where)

    return function


def _flag(keepdims: Any) -> bool:
    return keepdims is not NOT_GIVEN and bool(keepdims)


sum_ = implements(np.sum)(_with_dtype(np.add))
implements(np.prod)(_with_dtype(np.multiply))
max_ = implements(np.max, np.amax)(_without_dtype(np.maximum))
min_ = implements(np.min, np.amin)(_without_dtype(np.minimum))
implements(np.any)(_of_truth(np.logical_or))
implements(np.all)(_of_truth(np.logical_and))


@implements(np.count_nonzero)
def count_nonzero(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    """Count the elements that are not zero; see `numpy.count_nonzero`."""
    return reduce(np.add, np.not_equal(a, 0), axis, np.intp, None, keepdims)


@implements(np.ptp)
def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Any:
    """Return the maximum less the minimum; see `numpy.ptp`."""
    most, least = (reduce(ufunc, a, axis, None, None, _flag(keepdims)) for ufunc in (np.maximum, np.minimum))
    return np.subtract(most, least) if out is None else np.subtract(most, least, out=out)


# ---- Without NaN


def without_nan(a: DTensor, fill: Any) -> DTensor:
    """Return the array with `fill` in place of every NaN; itself where its dtype has none."""
    if a.dtype.kind not in "fc":
        return a
    a = resolved(a)
    local = a.to_local().copy()
    local[np.isnan(local)] = fill
    return wrap(local, a.layout, a.mesh)


def _ignoring_nan(function: Callable[..., Any], fill: Any) -> Callable[..., Any]:
    return lambda a, *args, **kwargs: function(without_nan(a, fill), *args, **kwargs)


nansum = implements(np.nansum)(_ignoring_nan(sum_, 0))
implements(np.nanprod)(_ignoring_nan(_with_dtype(np.multiply), 1))


def _extremum_of_numbers(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(a: Any, *args: Any, **kwargs: Any) -> Any:
        from warnings import warn

        result = _without_dtype(ufunc)(a, *args, **kwargs)
        if result.dtype.kind in "fc" and bool(np.isnan(result.to_local()).any()):
            warn("All-NaN slice encountered", RuntimeWarning, stacklevel=2)
        return result

    return function


implements(np.nanmax)(_extremum_of_numbers(np.fmax))
implements(np.nanmin)(_extremum_of_numbers(np.fmin))
