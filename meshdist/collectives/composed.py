"""Composition: collectives of lists, carried out by a collective of single arrays.

The input is packed into one flat array, another collective runs on it, natively if the backend has it, and its output
is unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np

from meshdist.arrays.host import Array
from meshdist.collectives.algorithms.blocks import fill, joined
from meshdist.collectives.definition import Collective
from meshdist.runtime.call import Buffers, Call, Transport, each
from meshdist.runtime.interfaces import Group
from meshdist.runtime.waiting import Waitable
from meshdist.system.plurals import counted as number_of

P = ParamSpec("P")
R = TypeVar("R")


class Composition:
    """How a collective is carried out by another.

    Attributes:
        inner: The collective that runs on flat arrays.
        put: Packs the input of the outer call into the input of the inner one.
        room: Makes the output of the inner call from its input; the same array for a collective in place.
        take: Unpacks the output of the inner call into the user's buffers.
        by_device: The lists have one array, or list, for each device of this process, which acts as one rank.
        by_element: Each place of the lists could be a call of `inner` by itself.
    """

    def __init__(
        self,
        inner: Collective[..., Any],
        put: Callable[[Call, Buffers], Array],
        room: Callable[[Call, Array], Array],
        take: Callable[[Call, Array, Buffers], None],
        by_device: bool = False,
        by_element: bool = False,
    ) -> None:
        self.inner = inner
        self.put, self.room, self.take = put, room, take
        self.by_device, self.by_element = by_device, by_element

    def inner_call(self, call: Call) -> Call:
        """Return the call of the inner collective; messages, and the comparison of ranks, name the outer one."""
        words = call.collective.agreed(call)
        with np.errstate(all="ignore"):  # only the shape and the dtype of what comes of it matter here
            flat = self.put(call, call.send)
        return call._replace(
            collective=self.inner.under(call.collective.name, lambda _: words),
            send=flat,
            recv=self.room(call, flat),
        )


def composed(
    inner: Collective[..., Any],
    *,
    names: tuple[str, str],
    check: Callable[[Call], None],
    agreed: Callable[[Call], tuple[Any, ...]],
    put: Callable[[Call, Buffers], Array],
    take: Callable[[Call, Array, Buffers], None],
    room: Callable[[Call, Array], Array] = lambda call, flat: flat,
    writes: Callable[[Call], bool] = lambda call: True,
    lists: tuple[str, ...] = ("send", "recv"),
    by_device: bool = False,
    by_element: bool = False,
) -> Callable[[Callable[P, R]], Collective[P, R]]:
    """Make the decorated function a Collective that `inner` carries out; see Composition and Collective."""

    def decorate(function: Callable[P, R]) -> Collective[P, R]:
        made = Collective(function, names, check, agreed, _never, writes, lists=lists, dataflow=inner.dataflow)
        made.composition = Composition(inner, put, room, take, by_device, by_element)
        return made

    return decorate


def _never(transport: Transport, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    raise AssertionError(f"{call.collective.name} is carried out by another collective")


def pack_all(call: Call, send: Buffers) -> Array:
    return joined(each(send))


def unpack_all(call: Call, flat: Array, recv: Buffers) -> None:
    fill(each(recv), flat)


def unchained(
    group: Group, collective: Collective[..., Any], lists: Any, counted: Any, *, side: str, by_rank: bool = False
) -> list[Any]:
    """Return the arrays of a list of lists, which is the `side` of a call, `send` or `recv`, as one list.

    With `by_rank`, there is one list per rank, as long as `counted`, the other side. Otherwise, there is one list for
    each of `counted`, with as many arrays as all ranks have of these.
    """
    given, taken = collective.names
    names = (given, taken) if side == "send" else (taken, given)
    error_prefix = group.error_prefix(collective.name)
    found: list[Any] = group.named(error_prefix, _unchained, names, lists, counted, group.size(), by_rank)
    return found


def _unchained(names: tuple[str, str], lists: Any, counted: Any, size: int, by_rank: bool) -> list[Any]:
    name, counted_name = names
    if not isinstance(counted, (list, tuple)):
        raise TypeError(f"{counted_name} must be a list of arrays, got {type(counted).__name__}")
    if not isinstance(lists, (list, tuple)) or not all(isinstance(inner, (list, tuple)) for inner in lists):
        raise TypeError(f"{name} must be a list of lists of arrays")
    num_lists, length = (size, len(counted)) if by_rank else (len(counted), size * len(counted))
    lengths = [len(inner) for inner in lists]
    if lengths != [length] * num_lists:
        expected = f"{number_of(num_lists, 'list')} of {number_of(length, 'array')}"
        raise ValueError(f"{name} must hold {expected}, got lists of {lengths}")
    return [array for inner in lists for array in inner]
