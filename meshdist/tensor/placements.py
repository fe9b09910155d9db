"""Placements: what an axis of a mesh does to an array: shard a dimension, replicate it, or leave it pending."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshdist.arrays.reduce_op import ReduceOp
from meshdist.errors import UnknownAxisError
from meshdist.mesh.layout.axes_and_chunks import unknown_axis
from meshdist.system.plurals import counted

PENDING_OPS = ("sum", "product", "max", "min", "avg")


class PlacementError(ValueError):
    """Placements that do not match the array, the mesh, or another operand."""


@dataclass(frozen=True)
class Shard:
    """The ranks along the axis hold consecutive blocks of dimension `dim`.

    Args:
        dim: The dimension that is sharded; negative ones count from the last.
        sizes: The number of rows of each block, which may be 0. None: blocks of ceil(rows / ranks) rows, the last ones
            smaller or empty, as `torch.chunk` splits. If an outer axis shards the same dimension into blocks of several
            sizes, a tuple of sizes for each of these blocks.

    Example:
        >>> from meshdist.tensor import Shard
        >>> Shard(0), Shard(1, sizes=(5, 0, 3))
        (Shard(0), Shard(1, sizes=(5, 0, 3)))
    """

    dim: int
    sizes: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not hasattr(self.dim, "__index__"):
            raise TypeError(f"Shard: dim must be an integer, got {self.dim!r} ({type(self.dim).__name__})")
        object.__setattr__(self, "dim", operator.index(self.dim))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _checked_sizes(self.sizes))

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.sizes is None else f"Shard({self.dim}, sizes={self.sizes})"


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis holds the same array.

    Example:
        >>> from meshdist.tensor import Replicate
        >>> Replicate()
        Replicate()
    """


@dataclass(frozen=True)
class Partial:
    """The array is a pending reduction of the arrays that the ranks along the axis hold.

    Args:
        op: "sum", "product", "max", "min" or "avg"; or the ReduceOp.

    Example:
        >>> from meshdist.tensor import Partial
        >>> Partial(), Partial("max")
        (Partial('sum'), Partial('max'))
    """

    op: Any = "sum"

    def __post_init__(self) -> None:
        op = self.op.value if isinstance(self.op, ReduceOp) else self.op
        if op not in PENDING_OPS:
            raise ValueError(f"Partial: op must be one of {', '.join(map(repr, PENDING_OPS))}, got {self.op!r}")
        object.__setattr__(self, "op", op)

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"


Placement: TypeAlias = "Shard | Replicate | Partial"
# What users pass: one placement per axis in mesh order, or those of some axes by name or index.
Placements: TypeAlias = "Sequence[Placement] | Mapping[int | str, Placement] | Placement"

REPLICATE = Replicate()

GIVEN_SIZES: dict[tuple[Any, ...], None] = {}
"""The sizes of blocks that users have passed, the first ones: ranks may have passed others. Those of results, such as
`x[mask]`, are equal on all ranks."""
_MOST_GIVEN = 1000


