"""Functions of NumPy, other than ufuncs, that compute each element from those of its place."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, cast

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import NUMBERS, implements
from meshdist.tensor.distribution import array_module, check_supported
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.elementwise import call
from meshdist.tensor.index_space import Passes, States, anything, linear_in_first, together
from meshdist.tensor.indexing import nonzero
from meshdist.tensor.known_calls import localizes, on_blocks
from meshdist.tensor.operands import aligned, checked_out, local_of, may_pass, origin_among, written


def _by_element(name: str, operands: Sequence[Any], passes: Passes | None, compute: Any) -> DTensor:
    """Return what `compute` makes of the blocks of operands that are broadcast."""
    operands = [x if hasattr(x, "ndim") or isinstance(x, NUMBERS) else np.asarray(x) for x in operands]
    shape = np.broadcast_shapes(*map(np.shape, operands))
    labels = [tuple(range(-np.ndim(x), 0)) for x in operands]
    blocks, alignment, mesh = aligned(name, operands, labels, passes)
    layout = ArrayLayout.of_cuts(shape, mesh.shape, alignment.cuts_of(range(-len(shape), 0)), alignment.pending)
    return wrap(compute(*blocks), layout, mesh, origin_among(operands, layout))


# ---- Copies, and other dtypes


@implements(np.copy)
def copy(a: DTensor, order: str = "K", subok: bool = False) -> DTensor:
    """Return a copy, placed alike."""
    del subok
    return wrap(a.to_local().copy(order), a.layout, a.mesh, a._origin)


@implements("astype")
def astype(
    x: DTensor, dtype: Any, order: str = "K", casting: str = "unsafe", subok: bool = True, copy: bool = True
) -> DTensor:
    """Return the array in a different dtype; see `numpy.ndarray.astype`.

    A pending reduction passes from a float dtype to a wider one, and is computed before it is narrowed or rounded.
    """
    del subok
    dtype = np.dtype(dtype)
    if dtype.kind not in "biufc":
        check_supported(dtype, "astype: the result")
    if not np.can_cast(x.dtype, dtype, casting):  # type: ignore[arg-type]
        np.empty((), x.dtype).astype(dtype, casting=casting)  # type: ignore[call-overload]  # raises
    layout = x.layout
    if not may_pass([x], dtype):
        layout = layout.resolved()
    if not copy and dtype == x.dtype:
        return x
    local = local_of(x, layout, x.mesh).astype(dtype, order=order)
    return wrap(local, layout, x.mesh, origin_among([x], layout))


if hasattr(np, "astype"):

    @implements(np.astype)
    def _astype(x: DTensor, dtype: Any, /, *, copy: bool = True, device: Any = None) -> DTensor:
        del device
        return astype(x, dtype, copy=copy)


def _passing(function: Any, passes: Passes | None) -> None:
    """Register a function of one array that computes on the blocks, and what pending reductions pass through."""
    name = f"np.{function.__name__}"

    @implements(function)
    def computed(a: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        out = kwargs.pop("out", None)
        if args and isinstance(args[-1], DTensor):
            *args, out = args  # type: ignore[assignment]
        rule = anything if function is np.real and a.dtype.kind != "c" else passes
        result = _by_element(name, [a], rule, lambda block: function(block, *args, **kwargs))
        return written(name, result, checked_out(name, out, result.shape))

    on_blocks(function)


for _function, _rule in (
    (np.real, linear_in_first),
    (np.imag, linear_in_first),
    (np.angle, None),
    (np.round, None),
    (np.around, None),
    (np.fix, None),
    (np.sinc, None),
    (np.i0, None),
    (np.isreal, None),
    (np.iscomplex, None),
    (np.isposinf, None),
    (np.isneginf, None),
):
    _passing(_function, _rule)


def _with_tables(function: Any, position: int) -> None:
    """Register a function of an array and of plain arrays, which are the same on all ranks."""
    name = f"np.{function.__name__}"

    @implements(function)
    def computed(*args: Any, **kwargs: Any) -> DTensor:
        x = args[position]
        if any(isinstance(given, DTensor) for given in (*args[:position], *args[position + 1 :], *kwargs.values())):
            raise TypeError(
                f"{name}: only the array x may be a DTensor; pass the others as plain arrays, by their full()"
            )
        module = array_module(x.mesh)
        tables = [arg if arg is x or not np.ndim(arg) else module.asarray(arg) for arg in args]
        compute = lambda block: function(*tables[:position], block, *tables[position + 1 :], **kwargs)  # noqa: E731
        return _by_element(name, [x], None, compute)

    on_blocks(function)


_with_tables(np.interp, 0)
_with_tables(np.digitize, 0)
_with_tables(np.polyval, 1)


@implements(np.nan_to_num)
def nan_to_num(x: DTensor, copy: bool = True, nan: float = 0.0, posinf: Any = None, neginf: Any = None) -> DTensor:
    """Return the array with numbers for NaN and infinities; see `numpy.nan_to_num`."""
    result = _by_element("np.nan_to_num", [x], None, lambda b: np.nan_to_num(b, True, nan, posinf, neginf))
    if copy:
        return result
    x[...] = result
    return x


# ---- Choosing


_clip: Any = (np._core if hasattr(np, "_core") else np.core).umath.clip


@implements(np.clip)
def clip(
    a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None, **kwargs: Any
) -> DTensor:
    """Return the values limited to an interval; see `numpy.clip`."""
    low, high = (min if a_min is None else a_min), (max if a_max is None else a_max)
    a = a if hasattr(a, "dtype") else np.asarray(a)
    if a.dtype.kind in "iu":  # a Python number beyond all that the dtype has is no bound, and not one to convert
        known = np.iinfo(a.dtype)
        low = None if type(low) is int and low <= known.min else low
        high = None if type(high) is int and high >= known.max else high
    if out is not None:
        kwargs["out"] = (out,)
    if low is None:
        result = call(np.positive, a, **kwargs) if high is None else call(np.minimum, a, high, **kwargs)
    else:
        result = call(np.maximum, a, low, **kwargs) if high is None else call(_clip, a, low, high, **kwargs)
    return cast(DTensor, result)


@implements(np.where)
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """Return the elements of `x` where a condition is true and those of `y` elsewhere; see `numpy.where`.

    Of a condition alone, return the indices where it is true, as `numpy.nonzero` does.
    """
    if x is None and y is None:
        return nonzero(condition)
    if x is None or y is None:
        raise ValueError("np.where: either both or neither of x and y should be given")
    x, y = _typed(x), _typed(y)
    dtype = np.where(np.empty(0, bool), _empty(x), _empty(y)).dtype
    return _by_element("np.where", [condition, x, y], _chosen if may_pass([x, y], dtype) else None, np.where)


def _empty(x: Any) -> Any:
    return np.empty(0, x.dtype) if hasattr(x, "dtype") else x


def _typed(x: Any) -> Any:
    return x if hasattr(x, "dtype") or isinstance(x, NUMBERS) else np.asarray(x)


def _chosen(states: States) -> tuple[str, States] | None:
    """Pass through what takes elements of operands as the first of them says."""
    passed = None if states[0] else together(states[1:])
    return None if passed is None else (passed[0], (None, *passed[1]))


@implements(np.select)
def select(condlist: Sequence[Any], choicelist: Sequence[Any], default: Any = 0) -> DTensor:
    """Return elements of the first choice whose condition is true; see `numpy.select`."""
    if len(condlist) != len(choicelist):
        raise ValueError("list of cases must be same length as list of conditions")
    if not condlist:
        raise ValueError("select with an empty condition list is not possible")
    for number, condition in enumerate(condlist):
        if condition.dtype.kind != "b":
            raise TypeError(f"invalid entry {number} in condlist: should be boolean ndarray")
    cases = len(condlist)
    return _by_element(
        "np.select",
        [*condlist, *choicelist, default],
        None,
        lambda *blocks: np.select(list(blocks[:cases]), list(blocks[cases:-1]), blocks[-1]),
    )


def _triangle(function: Any) -> None:
    @implements(function)
    def triangle(m: Any, k: int = 0) -> DTensor:
        k = index(k)  # an unsigned one of NumPy would overflow
        if m.ndim == 0:
            function(np.zeros((), m.dtype), k)  # raises
        if m.ndim == 1:
            m = np.broadcast_to(m, m.shape * 2)
        layout = m.layout if set(m.layout.pending.values()) <= {"sum", "avg"} else m.layout.resolved()
        block = local_of(m, layout, m.mesh)
        rows, columns = m.index[-2:]
        return wrap(function(block, k + rows.start - columns.start), layout, m.mesh, origin_among([m], layout))

    @localizes(function)
    def alike(result: DTensor, m: Any, *args: Any, **kwargs: Any) -> Any:
        if m.ndim < 2 or m.layout is not result.layout:
            return None
        rows, columns = m.index[-2:]
        return lambda block, k=0: function(block, index(k) + rows.start - columns.start)


_triangle(np.tril)
_triangle(np.triu)

on_blocks(np.copy, np.clip, np.where, np.select)


@localizes(np.nan_to_num)
def _copied_numbers(result: DTensor, x: Any, copy: bool = True, *args: Any, **kwargs: Any) -> Any:
    return np.nan_to_num if copy else None
