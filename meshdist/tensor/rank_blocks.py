"""RankBlocks: the blocks of all ranks of a mesh at once, as arrays by coordinate. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from meshdist.tensor.array_layout import ArrayLayout

if TYPE_CHECKING:
    from numpy.typing import NDArray

Counts: TypeAlias = "NDArray[np.int64]"


class RankBlocks:
    """The blocks of a layout. Its arrays have a dimension for each axis of the mesh, of size 1 where all are equal.

    Attributes:
        layout: The layout.
        numbers: For each dim of the array, the number of the rank's block among those of the dim.
        starts, stops: For each dim of the array, its rows on the rank.
    """

    def __init__(self, layout: ArrayLayout) -> None:
        self.layout = layout
        self.numbers: list[Counts] = []
        self.starts: list[Counts] = []
        self.stops: list[Counts] = []
        for dim in range(layout.ndim):
            edges, axes = block_edges(layout, dim), layout.axes_of(dim)
            shape = [extent if axis in axes else 1 for axis, extent in enumerate(layout.mesh_shape)]
            self.numbers.append(np.arange(len(edges) - 1).reshape(shape))
            self.starts.append(edges[:-1].reshape(shape))
            self.stops.append(edges[1:].reshape(shape))

    def num_elements(self) -> Counts:
        """Return the number of elements of each rank's block."""
        return self._product([stop - start for start, stop in zip(self.starts, self.stops, strict=True)])

    def num_common(self, other: RankBlocks) -> Counts:
        """Return the number of elements that each rank holds both here and in `other`."""
        rows = []
        for dim in range(self.layout.ndim):
            stop = np.minimum(self.stops[dim], other.stops[dim])
            rows.append(np.maximum(stop - np.maximum(self.starts[dim], other.starts[dim]), 0))
        return self._product(rows)

    def _product(self, rows: Sequence[Counts]) -> Counts:
        # Factors of few elements first: the products of all ranks are formed only in the end.
        factors = sorted(rows, key=lambda factor: factor.size)
        return reduce(np.multiply, factors, np.ones((1,) * len(self.layout.mesh_shape), np.int64))


def block_edges(layout: ArrayLayout, dim: int) -> Counts:
    """Return the first row of every block of a dimension, and the number of its rows at the end."""
    cut = layout.cuts[dim]
    return np.array((0, layout.shape[dim]) if cut is None else layout.starts(dim), np.int64)


def numbers_of(axes: Sequence[int], mesh_shape: Sequence[int]) -> Counts:
    """Return the number of each rank among those that differ along `axes` only, in row-major order."""
    shape = [extent if axis in axes else 1 for axis, extent in enumerate(mesh_shape)]
    return np.arange(math.prod(shape)).reshape(shape)


def wanted_of(source: ArrayLayout, target: ArrayLayout, weights: Mapping[int, int], classes: int) -> Counts:
    """Return how many elements of each block of `source` the ranks want that hold blocks of `target`, by their class.

    The class of a rank is the sum of its coordinates times the `weights` of their axes, modulo `classes`. Of the axes
    that have a weight and do not cut the target, all ranks want their elements. For axes without a weight, these are
    the ranks of the same coordinate.

    Returns:
        Shape (blocks of the source, classes). The blocks are numbered in row-major order of their numbers in each dim.
    """
    wanted = np.zeros((1, classes), np.int64)
    wanted[0, 0] = 1
    for dim in range(source.ndim):
        wanted = _outer(wanted, _wanted_rows(source, target, dim, weights, classes))
    cutting = {axis for dim in range(target.ndim) for axis in target.axes_of(dim)}
    for axis, weight in weights.items():
        if axis not in cutting:
            wanted = _repeated(wanted, target.mesh_shape[axis], weight)
    return wanted


def _wanted_rows(
    source: ArrayLayout, target: ArrayLayout, dim: int, weights: Mapping[int, int], classes: int
) -> Counts:
    """Return the rows of one dim, as `wanted_of` returns elements.

    Where one block ends, of either layout, another part begins that belongs to one block of each.
    """
    held, got = block_edges(source, dim), block_edges(target, dim)
    edges = np.union1d(held, got)
    starts, rows = edges[:-1], np.diff(edges)
    axes = target.axes_of(dim)
    class_ = np.zeros_like(starts)
    block = np.searchsorted(got, starts, "right") - 1
    for axis in reversed(axes):
        block, place = np.divmod(block, target.mesh_shape[axis])
        class_ += weights.get(axis, 0) * place
    wanted = np.zeros((len(held) - 1, classes), np.int64)
    np.add.at(wanted, (np.searchsorted(held, starts, "right") - 1, class_ % classes), rows)
    return wanted


def _outer(one: Counts, other: Counts) -> Counts:
    """Return the products of elements, by the pair of their rows, and by the sum of their classes."""
    rows, classes = (each[:, None] for each in np.nonzero(one))
    others, other_classes = np.nonzero(other)
    result = np.zeros((len(one) * len(other), one.shape[1]), np.int64)
    at = rows * len(other) + others, (classes + other_classes) % one.shape[1]
    np.add.at(result, at, one[rows, classes] * other[others, other_classes])
    return result


def _repeated(wanted: Counts, times: int, weight: int) -> Counts:
    """Return the sum over `times` ranks along an axis, by doubling."""
    if times == 1:
        return wanted
    half = times // 2
    first = _repeated(wanted, half, weight)
    both = first + np.roll(first, half * weight, axis=1)
    return both + np.roll(wanted, 2 * half * weight, axis=1) if times % 2 else both
