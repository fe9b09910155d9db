"""The key under which a group keeps the plan of a call: all that the plan depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdist.arrays import Array
from meshdist.call import Buffers

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective

_NOT_SIMPLE = "not simple"


def each(buffers: Buffers) -> list[Array]:
    """Return the arrays of what is sent or received as a list."""
    if buffers is None:
        return []
    return buffers if isinstance(buffers, list) else [buffers]


def plan_key(
    collective: Collective[..., Any], send: Buffers, recv: Buffers, op: Any, root: int | None, splits: Any
) -> Hashable:
    """Return the key of a call on these arrays."""
    if recv is None and send is None:
        return collective
    if isinstance(send, np.ndarray) and isinstance(recv, np.ndarray):
        if collective.in_place:
            return (collective, recv.dtype, recv.shape, op, root)
        return (collective, recv.dtype, recv.shape, send.dtype, send.shape, op, root, splits)
    return (collective, _shapes(recv), _shapes(send), op, root, splits)


def simple_key(
    collective: Collective[..., Any], send: Any, recv: Any, op: Any, root: int | None, splits: Any
) -> Hashable:
    """Return `plan_key(...)` where a plan could run on the arguments as they are, else None.

    So it is for arrays, and lists of arrays, whose elements lie side by side and, where they are received, can be
    written.
    """
    if recv is None and send is None:
        return collective
    taken = _simple_shapes(recv, written=True)
    if taken is _NOT_SIMPLE:
        return None
    given = _simple_shapes(send, written=False)
    return None if given is _NOT_SIMPLE else (collective, taken, given, op, root, splits)


def _shapes(buffers: Buffers) -> Hashable:
    if type(buffers) is list:
        return tuple([(array.dtype, array.shape) for array in buffers])
    return None if buffers is None else (None, buffers.dtype, buffers.shape)  # type: ignore[union-attr]


def _simple_shapes(buffers: Any, *, written: bool) -> Hashable:
    # As `_shapes`, in one go: this is the way of every call of lists.
    if buffers is None:
        return None
    shapes = []
    is_list = type(buffers) is list
    for array in buffers if is_list else (buffers,):
        if type(array) is not np.ndarray or not (array.flags.carray if written else array.flags.c_contiguous):
            return _NOT_SIMPLE
        shapes.append((array.dtype, array.shape))
    return tuple(shapes) if is_list else (None, *shapes[0])
