"""Arrays for messages: contiguous ones, and the blocks of an array stacked by rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from meshdist.arrays.device_types import new_empty
from meshdist.arrays.scratch import Scratch

Shape: TypeAlias = "tuple[int, ...]"


def contiguous(array: Any) -> Any:
    """Return the array itself if it is C-contiguous, else a copy that is."""
    return array if array.flags.c_contiguous else array.copy(order="C")


class Stack:
    """The equal blocks of an array that mesh axes cut, stacked in the order of the ranks, and the way back.

    Args:
        shape: The shape of the array.
        mesh_shape: The ranks along each axis.
        cutting: For each dim that is cut, the axes that cut it, the outermost first.
    """

    def __init__(self, shape: Shape, mesh_shape: Shape, cutting: Mapping[int, tuple[int, ...]]) -> None:
        axes = sorted(axis for each in cutting.values() for axis in each)
        extents = [mesh_shape[axis] for axis in axes]
        block: list[int] = []
        split: list[int] = []  # the array with a dim for each axis before the dim that it cuts
        order: list[int] = []  # where these dims are if the axes come first
        for dim, rows in enumerate(shape):
            own = cutting.get(dim, ())
            block.append(rows // math.prod(mesh_shape[axis] for axis in own))
            split += [*(mesh_shape[axis] for axis in own), block[dim]]
            order += [*map(axes.index, own), len(axes) + dim]
        self.shape = shape
        self.stacked = (math.prod(extents), *block)
        self._nested = (*extents, *block)
        self._split = tuple(split)
        self._back = tuple(order)
        self._first = tuple(sorted(range(len(order)), key=order.__getitem__))
        long = [place for place, extent in zip(order, split, strict=True) if extent != 1]
        self.is_view = long == sorted(long)

    def unstack(self, stacked: Any) -> Any:
        """Return the array of the blocks: a view where that is possible."""
        if self.is_view:
            return stacked.reshape(self.shape)
        array = new_empty(self.shape, stacked)
        array.reshape(self._split)[...] = stacked.reshape(self._nested).transpose(self._back)
        return array

    def sent(self, array: Any) -> AbstractContextManager[Any]:
        """Return the blocks of `array` stacked and contiguous, for use inside `with`: a view where that is possible."""
        if self.is_view:
            return nullcontext(contiguous(array).reshape(self.stacked))
        scratch = Scratch(self._nested, array)
        scratch.array[...] = array.reshape(self._split).transpose(self._first)
        scratch.array = scratch.array.reshape(self.stacked)
        return scratch

    def received(self, like: Any, receive: Callable[[Any], object]) -> Any:
        """Return the array of the blocks, which `receive` writes into the stack that it is called with."""
        if self.is_view:
            stacked = new_empty(self.stacked, like)
            receive(stacked)
            return stacked.reshape(self.shape)
        with Scratch(self.stacked, like) as stacked:
            receive(stacked)
            return self.unstack(stacked)
