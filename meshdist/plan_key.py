"""The key under which a group keeps the plan of a call: all that the plan depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from meshdist.arrays import Array
from meshdist.call import Buffers

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective

# How many plans a group keeps.
MOST_PLANS = 4096


def each(buffers: Buffers) -> list[Array]:
    """Return the arrays of what is sent or received as a list."""
    if buffers is None:
        return []
    return buffers if isinstance(buffers, list) else [buffers]


def remember(plans: dict[Any, Any], key: Hashable, plan: Any) -> None:
    """Keep a plan; where there are too many, the older half of them is forgotten, and made again when it is needed.

    A program whose shapes never come again, as those of pickled objects, would keep a plan for each.

    Args:
        plans: Those that are kept.
        key: That of the new one.
        plan: The new one.
    """
    if len(plans) >= MOST_PLANS:
        for old in list(plans)[: MOST_PLANS // 2]:
            plans.pop(old, None)
    plans[key] = plan


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
    # As `plan_key`, in one go: this is the way of every call of lists.
    taken: Hashable = None
    if type(recv) is list:
        shapes = []
        for array in recv:
            if type(array) is not ndarray or not array.flags.carray:
                return None
            shapes.append((array.dtype, array.shape))
        taken = tuple(shapes)
    elif recv is not None:
        if type(recv) is not ndarray or not recv.flags.carray:
            return None
        taken = (None, recv.dtype, recv.shape)
    given: Hashable = None
    if type(send) is list:
        shapes = []
        for array in send:
            if type(array) is not ndarray or not array.flags.c_contiguous:
                return None
            shapes.append((array.dtype, array.shape))
        given = tuple(shapes)
    elif send is not None:
        if type(send) is not ndarray or not send.flags.c_contiguous:
            return None
        given = (None, send.dtype, send.shape)
    return (collective, taken, given, op, root, splits)


def _shapes(buffers: Buffers) -> Hashable:
    if type(buffers) is list:
        return tuple([(array.dtype, array.shape) for array in buffers])
    return None if buffers is None else (None, buffers.dtype, buffers.shape)  # type: ignore[union-attr]
