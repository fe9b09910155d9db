"""The arithmetic of mesh axes as strides over a list of ranks: no ranks here, no arrays, only small tuples.

A mesh is an arrangement of positions in a list of ranks. A step along one of its axes is a fixed step in that list,
where the axis is one of those the list was laid out by; an axis made of several of them, such as two that do not lie
side by side flattened to one, counts like an odometer. So an axis is a tuple of *wheels* `(extent, stride)`, slowest
first: index i along the axis is read as one digit per wheel, and each digit moves the position by its wheel's stride.
An axis of extent 1 has no wheels. Whatever is done to axes takes time that depends on their number, never on how many
ranks there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Wheel: TypeAlias = "tuple[int, int]"
Axis: TypeAlias = "tuple[Wheel, ...]"


def row_major(shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes of an array of this shape whose entries lie one after the other, the last axis fastest.

    Example:
        >>> row_major((2, 3))
        (((2, 3),), ((3, 1),))
    """
    axes: list[Axis] = []
    stride = 1
    for extent in reversed(shape):
        axes.append(((extent, stride),) if extent > 1 else ())
        stride *= extent
    return tuple(reversed(axes))


def extent_of(axis: Axis) -> int:
    """Return the number of places along an axis."""
    return axis[0][0] if len(axis) == 1 else math.prod(extent for extent, _ in axis)


def offset(axis: Axis, index: int) -> int:
    """Return how far index `index` of an axis is from its first place."""
    if len(axis) == 1:
        return index * axis[0][1]
    moved = 0
    for extent, stride in reversed(axis):
        index, digit = divmod(index, extent)
        moved += digit * stride
    return moved


def joined(axes: Iterable[Axis]) -> Axis:
    """Return one axis over the places of several, the last of them fastest.

    Wheels that continue each other become one, so that there is one way only to write an axis.

    Example:
        >>> joined(row_major((2, 3)))
        ((6, 1),)
        >>> joined([((3, 1),), ((2, 3),)])
        ((3, 1), (2, 3))
    """
    wheels: list[Wheel] = []
    for axis in axes:
        for extent, stride in axis:
            if wheels and wheels[-1][1] == extent * stride:
                wheels[-1] = wheels[-1][0] * extent, stride
            else:
                wheels.append((extent, stride))
    return tuple(wheels)


def parted(axis: Axis, extents: Sequence[int]) -> tuple[Axis, ...] | None:
    """Return the axes of these extents that make up `axis`, the last of them fastest; None where no wheels do.

    Args:
        axis: The axis; its extent is the product of `extents`.
        extents: At least 1 each.

    Example:
        >>> parted(((6, 1),), (2, 3))
        (((2, 3),), ((3, 1),))
        >>> parted(((3, 1), (2, 3)), (2, 3)) is None  # two threes, of an odometer that counts three twos
        True
    """
    left = list(axis)
    parts: list[Axis] = []
    for extent in reversed(extents):
        part: list[Wheel] = []
        while extent > 1:
            wheel_extent, stride = left.pop()
            common = math.gcd(extent, wheel_extent)
            if common not in (extent, wheel_extent):
                return None
            part.append((common, stride))
            if common < wheel_extent:
                left.append((wheel_extent // common, stride * common))
            extent //= common
        parts.append(joined([tuple(reversed(part))]))
    return tuple(reversed(parts))


def digits(distance: int, axes: Sequence[Axis]) -> tuple[int, ...] | None:
    """Return the index along each axis of the place at `distance` from the first; None where they do not lead there."""
    wheels = sorted((stride, extent, number) for number, axis in enumerate(axes) for extent, stride in axis)
    found: dict[tuple[int, int], int] = {}
    for stride, extent, number in reversed(wheels):
        digit = min(distance // stride, extent - 1) if distance > 0 else 0
        distance -= digit * stride
        found[number, stride] = digit
    if distance:
        return None
    indices = []
    for number, axis in enumerate(axes):
        index = 0
        for extent, stride in axis:
            index = index * extent + found[number, stride]
        indices.append(index)
    return tuple(indices)


def fit(axes: Sequence[Axis], whole: Sequence[Axis]) -> bool:
    """Return whether `axes` can all be axes of one arrangement of the places of `whole`.

    They can where, with further axes, they number each place once. Then the planes along them do not overlap.

    Example:
        >>> dp, tp = row_major((2, 3))
        >>> fit([tp], [dp, tp]), fit([tp, tp], [dp, tp]), fit([((4, 1),)], [dp, tp])
        (True, False, False)
    """
    wanted = sorted((stride, extent) for axis in axes for extent, stride in axis)
    for whole_extent, whole_stride in _wheels_of(whole):
        reached, end = whole_stride, whole_extent * whole_stride
        while wanted and reached <= wanted[0][0] < end:
            stride, extent = wanted.pop(0)
            if stride % reached:
                return False
            reached = stride * extent
        if end % reached:
            return False
    return not wanted


def way_along(axes: Sequence[Axis], whole: Sequence[Axis], distance: int) -> int:
    """Return how much of the way from the first place of `whole` to that at `distance` is along `axes`.

    Args:
        axes: They fit `whole`.
        whole: What the way leads through.
        distance: Of a place of `whole`.

    Example:
        >>> dp, tp = row_major((2, 3))
        >>> way_along([tp], [dp, tp], 5), way_along([dp], [dp, tp], 5)
        (2, 3)
    """
    wheels = _wheels_of(whole)
    indices = digits(distance, [(wheel,) for wheel in wheels])
    assert indices is not None, "the place is one of the whole"
    way = 0
    for axis in axes:
        for extent, stride in axis:
            for (whole_extent, whole_stride), index in zip(wheels, indices, strict=True):
                if whole_stride <= stride < whole_extent * whole_stride:
                    way += index * whole_stride // stride % extent * stride
    return way


def _wheels_of(whole: Sequence[Axis]) -> list[Wheel]:
    """Return the wheels of several axes, fastest first, as few as can be."""
    slowest_first = sorted(((stride, extent) for axis in whole for extent, stride in axis), reverse=True)
    return list(reversed(joined([tuple((extent, stride) for stride, extent in slowest_first)])))
