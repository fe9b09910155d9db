"""The plans that a group keeps, and their keys: everything that a plan depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy import ndarray

from meshdist.runtime.call import Buffers

if TYPE_CHECKING:
    from meshdist.runtime.call import CollectiveSpec

MOST_PLANS = 4096


def remember(plans: dict[Any, Any], key: Hashable, plan: Any) -> None:
    """Keep a plan; if there are too many, drop the older half.

    Without a limit, a program whose shapes never repeat, such as one that sends pickled objects, would keep a plan for
    each.
    """
    if len(plans) >= MOST_PLANS:
        for old in list(plans)[: MOST_PLANS // 2]:
            plans.pop(old, None)
    plans[key] = plan


def plan_key(
    collective: CollectiveSpec, send: Buffers, recv: Buffers, op: Any, root: int | None, splits: Any
) -> Hashable:
    """Return the key of a call on these arrays."""
    if recv is None and send is None:
        return collective
    if isinstance(send, np.ndarray) and isinstance(recv, np.ndarray):
        if collective.in_place:
            return (collective, recv.dtype, recv.shape, op, root)
        return (collective, recv.dtype, recv.shape, send.dtype, send.shape, op, root, splits)
    return (collective, _shapes(recv), _shapes(send), op, root, splits)


def simple_key(collective: CollectiveSpec, send: Any, recv: Any, op: Any, root: int | None, splits: Any) -> Hashable:
    """Return `plan_key(...)` if all arrays are contiguous and the outputs writable, or else None."""
    if recv is None and send is None:
        return collective
    # `plan_key` and the checks in one pass: every call with lists runs this.
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


def device_key(collective: CollectiveSpec, send: Any, recv: Any, op: Any, root: int | None, splits: Any) -> Hashable:
    """Return the key of a call on GPU arrays of one type."""
    if send is recv:
        return (type(recv), collective, recv.dtype, recv.shape, op, root)
    return (type(recv), collective, recv.dtype, recv.shape, send.dtype, send.shape, op, root, splits)


def _shapes(buffers: Buffers) -> Hashable:
    if type(buffers) is list:
        return tuple([(array.dtype, array.shape) for array in buffers])
    return None if buffers is None else (None, buffers.dtype, buffers.shape)  # type: ignore[union-attr]
