"""Staging: collectives of lists, carried out by a collective of single arrays.

What is sent is put into one flat array, another collective runs on that, natively where the backend has it, and what
comes of it is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from meshdist.arrays import Array
from meshdist.call import Buffers, Call
from meshdist.collectives.definition import Collective
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.base import Backend

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Staging:
    """How a collective is carried out by another.

    Attributes:
        inner: The collective that is run on flat arrays.
        put: Makes the array that it sends from what is sent.
        room: Makes the array that it receives in, from the one that it sends; the same one for a collective in place.
        take: Puts what it received where the user wants it.
        by_device: The lists are one array, or list, for each device of this process, which takes part as one rank.
        by_element: What is at one place of the lists could be a call of `inner` of its own.
    """

    inner: Collective[..., Any]
    put: Callable[[Call, Buffers], Array]
    room: Callable[[Call, Array], Array]
    take: Callable[[Call, Array, Buffers], None]
    by_device: bool = False
    by_element: bool = False

    def inner_call(self, call: Call) -> Call:
        """Return the call of the inner collective; messages, and what the ranks compare, speak of the outer one."""
        words = call.collective.agreed(call)
        with np.errstate(all="ignore"):  # only the shape and the dtype of what comes of it matter here
            flat = self.put(call, call.send)
        return replace(
            call,
            collective=self.inner.under(call.collective.name, lambda _: words),
            send=flat,
            recv=self.room(call, flat),
        )


def staged(
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
    """Make the decorated function a Collective that `inner` carries out; see Staging and Collective."""

    def decorate(function: Callable[P, R]) -> Collective[P, R]:
        made = Collective(function, names, check, agreed, _never, writes, lists=lists)
        made.staging = Staging(inner, put, room, take, by_device, by_element)
        return made

    return decorate


def _never(backend: Backend, call: Call, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
    raise AssertionError(f"{call.collective.name} is carried out by another collective")


def listed(buffers: Buffers) -> list[Array]:
    """Return the arrays of a list, or the one array as a list."""
    assert buffers is not None
    return buffers if isinstance(buffers, list) else [buffers]


def joined(arrays: list[Array]) -> Array:
    """Return the elements of all arrays, which have one dtype, as one flat array."""
    whole: Array = np.concatenate([array.reshape(-1) for array in arrays])
    return whole


def pack_all(call: Call, send: Buffers) -> Array:
    """Put the arrays one behind the other."""
    return joined(listed(send))


def unpack_all(call: Call, flat: Array, recv: Buffers) -> None:
    """Cut what was received into the arrays, one behind the other."""
    begin = 0
    for array in listed(recv):
        part = flat[begin : begin + array.size]
        array[...] = part if array.ndim == 1 else part.reshape(array.shape)
        begin += array.size


def unchained(name: str, lists: Any, counted_name: str, counted: Any, size: int, by_rank: bool) -> list[Any]:
    """Return the arrays of a list of lists as one list.

    Args:
        name: What the lists are called, for messages.
        lists: With `by_rank` a list for each rank, as long as `counted`; else a list for each of `counted`, of as many
            arrays as all ranks have of these.
        counted_name: What the arrays are called whose number counts, for messages.
        counted: These arrays.
        size: The number of ranks.
        by_rank: See `lists`.

    Raises:
        TypeError: Not lists of arrays.
        ValueError: Not as many lists of as many arrays.
    """
    if not isinstance(counted, (list, tuple)):
        raise TypeError(f"{counted_name} must be a list of arrays, got {type(counted).__name__}")
    if not isinstance(lists, (list, tuple)) or not all(isinstance(inner, (list, tuple)) for inner in lists):
        raise TypeError(f"{name} must be a list of lists of arrays")
    num_lists, length = (size, len(counted)) if by_rank else (len(counted), size * len(counted))
    lengths = [len(inner) for inner in lists]
    if lengths != [length] * num_lists:
        raise ValueError(f"{name} must hold {num_lists} lists of {length} arrays, got lists of {lengths}")
    return [array for inner in lists for array in inner]
