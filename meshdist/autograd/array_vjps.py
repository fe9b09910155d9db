"""Vector-Jacobian products of operations on DTensors and CuPy's arrays, where those of HIPS autograd would not do.

Those of autograd are for arrays in the host's memory: they fill zeros of the shape of the whole array, write into them,
or walk the elements. Here the gradient of what takes elements is what puts them back, and that of a reduction is a
broadcast.
All the others are autograd's: they compute with functions of NumPy, which DTensors and CuPy have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import autograd.numpy as anp
import numpy as np
from autograd.core import primitive_vjps
from autograd.extend import defvjp, primitive
from autograd.numpy import numpy_wrapper
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.numpy.numpy_vjps import match_complex, unbroadcast
from autograd.tracer import getval, trace_primitives_map

from meshdist.autograd.array_moves import _local, _redistributed, _whole, block_of, from_block, settled
from meshdist.autograd.device_arrays import added_at, new_zeros
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.array_creation import zeros
from meshdist.tensor.array_layout import ArrayLayout, Cut
from meshdist.tensor.dtensor import DTensor, coordinate_in, wrap
from meshdist.tensor.index_keys import normalized

_parse_einsum_input = numpy_wrapper._parse_einsum_input

Vjp = Callable[[Any], Any]
Maker = Callable[..., Vjp]
# By primitive: functions `(result, *args, **kwargs)` for the gradients of the positional arguments.
_makers: dict[Any, tuple[Maker | None, ...]] = {}
# By primitive: functions as those in `autograd.core.primitive_vjps`.
_of_all: dict[Any, Callable[..., Any]] = {}
# Their gradients only rearrange, repeat and add: a pending sum may stay so.
_LINEAR = {
    anp.add, anp.subtract, anp.negative, anp.sum, anp.reshape, anp.ravel, anp.transpose, anp.swapaxes, anp.moveaxis,
    anp.expand_dims, anp.squeeze, anp.concatenate_args, anp.real, anp.broadcast_to, numpy_wrapper._astype,
    _redistributed, _local, _whole, from_block, block_of,
}  # fmt: skip


def maker_for_arrays(fun: Any) -> Callable[..., Callable[[Any], Any]] | None:
    """Return what makes the vector-Jacobian product of a primitive that takes or returns such arrays, or None.

    It is called as those in `autograd.core.primitive_vjps`.
    """
    own = _makers.get(fun)
    inner = _of_all.get(fun, primitive_vjps.get(fun))
    if own is not None:
        inner = partial(_of_each, getattr(fun, "__name__", ""), own)
    if inner is None:
        return None
    linear = fun in _LINEAR

    def make(argnums: Sequence[int], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = inner(argnums, result, args, kwargs)
        if not hasattr(result, "placements"):
            return made
        layout, mesh = result.layout, result.mesh
        return lambda g: made(settled(g, layout, mesh, linear))

    return make


def _of_each(
    name: str,
    makers: tuple[Maker | None, ...],
    argnums: Sequence[int],
    result: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    chosen = [makers[number] if number < len(makers) else None for number in argnums]
    if None in chosen:
        raise NotImplementedError(f"{name} has no gradient for argument {argnums[chosen.index(None)]}")
    vjps = [maker(result, *args, **kwargs) for maker in chosen if maker is not None]
    return lambda g: [vjp(g) for vjp in vjps]


def _define(fun: Any, *makers: Maker | None) -> None:
    assert getattr(fun, "_is_autograd_primitive", False), f"{fun} is no primitive"
    _makers[fun] = makers


def _fitted(target: Any, pull: Vjp) -> Vjp:
    """Return `pull` with its result added up to the shape of `target`, an operand that was broadcast."""
    meta = anp.metadata(target)
    return lambda g: unbroadcast(pull(g), meta)


# ---- Element by element

_define(anp.tanh, lambda result, x: lambda g: g * (1 - result * result))
_define(anp.sqrt, lambda result, x: lambda g: g * 0.5 / result)


def _power_base(result: Any, x: Any, y: Any) -> Vjp:
    if isinstance(y, (int, float)):
        return lambda g: g * (y * x ** (y - 1)) if y else g * 0
    return _fitted(x, lambda g: g * y * x ** anp.where(y == 0, 1.0, y - 1))


def _power_exponent(result: Any, x: Any, y: Any) -> Vjp:
    base = anp.where(x == 0, 1.0, x) if hasattr(x, "shape") else x or 1.0
    return _fitted(y, lambda g: g * anp.log(base) * result)


_define(anp.power, _power_base, _power_exponent)
_define(
    trace_primitives_map[np.where],  # anp.where is a function around it
    None,
    lambda result, c, x, y: _fitted(x, lambda g: anp.where(c, g, 0)),
    lambda result, c, x, y: _fitted(y, lambda g: anp.where(c, 0, g)),
)


def _clip(result: Any, x: Any, a_min: Any = None, a_max: Any = None, **kwargs: Any) -> Vjp:
    # The keywords of NumPy 2.1.
    low, high = kwargs.get("min", a_min), kwargs.get("max", a_max)

    def pull(g: Any) -> Any:
        for bound in (low, high):
            if bound is not None:
                g = g * (result != bound)
        return g

    return _fitted(x, pull)


_define(anp.clip, _clip)


# ---- Reductions


def expanded(g: Any, shape: Sequence[int], axis: Any, keepdims: Any) -> Any:
    """Return the gradient of a reduction over `axis`, repeated along what was reduced."""
    if not shape:
        return g
    if not keepdims:
        g = anp.expand_dims(g, _axes(axis, len(shape)))
    return anp.broadcast_to(g, tuple(shape))


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(normalized(dim, ndim) for dim in (axis if isinstance(axis, (tuple, list)) else (axis,)))


def _count(x: Any, axis: Any) -> int:
    return math.prod(x.shape[dim] for dim in _axes(axis, x.ndim))


def _sum(result: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Vjp:
    shape = x.shape
    return lambda g: match_complex(x, expanded(g, shape, axis, keepdims))


def _mean(result: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Vjp:
    shape, count = x.shape, _count(x, axis)
    return lambda g: expanded(g / count, shape, axis, keepdims)


def _prod(result: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = False) -> Vjp:
    return lambda g: expanded(g * result, x.shape, axis, keepdims) / x


def _var(
    result: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: Any = False
) -> Vjp:
    count = _count(x, axis) - ddof

    def pull(g: Any) -> Any:
        deviation = anp.conj(x - anp.mean(x, axis=axis, keepdims=True))
        return expanded(g * (2.0 / count), x.shape, axis, keepdims) * deviation

    return pull


def _std(
    result: Any, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: Any = False
) -> Vjp:
    of_var = _var(result, x, axis, dtype, out, ddof, keepdims)
    return lambda g: of_var(g / (2 * anp.where(result == 0, 1.0, result)))


def _chosen(result: Any, x: Any, axis: Any = None, out: Any = None, keepdims: Any = False) -> Vjp:
    """Return the gradient of a maximum or minimum; elements that tie get equal shares."""

    def pull(g: Any) -> Any:
        is_chosen = x == expanded(result, x.shape, axis, keepdims)
        shares = is_chosen / anp.sum(is_chosen, axis=axis, keepdims=True)
        return expanded(g, x.shape, axis, keepdims) * shares

    return pull


def _cumsum(result: Any, x: Any, axis: int | None = None, dtype: Any = None, out: Any = None) -> Vjp:
    dim = 0 if axis is None else axis

    def pull(g: Any) -> Any:
        return anp.reshape(anp.sum(g, axis=dim, keepdims=True) - anp.cumsum(g, axis=dim) + g, x.shape)

    return pull


_define(anp.sum, _sum)
_define(numpy_wrapper._primitive_mean, _mean)
_define(anp.prod, _prod)
_define(numpy_wrapper._primitive_var, _var)
_define(numpy_wrapper._primitive_std, _std)
_define(anp.cumsum, _cumsum)
for _extreme in {anp.max, anp.min, anp.amax, anp.amin}:
    _define(_extreme, _chosen)
_define(anp.broadcast_to, lambda result, x, shape, *_: _fitted(x, lambda g: g))
_define(anp.expand_dims, lambda result, x, axis: lambda g: anp.reshape(g, x.shape))
_define(anp.squeeze, lambda result, x, axis=None: lambda g: anp.reshape(g, x.shape))
_define(anp.reshape, lambda result, x, *_, order="C", **__: lambda g: anp.reshape(g, x.shape, order=order))
_define(anp.ravel, lambda result, x, order="C": lambda g: anp.reshape(g, x.shape, order=order))
_define(anp.nan_to_num, lambda result, x, *_, **__: lambda g: g * anp.isfinite(x))


# ---- Products


def _tensordot(argnum: int, result: Any, a: Any, b: Any, axes: Any = 2) -> Vjp:
    ndims = np.ndim(a), np.ndim(b)
    if np.ndim(axes) == 0:
        summed = [list(range(ndims[0] - int(axes), ndims[0])), list(range(int(axes)))]
    else:
        summed = [[int(dim) % ndim for dim in np.atleast_1d(dims)] for dims, ndim in zip(axes, ndims, strict=True)]
    kept = [[dim for dim in range(ndim) if dim not in dims] for dims, ndim in zip(summed, ndims, strict=True)]
    other = 1 - argnum
    split = len(kept[0])
    # The dims of g come from `a`, then `b`; what is left has those of the argument that are kept, and the summed ones,
    # which are in the order of the other argument's dims.
    theirs = list(range(split, len(kept[0]) + len(kept[1]))) if argnum == 0 else list(range(split))
    order = sorted(range(len(summed[other])), key=lambda at: summed[other][at])
    dims = [*kept[argnum], *(summed[argnum][at] for at in order)]
    back = [dims.index(dim) for dim in range(ndims[argnum])]

    def pull(g: Any) -> Any:
        product = anp.tensordot(g, (a, b)[other], (theirs, kept[other]))
        return match_complex((a, b)[argnum], anp.transpose(product, back))

    return pull


def _dot(argnum: int, result: Any, a: Any, b: Any) -> Vjp:
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        other = (b, a)[argnum]
        return _fitted((a, b)[argnum], lambda g: match_complex((a, b)[argnum], g * other))
    return _tensordot(argnum, result, a, b, ([np.ndim(a) - 1], [max(0, np.ndim(b) - 2)]))


def _inner(argnum: int, result: Any, a: Any, b: Any) -> Vjp:
    if np.ndim(a) == 0 or np.ndim(b) == 0:
        return _dot(argnum, result, a, b)
    return _tensordot(argnum, result, a, b, ([np.ndim(a) - 1], [np.ndim(b) - 1]))


def _einsum(argnums: Sequence[int], result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    subscripts, *operands = args
    if not isinstance(subscripts, str):
        raise NotImplementedError("subscripts must be a string")
    probes = [np.empty((0,) * np.ndim(x)) for x in operands]
    inputs, output, _ = _parse_einsum_input((subscripts, *probes))
    labels = inputs.split(",")
    return lambda g: [_einsum_of(number - 1, g, labels, output, operands) for number in argnums]


def _einsum_of(at: int, g: Any, labels: list[str], output: str, operands: list[Any]) -> Any:
    mine, x = labels[at], operands[at]
    if len(set(mine)) < len(mine):
        raise TypeError(f"einsum has no gradient for an operand with a label twice: {mine!r}")
    others = [
        (label, other) for number, (label, other) in enumerate(zip(labels, operands, strict=True)) if number != at
    ]
    known = set(output).union(*(label for label, _ in others))
    # A label of this operand alone is summed over: its gradient is repeated along it.
    alone = [dim for dim, label in enumerate(mine) if label not in known]
    left = "".join(label for label in mine if label in known)
    made = anp.einsum(
        ",".join([output, *(label for label, _ in others)]) + "->" + left, g, *(other for _, other in others)
    )
    for dim in alone:
        made = anp.expand_dims(made, dim)
    return match_complex(x, anp.broadcast_to(unbroadcast(made, anp.metadata(x)), x.shape))


def _vdot(argnum: int, result: Any, a: Any, b: Any) -> Vjp:
    if argnum == 0:
        return lambda g: match_complex(a, anp.conj(g) * anp.reshape(b, np.shape(a)))
    return lambda g: match_complex(b, g * anp.reshape(anp.conj(a), np.shape(b)))


def _outer(argnum: int, result: Any, a: Any, b: Any) -> Vjp:
    if argnum == 0:
        return lambda g: match_complex(a, anp.reshape(anp.matmul(g, anp.ravel(b)), np.shape(a)))
    return lambda g: match_complex(b, anp.reshape(anp.matmul(anp.ravel(a), g), np.shape(b)))


for _product, _maker in ((anp.tensordot, _tensordot), (anp.dot, _dot), (anp.inner, _inner)):
    _define(_product, partial(_maker, 0), partial(_maker, 1))
_of_all[anp.einsum] = _einsum
_define(anp.vdot, partial(_vdot, 0), partial(_vdot, 1))
_define(anp.outer, partial(_outer, 0), partial(_outer, 1))


# ---- What takes elements


@primitive
def put_back(g: DTensor, shape: tuple[int, ...], layout: ArrayLayout, positions: Any) -> DTensor:
    """Return an array of zeros to which the elements of `g` are added.

    Args:
        g: The elements.
        shape: The shape of the result.
        layout: The layout of what they were taken from.
        positions: Where they were in that array, flattened: an array of the shape of `g`, a DTensor or a plain one.
    """
    mesh, placements = g.mesh, g.layout.resolved().placements
    g = g.redistribute(placements)
    if isinstance(positions, DTensor):
        places = positions.redistribute(placements).to_local()
    else:
        places = positions[g.index]
    block = added_at((math.prod(shape),), places.ravel(), g.to_local().ravel())
    pending = _pending_along(g.layout.cuts)
    whole = ArrayLayout.of_cuts(shape, layout.mesh_shape, (None,) * len(shape), pending)
    return wrap(block.reshape(shape), whole, mesh)


def _pending_along(cuts: Sequence[Cut | None]) -> dict[int, str]:
    """Return the pending sums of what each rank along the axes of these cuts computes from its own block."""
    return dict.fromkeys(sorted(axis for cut in cuts if cut is not None for axis in cut.axes), "sum")


@primitive
def put_rows(g: DTensor, shape: tuple[int, ...], dim: int, rows: Any) -> DTensor:
    """Return an array of zeros to which the rows of `g` are added.

    Args:
        g: The rows, in the dimensions of `rows` in place of dimension `dim`.
        shape: The shape of the result.
        dim: The dimension that the rows are along.
        rows: Where they belong: an array of integers, the same on all ranks, or a DTensor.
    """
    mesh, layout = g.mesh, g.layout.resolved()
    g = g.redistribute(layout.placements)
    inner = slice(dim, dim + rows.ndim)
    if isinstance(rows, DTensor):
        target = ArrayLayout.of_cuts(rows.shape, layout.mesh_shape, layout.cuts[inner], {})
        places = rows.redistribute(target.placements).to_local()
    else:
        places = rows[g.index[inner]]
    cuts = (*layout.cuts[:dim], None, *layout.cuts[dim + rows.ndim :])
    made = ArrayLayout.of_cuts(shape, layout.mesh_shape, cuts, _pending_along(layout.cuts[inner]))
    block = added_at(made.local_shape(coordinate_in(mesh)), (slice(None),) * dim + (places,), g.to_local())
    return wrap(block, made, mesh)


@primitive
def put_elements(g: Any, shape: tuple[int, ...], key: Any) -> Any:
    """Return a CuPy array of zeros to which the elements of `g` are added where `key` names them."""
    if not _is_basic(key):
        return added_at(shape, key, g)
    made = new_zeros(shape, g)
    made[key] = g
    return made


def _is_basic(key: Any) -> bool:
    """Return whether an index names no element twice, as slices, numbers, and masks do."""
    entries = key if isinstance(key, tuple) else (key,)
    return all(not isinstance(part, list) and getattr(part, "dtype", np.bool_) == np.bool_ for part in entries)


def _taking(fun: Callable[..., Any], result: Any, x: Any, *args: Any, **kwargs: Any) -> Vjp:
    """Return the gradient of a function that takes elements of `x`, once, several times, or not at all."""

    def pull(g: Any) -> Any:
        if not hasattr(x, "layout"):
            places = fun(np.arange(x.size, like=getval(x)).reshape(x.shape), *args, **kwargs)
            return anp.reshape(put_elements(anp.ravel(g), (x.size,), places.ravel()), x.shape)
        return put_back(g, tuple(x.shape), x.layout, _positions(fun, x, args, kwargs))

    return pull


def _positions(fun: Callable[..., Any], x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole = np.arange(x.size).reshape(x.shape)
    others = [*args, *kwargs.values()]
    inside = [other for arg in others for other in (arg if isinstance(arg, (tuple, list)) else (arg,))]
    if any(isinstance(other, DTensor) for other in inside):
        layout = ArrayLayout.of_cuts(x.shape, x.layout.mesh_shape, (None,) * x.ndim, {})
        return fun(wrap(whole, layout, x.mesh), *args, **kwargs)
    return fun(whole, *args, **kwargs)


@primitive
def put_slice(g: DTensor, key: Any, layout: ArrayLayout, mesh: DeviceMesh) -> DTensor:
    """Return an array of zeros of this layout in which `key` names the elements of `g`."""
    made: DTensor = zeros(layout.shape, dtype=g.dtype, mesh=mesh, placements=layout.resolved().placements)
    made[key] = g
    return made


def _item(result: Any, x: Any, key: Any) -> Vjp:
    if not hasattr(x, "layout"):
        return lambda g: put_elements(g, x.shape, key)
    entries = key if isinstance(key, tuple) else (key,)
    if all(not hasattr(entry, "ndim") and not isinstance(entry, list) for entry in entries):
        return lambda g: put_slice(g, key, x.layout, x.mesh)
    arrays = [at for at, entry in enumerate(entries) if not isinstance(entry, slice) or entry != slice(None)]
    if len(arrays) == 1 and _is_rows(entries[arrays[0]]):
        return _take(result, x, entries[arrays[0]], arrays[0])
    return _taking(lambda array, key: array[key], result, x, key)


def _is_rows(entry: Any) -> bool:
    return hasattr(entry, "ndim") and entry.ndim > 0 and entry.dtype.kind in "iu"


def _take(result: Any, x: Any, indices: Any, axis: int | None = None, *args: Any, **kwargs: Any) -> Vjp:
    if axis is None or args or kwargs or not _is_rows(indices):
        return _taking(np.take, result, x, indices, axis, *args, **kwargs)
    shape, dim = tuple(x.shape), normalized(axis, x.ndim)
    if not hasattr(x, "layout"):
        return lambda g: put_elements(g, shape, (slice(None),) * dim + (indices,))
    return lambda g: put_rows(g, shape, dim, indices)


def _sort(result: Any, x: Any, axis: int | None = -1, *_: Any, **__: Any) -> Vjp:
    order = anp.argsort(x, axis, kind="stable")
    if axis is None:
        return _taking(lambda array, order: np.reshape(array, -1)[order], result, x, order)
    return _taking(lambda array, order: np.take_along_axis(array, order, axis), result, x, order)


defvjp(put_slice, lambda result, g, key, layout, mesh: lambda h: h[key])
defvjp(put_elements, lambda result, g, shape, key: lambda h: h[key])
defvjp(put_back, lambda result, g, shape, layout, positions: lambda h: anp.reshape(h, -1)[positions])
defvjp(put_rows, lambda result, g, shape, dim, rows: lambda h: h[(slice(None),) * dim + (rows,)])
_define(ArrayBox.__getitem__, _item)
_define(anp.take, _take)
_define(anp.sort, _sort)
for _function in ("take_along_axis", "diagonal", "repeat", "tile", "flip", "flipud", "fliplr", "roll"):
    _define(getattr(anp, _function), partial(_taking, getattr(np, _function)))
