"""Agreement of the ranks about layouts: they compare them, in words, in the collectives that operations make anyway.

A pending reduction no longer shows what it was computed from: sums of `Shard(0)` and of `Shard(1)` are both `Partial`.
Such an array keeps the layouts that it was computed from as its origin, which is compared when it is redistributed.

At debug level DETAIL, the ranks also meet to compare what sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias, TypeGuard

from meshdist.collectives.barrier import barrier
from meshdist.debug.debug_level import shows_all_frames
from meshdist.groups.process_group import ProcessGroup
from meshdist.mesh.device_mesh import DeviceMesh
from meshdist.runtime.context import resolve
from meshdist.tensor.array_layout import ArrayLayout
from meshdist.tensor.placements import GIVEN_SIZES, Placement, Shard, placements_text

Origin: TypeAlias = "tuple[str, ...] | None"
"""The layouts, in words, that a pending reduction was computed from; None for an array that is none, or was given."""

_MOST_LAYOUTS = 64  # of an origin: a sum of ever new arrays that is never computed would have more and more


@lru_cache(10_000)
def words_of(operation: str, *layouts: ArrayLayout) -> str:
    """Return the words that ranks compare in a collective of an operation on arrays of these layouts."""
    return f"in {operation} of {' and '.join(map(described, layouts))}"


@lru_cache(10_000)
def with_origin(words: str, origin: Origin) -> str:
    """Return the words that ranks compare of an array with an origin."""
    return words if origin is None else f"{words}, computed from {' and '.join(origin)}"


def described(layout: ArrayLayout) -> str:
    """Return a layout in words, without the sizes of blocks that results have, and the rows of their dimension.

    Those of `x[mask]` and of slices vary from call to call, and ever new words would be compared in every call; they
    are equal on all ranks, other than those that users pass.
    """
    varying = {placement.dim for placement in layout.placements if _has_sizes(placement)}
    if not varying:
        return f"{placements_text(layout.placements, None)} of {layout.shape}"
    placements = ", ".join(
        f"Shard({placement.dim}, sizes=...)" if _has_sizes(placement) else repr(placement)
        for placement in layout.placements
    )
    rows = ", ".join("..." if dim in varying else str(extent) for dim, extent in enumerate(layout.shape))
    return f"[{placements}] of ({rows}{',' * (layout.ndim == 1)})"


def _has_sizes(placement: Placement) -> TypeGuard[Shard]:
    return isinstance(placement, Shard) and placement.sizes is not None and placement.sizes not in GIVEN_SIZES


# ---- Origins


@lru_cache(10_000)
def origin_of(*layouts: ArrayLayout) -> Origin:
    """Return the origin of what is computed from arrays of these layouts: those that are sharded."""
    return tuple(dict.fromkeys(described(layout) for layout in layouts if any(layout.cuts))) or None


def merged(*origins: Origin) -> Origin:
    """Return the origin of what is computed from arrays with these origins."""
    found = None
    for origin in origins:
        if origin is not None and origin is not found:
            found = origin if found is None else _union(found, origin)
    return found


@lru_cache(10_000)
def _union(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))[:_MOST_LAYOUTS]


def inherited(result: Any, kind: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, after its pending reductions got the origins of those among the arguments.

    Args:
        result: An array of type `kind`, a tuple or list of such, or anything else.
        kind: The type of DTensors.
        args: The arguments; tuples and lists may have arrays, in any nesting.
        kwargs: Those by name.
    """
    if type(result) is kind:
        if result._layout.pending:
            origin = _merged_of(args, kind, result._origin)
            result._origin = _merged_of(kwargs.values(), kind, origin) if kwargs else origin
    elif isinstance(result, (tuple, list)):
        for each in result:
            inherited(each, kind, args, kwargs)
    return result


def _merged_of(values: Iterable[Any], kind: Any, origin: Origin) -> Origin:
    """Return an origin, merged with those of arrays among `values`."""
    for value in values:
        of = type(value)
        if of is kind:
            if value._origin is not None and value._origin is not origin:
                origin = merged(origin, value._origin)
        elif of is tuple or of is list:
            origin = _merged_of(value, kind, origin)
    return origin


# ---- At debug level DETAIL


def comparing_group(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group of the ranks of a mesh if they compare all that they do, as at debug level DETAIL; else None.

    Ranks that are threads have one debug level, and set it one after another: the group knows whether its rank has.
    """
    if mesh.size() == 1 or mesh.get_coordinate() is None or not shows_all_frames():
        return None
    group = resolve(mesh)
    assert isinstance(group, ProcessGroup)
    return group if group.compares_shapes else None


def compare(group: ProcessGroup, name: str, words: str) -> None:
    """Compare a call with those of the other ranks before it is made.

    Observers of the group do not see it: the accounts and profiles of a program are the same at every debug level.

    Raises:
        DistBackendError: A rank makes another call; on all ranks, with the calls and their lines.
    """
    ProcessGroup.submit(group, _comparison(name, words), None, None)


@lru_cache(1000)
def _comparison(name: str, words: str) -> Any:
    """Return a barrier that is named like the user's call, and whose ranks must agree on `words`."""
    return barrier.under(name, lambda call: (words,))
