"""Mesh axes as strides over a list of ranks, in tuples of integers.

A mesh arranges the positions of a list of ranks. One step along an axis is a fixed step in the list if the axis is one
of those that laid out the list. An axis joined from several of them, for example two that are not adjacent, needs one
stride for each. So an axis is a tuple of *modes* `(extent, stride)`, as in CuTe layouts, slowest first: an index along
the axis has one digit per mode, and each digit moves the position by the stride of its mode. An axis of extent 1 has no
modes. All operations take time that depends on the number of axes, not on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

Mode: TypeAlias = "tuple[int, int]"
Axis: TypeAlias = "tuple[Mode, ...]"


def row_major(shape: Sequence[int]) -> tuple[Axis, ...]:
    """Return the axes of a contiguous array of this shape, the last axis fastest."""
    axes: list[Axis] = []
    stride = 1
    for extent in reversed(shape):
        axes.append(((extent, stride),) if extent > 1 else ())
        stride *= extent
    return tuple(reversed(axes))


def extent_of(axis: Axis) -> int:
    return axis[0][0] if len(axis) == 1 else math.prod(extent for extent, _ in axis)


def offset(axis: Axis, index: int) -> int:
    """Return the distance in the list from index 0 of an axis to `index`."""
    if len(axis) == 1:
        return index * axis[0][1]
    moved = 0
    for extent, stride in reversed(axis):
        index, digit = divmod(index, extent)
        moved += digit * stride
    return moved


def joined(axes: Iterable[Axis]) -> Axis:
    """Return one axis over all places of several axes, the last of them fastest; adjacent modes are merged."""
    modes: list[Mode] = []
    for axis in axes:
        for extent, stride in axis:
            if modes and modes[-1][1] == extent * stride:
                modes[-1] = modes[-1][0] * extent, stride
            else:
                modes.append((extent, stride))
    return tuple(modes)


def parted(axis: Axis, extents: Sequence[int]) -> tuple[Axis, ...] | None:
    """Split `axis` into axes of these extents, the last one fastest; return None if its modes do not allow it.

    The product of `extents`, each at least 1, is the extent of `axis`.
    """
    left = list(axis)
    parts: list[Axis] = []
    for extent in reversed(extents):
        part: list[Mode] = []
        while extent > 1:
            mode_extent, stride = left.pop()
            common = math.gcd(extent, mode_extent)
            if common not in (extent, mode_extent):
                return None
            part.append((common, stride))
            if common < mode_extent:
                left.append((mode_extent // common, stride * common))
            extent //= common
        parts.append(joined([tuple(reversed(part))]))
    return tuple(reversed(parts))


def digits(distance: int, axes: Sequence[Axis]) -> tuple[int, ...] | None:
    """Return the index along each axis of the place at `distance` from the first; None if there is no such place."""
    modes = sorted((stride, extent, number) for number, axis in enumerate(axes) for extent, stride in axis)
    found: dict[tuple[int, int], int] = {}
    for stride, extent, number in reversed(modes):
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

    They can if, together with further axes, they number each place exactly once. Then planes along them do not overlap.
    """
    wanted = sorted((stride, extent) for axis in axes for extent, stride in axis)
    for whole_extent, whole_stride in _modes_of(whole):
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
    """Return the part of the offset `distance`, from the first place of `whole`, that lies along `axes`.

    `axes` must fit `whole`, and `distance` must lead to a place of `whole`.
    """
    modes = _modes_of(whole)
    indices = digits(distance, [(mode,) for mode in modes])
    assert indices is not None, "the place is one of the whole"
    way = 0
    for axis in axes:
        for extent, stride in axis:
            for (whole_extent, whole_stride), index in zip(modes, indices, strict=True):
                if whole_stride <= stride < whole_extent * whole_stride:
                    way += index * whole_stride // stride % extent * stride
    return way


def _modes_of(whole: Sequence[Axis]) -> list[Mode]:
    """Return the modes of several axes, merged, the fastest first."""
    slowest_first = sorted(((stride, extent) for axis in whole for extent, stride in axis), reverse=True)
    return list(reversed(joined([tuple((extent, stride) for stride, extent in slowest_first)])))
