"""Running reductions: `ufunc.accumulate` on the blocks; along a sharded dimension, an exscan of the blocks' totals."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.agreement import words_of
from meshdist.tensor.array_reductions import PENDING, REDUCE_OPS, identity_of, joined, without_nan
from meshdist.tensor.dispatch import implements, refuse
from meshdist.tensor.distribution import array_module
from meshdist.tensor.dtensor import wrap
from meshdist.tensor.index_keys import normalized
from meshdist.tensor.operands import as_operand, checked_out, mesh_of, require, written


@implements((None, "accumulate"))
def accumulate(ufunc: np.ufunc, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None) -> Any:
    """Reduce the rows up to each one of a dimension by `ufunc`; see `numpy.ufunc.accumulate`."""
    name = f"np.{ufunc.__name__}.accumulate"
    out = checked_out(name, out)
    mesh = mesh_of(name, (array, out))
    array = as_operand(name, array, mesh)
    layout = array.layout
    # NumPy says what it does not take.
    probe = np.zeros((1,) * array.ndim, array.dtype)
    made = ufunc.accumulate(probe, axis, dtype, None if out is None else np.empty(probe.shape, out.dtype))
    checked_out(name, out, layout.shape)
    dim = operator.index(axis) % array.ndim
    op = PENDING.get(ufunc)
    same = array.dtype == made.dtype or (array.dtype.kind in "fc" and made.dtype.kind in "fc")
    passes = same and set(layout.pending.values()) <= ({"sum", "avg"} if op == "sum" else {op})
    source = layout if passes else layout.resolved()
    axes = layout.axes_of(dim)
    if axes and ufunc not in REDUCE_OPS:
        axes, source = (), source.uncut((dim,))
    why = f"only an unsharded dimension can be accumulated by np.{ufunc.__name__}"
    block = array.to_local() if source is layout else require(name, array, source, why)
    buffer = None if out is None else array_module(mesh).empty(block.shape, out.dtype)
    if isinstance(block, np.ndarray):
        local = ufunc.accumulate(block, dim, dtype, buffer)
    elif ufunc in _NAMES:
        local = getattr(array_module(mesh), _NAMES[ufunc])(block, dim, made.dtype, buffer)
    else:
        refuse(f"{name} on {array_module(mesh).__name__}")
    if axes:
        local = _continued(local, ufunc, dim, axes, mesh, words_of(name, source))
    return written(name, wrap(local, source, mesh, array._origin if source.pending else None), out)


# CuPy's ufuncs do not accumulate.
_NAMES: dict[np.ufunc, str] = {np.add: "cumsum", np.multiply: "cumprod"}


def _continued(local: Any, ufunc: np.ufunc, dim: int, axes: tuple[int, ...], mesh: DeviceMesh, words: str) -> Any:
    """Combine every block's running reduction with those of the blocks before it, in place."""
    before: Any = None  # the reduction of the blocks before this one; None for none
    # The blocks along inner axes make one block along an outer axis: first those in the same outer block, then others.
    if local.shape[dim]:
        total = local[(slice(None),) * dim + (slice(-1, None),)]
    else:
        shape = (*local.shape[:dim], 1, *local.shape[dim + 1 :])
        total = array_module(mesh).full(shape, identity_of(ufunc, local.dtype), local.dtype)
    for axis in reversed(axes):
        prefix = _exscan(total, ufunc, axis, mesh, words)
        if mesh.get_local_rank(axis):
            before = prefix if before is None else ufunc(prefix, before)
        if axis != axes[0]:
            total = joined(total.copy(), ufunc, (axis,), mesh, words)
    if before is not None and local.size:
        ufunc(before, local, out=local)
    return local


def _exscan(total: Any, ufunc: np.ufunc, axis: int, mesh: DeviceMesh, words: str) -> Any:
    """Return the reduction of the totals of the ranks before this one along `axis`."""
    module = array_module(mesh)
    group, op = mesh.get_group(axis), REDUCE_OPS[ufunc]
    copied = module.ascontiguousarray(total).reshape(total.shape)
    if copied.dtype.kind != "c" or op is ReduceOp.SUM:
        copied = copied.copy()
        with group.hooks.comparing(words):
            group.exscan(copied, op)
        return copied
    every = module.empty((mesh.shape[axis], *copied.shape), copied.dtype)
    with group.hooks.comparing(words):
        group.all_gather_into_tensor(every, copied)
    rank = mesh.get_local_rank(axis)
    return ufunc.reduce(every[:rank], axis=0) if rank else copied


def _running(ufunc: np.ufunc) -> Callable[..., Any]:
    def function(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
        if not np.ndim(a):
            axis = 0 if axis is None else normalized(axis, 1)
        if np.ndim(a) == 0 or (axis is None and np.ndim(a) != 1):
            a = np.ravel(a)
        return accumulate(ufunc, a, 0 if axis is None else axis, dtype, out)

    return function


def _cumulative(function: Any, ufunc: np.ufunc) -> None:
    name = f"np.{function.__name__}"

    @implements(function)
    def cumulative(
        x: Any, /, *, axis: int | None = None, dtype: Any = None, out: Any = None, include_initial: bool = False
    ) -> Any:
        if include_initial:
            refuse(f"{name}(include_initial=True)")
        x = x if np.ndim(x) else np.ravel(x)
        if axis is None and np.ndim(x) != 1:
            raise ValueError("For arrays which have more than one dimension ``axis`` argument is required.")
        return accumulate(ufunc, x, axis or 0, dtype, out)


cumsum = implements(np.cumsum)(_running(np.add))
cumprod = implements(np.cumprod)(_running(np.multiply))
implements(np.nancumsum)(lambda a, *args, **kwargs: cumsum(without_nan(a, 0), *args, **kwargs))
implements(np.nancumprod)(lambda a, *args, **kwargs: cumprod(without_nan(a, 1), *args, **kwargs))
if hasattr(np, "cumulative_sum"):
    _cumulative(np.cumulative_sum, np.add)
    _cumulative(np.cumulative_prod, np.multiply)