class PlacementsOf:
    """A context in which errors about placements name the call that they were passed to."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, (PlacementError, UnknownAxisError, TypeError)):
            raise type(error)(f"{self._name}: {error}") from None


def _checked_sizes(sizes: Any) -> tuple[Any, ...]:
    try:
        listed = tuple(sizes)
    except TypeError:
        raise TypeError(f"Shard: sizes must be a tuple of integers, got {sizes!r}") from None
    nested = [isinstance(size, (tuple, list)) for size in listed]
    if any(nested):
        if not all(nested):
            raise TypeError(
                f"Shard: sizes must be integers, or a tuple of integers for each outer block, got {sizes!r}"
            )
        return tuple(_checked_sizes(size) for size in listed)
    for size in listed:
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"Shard: sizes must be integers, got {size!r} ({type(size).__name__}) in {sizes!r}")
        if operator.index(size) < 0:
            raise ValueError(f"Shard: a size must not be negative, got {sizes!r}")
    return tuple(map(operator.index, listed))


def placements_in_order(
    placements: Placements | None, mesh_shape: Sequence[int], names: Sequence[str] | None
) -> tuple[Placement, ...]:
    """Return one placement for each axis of a mesh; an axis that a mapping leaves out replicates.

    Raises:
        TypeError: What stands for an axis is no placement.
        PlacementError: A sequence without exactly one element for each axis of the mesh, or an axis twice.
        UnknownAxisError: The mesh has no such axis. The error is both a KeyError and a ValueError.
    """
    if placements is None:
        return (REPLICATE,) * len(mesh_shape)
    if isinstance(placements, Mapping):
        ordered: list[Placement] = [REPLICATE] * len(mesh_shape)
        given: set[int] = set()
        for axis, placement in placements.items():
            at = _axis(axis, mesh_shape, names)
            if at in given:
                raise PlacementError(f"placements: axis {axis!r} is given twice, in {dict(placements)}")
            given.add(at)
            ordered[at] = _checked(placement)
        return tuple(ordered)
    if isinstance(placements, (Shard, Replicate, Partial)):
        placements = (placements,)
    if isinstance(placements, (str, type)) or not hasattr(placements, "__iter__"):
        raise TypeError(
            "placements: expected one of Shard, Replicate and Partial for each axis, as a list in mesh order or a dict"
            f" by axis, got {placements!r}{_meant(placements)}"
        )
    listed = tuple(map(_checked, placements))
    if len(listed) != len(mesh_shape):
        axes = counted(len(mesh_shape), "axis", "axes") if names is None else f"the axes {', '.join(map(repr, names))}"
        raise PlacementError(
            f"placements: expected one for each of {axes}, got {len(listed)}: {list(listed)}; pass a dict to name only"
            " the axes that do not replicate"
        )
    return listed


def _checked(placement: Any) -> Placement:
    if isinstance(placement, (Replicate, Partial)):
        return placement
    if not isinstance(placement, Shard):
        raise TypeError(f"placements: expected a Shard, Replicate or Partial, got {placement!r}{_meant(placement)}")
    if placement.sizes is not None and len(GIVEN_SIZES) < _MOST_GIVEN:
        GIVEN_SIZES[placement.sizes] = None
    return placement


def _meant(given: Any) -> str:
    if type(given) is int:
        return f"; did you mean Shard({given})?"
    if given is Shard or given is Replicate or given is Partial:
        return f"; did you mean {given.__name__}({'0' * (given is Shard)})?"
    return ""


def _axis(axis: Any, mesh_shape: Sequence[int], names: Sequence[str] | None) -> int:
    if isinstance(axis, str):
        if names is None or axis not in names:
            if not names:
                axes = counted(len(mesh_shape), "axis", "axes")
                raise UnknownAxisError(f"placements: unknown axis {axis!r}; the mesh has {axes} without names")
            described = f"({', '.join(f'{name}={size}' for name, size in zip(names, mesh_shape, strict=True))})"
            raise UnknownAxisError(f"placements: {unknown_axis(axis, described, names)}")
        return list(names).index(axis)
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(f"placements: an axis is a name or an index, got {axis!r} ({type(axis).__name__})")
    if not -len(mesh_shape) <= operator.index(axis) < len(mesh_shape):
        raise UnknownAxisError(
            f"placements: unknown axis {axis}; the mesh has {counted(len(mesh_shape), 'axis', 'axes')}"
        )
    return operator.index(axis) % len(mesh_shape)


def placements_text(placements: Sequence[Placement], names: Sequence[str] | None) -> str:
    """Return the placements as users write them: `{'dp': Shard(0), 'tp': Replicate()}`, or a list without names."""
    if names is None:
        return f"[{', '.join(map(repr, placements))}]"
    pairs = zip(names, placements, strict=True)
    return "{" + ", ".join(f"{name!r}: {placement!r}" for name, placement in pairs) + "}"
