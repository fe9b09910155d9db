"""Ufuncs on DTensors: element by element, on the blocks, with `out=` and `where=`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.tensor.agreement import Origin
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import NUMBERS, implements, refuse
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_space import (
    Passes,
    additive,
    idempotent,
    linear_in_each,
    linear_in_first,
    trailing,
)
from meshdist.tensor.known_calls import remember_ufunc
from meshdist.tensor.operands import (
    aligned,
    as_operand,
    may_pass,
    mesh_of,
    origin_among,
    redistribution_text,
    refuse_plain_out,
    require,
)
from meshdist.tensor.placements import PlacementError

_PASSES: dict[np.ufunc, Passes] = {
    np.add: additive,
    np.subtract: additive,
    np.multiply: linear_in_each,
    np.true_divide: linear_in_first,
    np.negative: linear_in_first,
    np.positive: linear_in_first,
    np.conjugate: linear_in_first,
    np.deg2rad: linear_in_first,
    np.rad2deg: linear_in_first,
    np.radians: linear_in_first,
    np.degrees: linear_in_first,
    np.maximum: idempotent("max"),
    np.minimum: idempotent("min"),
}


@implements((None, "__call__"))
def call(
    ufunc: np.ufunc,
    *inputs: Any,
    out: tuple[Any, ...] | None = None,
    where: Any = True,
    **kwargs: Any,
) -> Any:
    """Compute `ufunc` on the blocks of its operands, which are aligned as in broadcasting."""
    name = f"np.{ufunc.__name__}"
    if ufunc.signature is not None:
        refuse(name)
    outs = tuple(given for given in out or () if given is not None)
    if any(not isinstance(given, DTensor) for given in outs):
        refuse_plain_out(name, outs[0] is inputs[0])
    masked = where is not True
    # A masked call leaves what is in `out`, which is an operand then.
    operands = (*inputs, *((where, *outs) if masked else ()))
    operands = tuple(x if isinstance(x, (DTensor, *NUMBERS)) else _array(x, name) for x in operands)
    if outs and mesh_of(name, (*operands, *outs)) and not any(isinstance(x, DTensor) for x in operands):
        operands = (as_operand(name, operands[0], outs[0].mesh), *operands[1:])
    shapes = [np.shape(x) for x in operands]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        found = " ".join(map(str, shapes))
        raise ValueError(f"{name}: operands could not be broadcast together with shapes {found}") from None
    changed = (
        "out="
        if not outs or outs[0] is not inputs[0]
        else "operand 0, which y += x changes in place (y = y + x makes a new array),"
    )
    for given in outs:
        if given.shape != shape:
            raise ValueError(f"{name}: {changed} must have the shape {shape} of the result, got {given.shape}")
    if ufunc is np.power and not masked and not kwargs and 0 not in shape:
        _check_power(*operands)
    passes = None if masked else _passes(ufunc, operands, kwargs)
    what = (*(f"operand {number}" for number in range(ufunc.nin)), "where=", *["out="] * len(outs)) if masked else ()
    blocks, alignment, mesh = aligned(name, operands, [trailing(x) for x in operands], passes, what)
    layout = ArrayLayout.of_cuts(shape, mesh.shape, alignment.cuts_of(range(-len(shape), 0)), alignment.pending)
    if not kwargs and not masked:
        remember(ufunc, operands, layout, alignment.targets)
    origin = origin_among(operands, layout)
    if not outs:
        results = ufunc(*blocks[: ufunc.nin], **kwargs, **({"where": blocks[ufunc.nin]} if masked else {}))
        if any(result.dtype.hasobject for result in (results if isinstance(results, tuple) else (results,))):
            raise TypeError(f"{name}: the result would be an array of objects; use x.full() or x.to_local()")
        return _wrapped(results, layout, mesh, origin)
    return _into(ufunc, name, blocks, layout, out or (), changed, kwargs, masked, mesh, origin)


def _check_power(base: Any, exponent: Any) -> None:
    """Raise on all ranks for integers to negative integers, which NumPy finds out where a block has elements.

    What is not known on all ranks is left to NumPy: the elements of a DTensor.
    """
    if isinstance(exponent, (DTensor, float, complex)) or not isinstance(base, (DTensor, int, np.ndarray, np.generic)):
        return
    if _dtype_of(np.power, _known(base), _known(exponent)).kind in "iu" and np.less(exponent, 0).any():
        raise ValueError("np.power: Integers to negative integer powers are not allowed.")


def _array(operand: Any, name: str) -> Any:
    array = operand if hasattr(operand, "ndim") else np.asarray(operand)
    if array.dtype == object:
        raise TypeError(f"{name}: cannot combine a DTensor with {operand!r} ({type(operand).__name__})")
    return array


def _passes(ufunc: np.ufunc, operands: tuple[Any, ...], kwargs: dict[str, Any]) -> Passes | None:
    """Return what pending reductions pass through in this call.

    The dtype of the result is asked for, on every rank, since it says what the parts of a reduction become.
    A factor must be finite: an infinity times the parts of a sum would give NaN where the whole sum has a sign.
    """
    rule = _PASSES.get(ufunc)
    pending = [x for x in operands if isinstance(x, DTensor) and x.layout.pending]
    if rule is None or not pending or kwargs:
        return None
    dtype = _dtype_of(ufunc, *[_known(x) for x in operands])
    if not may_pass(pending, dtype):
        return None
    if ufunc in (np.multiply, np.true_divide):
        factors = [x for x in operands if x is not pending[0]]
        if not all(_is_finite_factor(x, ufunc is np.true_divide, dtype) for x in factors):
            return None
    return rule


def _known(operand: Any) -> Any:
    """Return what the dtype of a result follows from: a dtype, or a Python number.

    Of integers the value is kept: one that the dtype cannot hold raises, on every rank.
    """
    if hasattr(operand, "dtype"):
        return operand.dtype
    return operand if isinstance(operand, int) else type(operand)(1)


@lru_cache(1000, typed=True)
def _dtype_of(ufunc: np.ufunc, *operands: Any) -> Any:
    return ufunc(*[np.empty(0, x) if isinstance(x, np.dtype) else x for x in operands]).dtype


def _is_finite_factor(factor: Any, divides: bool, dtype: Any) -> bool:
    """Return whether it is known on all ranks that `factor`, or a division by it, is finite in this dtype."""
    if isinstance(factor, (*NUMBERS, np.number)) or (isinstance(factor, np.ndarray) and factor.ndim == 0):
        with np.errstate(over="ignore"):
            known = np.asarray(factor, dtype)
        return bool(np.isfinite(known)) and not (divides and known == 0)
    return factor.dtype.kind in "biu" and not divides


def remember(ufunc: np.ufunc, operands: tuple[Any, ...], layout: ArrayLayout, targets: tuple[ArrayLayout, ...]) -> None:
    """Let the operators skip all this next time, if the blocks were used as they are."""
    layouts: list[ArrayLayout | None] = []
    for operand, target in zip(operands, targets, strict=True):
        if isinstance(operand, DTensor):
            if operand.layout is not target or target.pending:
                return
            layouts.append(target)
        elif isinstance(operand, NUMBERS):
            layouts.append(None)
        else:
            return
    if ufunc.nout == 1:
        remember_ufunc(ufunc, layouts, layout)


def _wrapped(results: Any, layout: ArrayLayout, mesh: DeviceMesh, origin: Origin) -> Any:
    if isinstance(results, tuple):
        return tuple(wrap(result, layout, mesh, origin) for result in results)
    return wrap(results, layout, mesh, origin)


def _into(
    ufunc: np.ufunc,
    name: str,
    blocks: list[Any],
    layout: ArrayLayout,
    out: tuple[Any, ...],
    changed: str,
    kwargs: dict[str, Any],
    masked: bool,
    mesh: DeviceMesh,
    origin: Origin,
) -> Any:
    """Compute into the blocks of `out`; where they lie otherwise than the result, move it there."""
    inputs = blocks[: ufunc.nin]
    masks = {"where": blocks[ufunc.nin]} if masked else {}
    if all(given is not None and given.layout is layout for given in out):
        ufunc(*inputs, out=tuple(given.to_local() for given in out), **masks, **kwargs)
        for given in out:
            given._origin = origin
        return out[0] if len(out) == 1 else out
    if masked:
        given = next(given for given in out if given is not None and given.layout is not layout)
        names = mesh.mesh_dim_names
        raise PlacementError(
            f"{name}: with where=, out= must have the placements of the result, which is {layout.describe(names)};"
            f" out= is {given.layout.describe(names)}. Write out ="
            f" {redistribution_text('out', given, layout)}, before the call"
        )
    results = ufunc(*inputs, **kwargs)
    returned = []
    for result, given in zip(results if isinstance(results, tuple) else (results,), out, strict=True):
        made = wrap(result, layout, mesh, origin)
        if given is None:
            returned.append(made)
            continue
        why = f"{changed} is {given.layout.describe(mesh.mesh_dim_names)}"
        local = require(name, made, given.layout, why, "the result", may_be_shifted=True)
        np.copyto(given.to_local(), local, casting=kwargs.get("casting", "same_kind"))
        given._origin = origin if given.layout.pending else None
        returned.append(given)
    return returned[0] if len(returned) == 1 else tuple(returned)
