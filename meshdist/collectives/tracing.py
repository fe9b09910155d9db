"""Trace a default algorithm to find what it sends: the dataflow of a collective that declares none.

The algorithm runs on one rank without peers: nothing is sent, and received data is zero. So it must only send messages
    that depend on the arguments of the call alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from meshdist.arrays.host import Array, as_buffers
from meshdist.arrays.reduce_op import ReduceOp
from meshdist.runtime.call import Buffers, Call, Transport

if TYPE_CHECKING:
    from meshdist.collectives.definition import Collective

# Bytes of a block of a sampled call, and the dtypes to try.
_BLOCK_BYTES = 64
_DTYPES = np.dtype(np.float64), np.dtype(np.int64)


class Message(NamedTuple):
    """A message of `nbytes` bytes to or from the rank at `distance`, counted modulo the number of ranks."""

    distance: int
    nbytes: int
    is_sent: bool


class _Alone:
    """A transport that only records messages."""

    def __init__(self, call: Call) -> None:
        self.rank, self.size = call.rank, call.size
        self.posted: list[Message] = []

    def send(self, array: Array, dst: int, tag: int) -> None:
        self.posted.append(Message((dst - self.rank) % self.size, array.nbytes, is_sent=True))

    def recv(self, array: Array, src: int | None, tag: int) -> None:
        distance = 1 if src is None else (src - self.rank) % self.size
        self.posted.append(Message(distance, array.nbytes, is_sent=False))
        array[...] = 0


def rounds_of(call: Call) -> Iterator[list[Message]]:
    """Yield the messages that the default algorithm posts between waits. The arrays of the call stay unchanged."""
    alone = _Alone(call)
    send = _zeros(call.send)
    recv = send if call.recv is call.send else _zeros(call.recv)
    for _ in call.collective.default(cast("Transport", alone), call._replace(send=send, recv=recv), send, recv):
        if alone.posted:
            yield alone.posted
            alone.posted = []
    if alone.posted:
        yield alone.posted


def bytes_to_each(call: Call) -> list[int]:
    found = [0] * call.size
    for messages in rounds_of(call):
        for message in messages:
            if message.is_sent:
                found[(call.rank + message.distance) % call.size] += message.nbytes
    return found


def call_of(collective: Collective[..., Any], rank: int, size: int, send: Any, recv: Any, **rest: Any) -> Call:
    """Return the innermost call for a user's `send` and `recv`; `rest` may have `root` and `splits`."""
    given = as_buffers(send, collective.names[0], "send" in collective.lists)
    taken = given if recv is send else as_buffers(recv, collective.names[1], "recv" in collective.lists)
    call = Call(collective, collective.name, rank, size, given, taken, _op_of(collective), **rest)
    while call.collective.composition is not None:
        call = call.collective.composition.inner_call(call)
    return call


def sampled_call(collective: Collective[..., Any], rank: int, size: int) -> tuple[Call, int]:
    """Return a small call that the collective's checks accept, and its size in bytes; the root is rank 0.

    It tries arrays of one block, of one block per rank, and lists of blocks for list parameters.
    """
    op = _op_of(collective)
    root = 0 if {"src", "dst"} & _parameters(collective) else None
    for dtype in _DTYPES:
        gives, takes = (_forms(dtype, size, side in collective.lists) for side in ("send", "recv"))
        sides = [(form, form) for form in gives] if collective.in_place else product(gives, takes)
        for send, recv in sides:
            call = Call(collective, collective.name, rank, size, send, recv, op, root)
            if _is_accepted(call):
                longest = max(_BLOCK_BYTES, *map(_nbytes, (send, recv)))
                while call.collective.composition is not None:
                    call = call.collective.composition.inner_call(call)
                return call, longest
    raise ValueError(f"{collective.name}: no call is known that it accepts; declare its dataflow")


def _parameters(collective: Collective[..., Any]) -> set[str]:
    code = collective.definition.__code__
    return set(code.co_varnames[: code.co_argcount])


def _op_of(collective: Collective[..., Any]) -> ReduceOp | None:
    return ReduceOp.SUM if "op" in _parameters(collective) else None


def _forms(dtype: np.dtype[Any], size: int, is_list: bool) -> list[Buffers]:
    count = _BLOCK_BYTES // dtype.itemsize
    if is_list:
        return [[np.zeros(count, dtype) for _ in range(size)], None]
    return [np.zeros(count * size, dtype), np.zeros(count, dtype)]


def _is_accepted(call: Call) -> bool:
    try:
        call.collective.check(call)
    except (TypeError, ValueError, AttributeError, IndexError):
        return False
    return True


def _zeros(buffers: Buffers) -> Buffers:
    if isinstance(buffers, list):
        return [np.zeros(array.shape, array.dtype) for array in buffers]
    return None if buffers is None else np.zeros(buffers.shape, buffers.dtype)


def _nbytes(buffers: Buffers) -> int:
    if isinstance(buffers, list):
        return sum(array.nbytes for array in buffers)
    return 0 if buffers is None else buffers.nbytes
