"""Operands of an operation: brought to where it is local, or refused with what to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.profiler.tables import bytes_text
from meshdist.tensor.agreement import Origin, merged
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.dispatch import NUMBERS, may_redistribute
from meshdist.tensor.distribution import array_module, as_block
from meshdist.tensor.dtensor import DTensor, wrap
from meshdist.tensor.index_space import Alignment, Labels, Passes, align
from meshdist.tensor.known_calls import changes
from meshdist.tensor.moves import move
from meshdist.tensor.placements import PlacementError, placements_text
from meshdist.tensor.redistribution_search import plan


def refuse_plain_out(name: str, is_in_place: bool = False) -> NoReturn:
    """Raise for an `out=` that is no DTensor where an operand is one; or for a plain array changed in place."""
    if is_in_place:
        raise TypeError(
            f"{name}: an operator in place, such as y += x, would write a DTensor x into a plain array y; write"
            " y = y + x, which makes y a DTensor, or y += x.full()"
        )
    raise TypeError(
        f"{name}: out= must be a DTensor where an operand is one, as the result is; pass the whole arrays x.full() as"
        " operands to write into a plain array"
    )


STENCIL = (
    ". For a stencil, in which the arrays are shifted slices of one array, write it on the whole array with"
    " `meshdist.tensor.map_overlap(function, x, width)`, or on the block of `meshdist.tensor.halo(x, width)`: they send"
    " the rows at the edges of blocks alone"
)


_PRODUCTS = ("np.matmul", "np.dot", "np.linalg.matmul")
_SUMMA = (
    ". To keep both matrices sharded along both axes, write `meshdist.tensor.summa(a, b)`, which broadcasts a panel at"
    " a time"
)


def mesh_of(name: str, operands: Sequence[Any]) -> DeviceMesh:
    """Return the mesh of the DTensors among `operands`.

    Raises:
        TypeError: There are none: one is in another place than that of the operands.
        ValueError: They are on several meshes.
    """
    mesh: DeviceMesh | None = None
    for operand in operands:
        if isinstance(operand, DTensor) and operand.mesh is not mesh:
            if mesh is not None and operand.mesh != mesh:
                raise ValueError(
                    f"{name}: all arrays must be on one mesh, got x on {mesh!r} and y on {operand.mesh!r}; create both"
                    " on one mesh, or move one: y = distribute_tensor(y.full(), x.mesh, placements, src_data_rank=None)"
                )
            mesh = operand.mesh
    if mesh is None:
        raise TypeError(
            f"{name}: the array must be a DTensor where another argument is one; distribute_tensor converts an array"
        )
    return mesh


def layout_of(operand: Any, mesh: DeviceMesh) -> ArrayLayout:
    """Return the layout of an operand; an array or a number that is no DTensor is the same on every rank."""
    if isinstance(operand, DTensor):
        return operand.layout
    return ArrayLayout.of_cuts(np.shape(operand), mesh.shape, (None,) * np.ndim(operand), {})


def local_of(operand: Any, target: ArrayLayout, mesh: DeviceMesh) -> Any:
    """Return this rank's block of an operand in the layout `target`; a number stays a number.

    An array of the CPU beside blocks of GPUs is copied to these.
    """
    if isinstance(operand, DTensor):
        return operand._moved(target)
    if not target.pending and target.is_replicated:
        return operand if mesh.device_type == "cpu" or not isinstance(operand, np.ndarray) else as_block(operand, mesh)
    if isinstance(operand, NUMBERS):  # keeps its weak dtype
        alone = [(axis, op) for axis, op in target.pending.items() if op in ("sum", "product")]
        kept = all(mesh.get_local_rank(axis) == 0 for axis, _ in alone)
        changes.count += not kept
        return operand if kept else type(operand)(alone[0][1] == "product")
    return move(as_block(operand, mesh), layout_of(operand, mesh), target, mesh)


def origin_among(operands: Sequence[Any], layout: ArrayLayout) -> Origin:
    """Return the origin of a result of this layout, through which pending reductions among `operands` pass."""
    if not layout.pending:
        return None
    return merged(*[operand._origin for operand in operands if type(operand) is DTensor])


def may_pass(operands: Sequence[Any], dtype: Any) -> bool:
    """Return whether the pending reductions among `operands` may be computed after these become `dtype`.

    In integers a sum wraps where that of what they become in a different dtype would not, so the dtype must stay.
    Floats may become wider, or complex where the reduction is defined for that.
    """
    for operand in operands:
        if not isinstance(operand, DTensor) or not operand.layout.pending or operand.dtype == dtype:
            continue
        if operand.dtype.kind not in "fc" or dtype.kind not in "fc" or not np.can_cast(operand.dtype, dtype, "safe"):
            return False
        if dtype.kind == "c" and not set(operand.layout.pending.values()) <= {"sum", "avg"}:
            return False
    return True


def aligned(
    name: str,
    operands: Sequence[Any],
    labels: Sequence[Labels],
    passes: Passes | None = None,
    what: Sequence[str] = (),
) -> tuple[list[Any], Alignment, DeviceMesh]:
    """Return this rank's blocks of the operands as they have to lie for an operation to be local.

    Args:
        name: The operation, for messages.
        operands: DTensors, and arrays or numbers that are the same on every rank.
        labels: A label for every dimension of every operand; see `index_space`.
        passes: What pending reductions pass through; None: they are computed first.
        what: What messages call the operands; else "operand 0", "operand 1" and so on.

    Raises:
        PlacementError: Cuts do not fit, outside of `implicit_redistribution`.
    """
    mesh = mesh_of(name, operands)
    alignment = align(tuple([layout_of(operand, mesh) for operand in operands]), tuple(labels), passes)
    if alignment.conflicts and not may_redistribute.get():
        refuse_placements(name, operands, alignment, mesh, what=what)
    blocks = [local_of(operand, target, mesh) for operand, target in zip(operands, alignment.targets, strict=True)]
    return blocks, alignment, mesh


def refuse_placements(
    name: str,
    operands: Sequence[Any],
    alignment: Alignment,
    mesh: DeviceMesh,
    why: str = "the placements do not match",
    what: Sequence[str] = (),
) -> None:
    """Raise for operands whose placements do not match, with what to write and what that sends."""
    names = mesh.mesh_dim_names
    what = what or [f"operand {number}" for number in range(len(operands))]
    found = " and ".join(
        f"{called} is {layout_of(operand, mesh).describe(names)}"
        for called, operand in zip(what, operands, strict=True)
        if np.ndim(operand)
    )
    advice = " and ".join(
        redistribution_text(what[number], operands[number], alignment.targets[number]) for number in alignment.conflicts
    )
    stencil = not name.startswith("np.linalg.") and any(
        are_shifted(layout_of(operands[number], mesh), alignment.targets[number]) for number in alignment.conflicts
    )
    raise PlacementError(
        f"{name}: {why}: {found}. Call {advice}; or allow it within a `with"
        f" meshdist.tensor.implicit_redistribution():` block{STENCIL * stencil}"
        + (_SUMMA if name in _PRODUCTS and all(is_tiled(layout_of(x, mesh)) for x in operands) else "")
    )


def are_shifted(layout: ArrayLayout, other: ArrayLayout) -> bool:
    """Return whether the same axes cut a dimension into other blocks, as they do in slices that start elsewhere."""
    return any(
        cut is not None and new is not None and cut.axes == new.axes and cut.sizes != new.sizes
        for cut, new in zip(layout.cuts, other.cuts, strict=True)
    )


def is_tiled(layout: ArrayLayout) -> bool:
    """Return whether the first axis of a 2-d mesh shards the rows of a matrix, and the second one its columns."""
    return len(layout.mesh_shape) == layout.ndim == 2 and [layout.axes_of(dim) for dim in (0, 1)] == [(0,), (1,)]


def redistribution_text(what: str, array: DTensor, target: ArrayLayout) -> str:
    """Return the call that brings `array` to the layout `target`, and what it sends."""
    sent = sum(plan(array.layout, target).most_sent) * array.dtype.itemsize
    call = f"redistribute({placements_text(target.placements, array.mesh.mesh_dim_names)})"
    called = f"{what}.{call}" if what.isidentifier() else f"{call} on {what}"
    return f"{called}, which sends {bytes_text(sent)} per rank"


def require(
    name: str,
    array: DTensor,
    target: ArrayLayout,
    why: str,
    what: str = "x",
    may_be_shifted: bool = False,
    advised: ArrayLayout | None = None,
) -> Any:
    """Return this rank's block of `array` in the layout `target`, for an operation that needs it there.

    Computing pending reductions and splitting further are allowed; anything else needs `implicit_redistribution`.
    Messages say `why`, and call the array `what`; with `may_be_shifted` they name what to write for stencils, too. They
    advise the layout `advised` in place of the target, if it is given.

    Raises:
        PlacementError: What is sharded would have to move.
    """
    is_free = all(
        cut is None or len(cut.sizes) == 1 or (new is not None and cut.is_within(new, target.mesh_shape))
        for cut, new in zip(array.layout.cuts, target.cuts, strict=True)
    )
    if not is_free and not may_redistribute.get():
        raise PlacementError(
            f"{name}: {why}; {what} is {array.layout.describe(array.mesh.mesh_dim_names)}. Call"
            f" {redistribution_text(what, array, advised or target)}; or allow it within a `with"
            f" meshdist.tensor.implicit_redistribution():` block"
            f"{STENCIL * (may_be_shifted and are_shifted(array.layout, target))}"
        )
    return local_of(array, target, array.mesh)


def resolved(array: DTensor) -> DTensor:
    """Return the array without pending reductions; itself where it has none."""
    layout = array.layout
    if not layout.pending:
        return array
    target = layout.resolved()
    return wrap(array._moved(target), target, array.mesh)


def as_operand(name: str, operand: Any, mesh: DeviceMesh) -> DTensor:
    """Return an operand as a DTensor; what is none is the same on every rank."""
    if isinstance(operand, DTensor):
        return operand
    array = operand if hasattr(operand, "ndim") else np.asarray(operand)
    if array.dtype == object:
        raise TypeError(f"{name}: cannot combine a DTensor with {operand!r} ({type(operand).__name__})")
    return wrap(array_module(mesh).asarray(array), layout_of(array, mesh), mesh)


def checked_out(name: str, out: Any, shape: Sequence[int] | None = None) -> DTensor | None:
    """Return `out=` of a call, which a ufunc gets as a tuple.

    Raises:
        TypeError: No DTensor.
        ValueError: Of another shape than the result.
    """
    given = out[0] if isinstance(out, tuple) else out
    if given is None:
        return None
    if not isinstance(given, DTensor):
        refuse_plain_out(name)
    if shape is not None and given.shape != tuple(shape):
        raise ValueError(f"{name}: out= must have the shape {tuple(shape)} of the result, got {given.shape}")
    return given


def written(name: str, result: DTensor, out: DTensor | None, casting: Any = "same_kind") -> DTensor:
    """Return the result of an operation; where `out` is given, it gets the values and is returned.

    Raises:
        TypeError: The result's dtype is not one to cast to that of `out`.
        ValueError: `out` is on another mesh.
        PlacementError: What is sharded would have to move.
    """
    if out is None:
        return result
    mesh_of(name, (result, out))
    if not np.can_cast(result.dtype, out.dtype, casting):
        raise TypeError(f"{name}: cannot cast the result from {result.dtype} to the {out.dtype} of out=")
    where = out.layout.describe(out.mesh.mesh_dim_names)
    local = require(name, result, out.layout, f"out= is {where}", f"{name}(...)", may_be_shifted=True)
    out.to_local()[...] = local.astype(out.dtype, copy=False)
    out._origin = result._origin if out.layout.pending else None
    return out
