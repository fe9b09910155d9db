"""The plans of the `nccl` backend: what is enqueued for a collective.

A plan has three parts, all on the stream of the call. `prepare` turns the user's arrays into arrays that NCCL can
take, by CuPy kernels if needed; `go` enqueues NCCL's operations; `finish` moves the results to the user's arrays. For
contiguous arrays and collectives that NCCL has, only `go` does anything.

Data movement uses bytes, so that it works for every dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from meshdist.arrays.device import cupy_module, plain
from meshdist.backends.nccl.library import UINT8
from meshdist.runtime.call import Call, each
from meshdist.runtime.flight_recorder import CallFacts

if TYPE_CHECKING:
    from meshdist.backends.nccl.comm_stream import LaunchStream

# The address of a block, and its bytes.
Block = tuple[int, int]


class NcclPlan(ABC):
    """A prepared collective."""

    computes = False  # `prepare` or `finish` is needed for any arrays
    facts: CallFacts | None = None  # what the flight recorder keeps of its calls

    def __init__(self, call: Call) -> None:
        self.rank, self.size, self.root = call.rank, call.size, call.root
        self.apart = not call.collective.in_place  # what is sent must not share memory with what is received

    def launch(self, on: LaunchStream, send: Any, recv: Any) -> None:
        if not self.computes and is_plain(send) and (recv is send or is_plain(recv)):
            self.go(on, send, recv)
            return
        with on.stream:
            sent, received = self.prepare(send, recv)
            self.go(on, sent, received)
            self.finish(received, recv)

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        """Return the arrays that NCCL sends and receives."""
        sent = packed(send)
        return sent, sent if recv is send else rooms_for(recv)

    @abstractmethod
    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        """Enqueue NCCL's operations on plain arrays."""

    def finish(self, received: Any, recv: Any) -> None:
        """Copy the results to the user's arrays."""
        for room, array in zip(each(received), each(recv), strict=True):
            if room is not array:
                array[...] = room


def is_plain(buffers: Any) -> bool:
    """Return whether an array, or every array of a list, is contiguous."""
    if type(buffers) is list:
        return all(array.flags.c_contiguous for array in buffers)
    return buffers is None or bool(buffers.flags.c_contiguous)


def packed(buffers: Any) -> Any:
    """Return contiguous arrays: the given ones, or copies made on the current stream."""
    if isinstance(buffers, list):
        return [plain(array) for array in buffers]
    return None if buffers is None else plain(buffers)


def rooms_for(buffers: Any) -> Any:
    """Return contiguous arrays to receive in: the given ones, or new ones."""
    if isinstance(buffers, list):
        return [rooms_for(array) for array in buffers]
    if buffers is None or buffers.flags.c_contiguous:
        return buffers
    return cupy_module().empty(buffers.shape, buffers.dtype)


def blocks_of(buffers: Any, size: int, rows: tuple[int, ...] | None = None) -> list[Block]:
    """Return address and bytes of each rank's block: the arrays of a list, `rows` of one array, or equal parts."""
    if isinstance(buffers, list):
        return [(array.data.ptr, array.nbytes) for array in buffers]
    begin = buffers.data.ptr
    if rows is None:
        nbytes = buffers.nbytes // size
        return [(begin + k * nbytes, nbytes) for k in range(size)]
    row_bytes = buffers.nbytes // max(1, buffers.shape[0])
    ends = accumulate(rows)
    return [(begin + (end - count) * row_bytes, count * row_bytes) for count, end in zip(rows, ends, strict=True)]


def exchange(on: LaunchStream, give: dict[int, Block], take: dict[int, Block]) -> None:
    """Enqueue messages to and from other ranks as one operation; skip empty ones."""
    comm, stream = on.communicator, on.stream_address
    with on.grouped():
        for peer, (address, nbytes) in give.items():
            if nbytes:
                comm.send(address, nbytes, UINT8, peer, stream)
        for peer, (address, nbytes) in take.items():
            if nbytes:
                comm.recv(address, nbytes, UINT8, peer, stream)


def copy(on: LaunchStream, source: Block, target: Block) -> None:
    runtime = on.cuda.runtime
    if source[1] and source[0] != target[0]:
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target[0], source[0], source[1], kind, on.stream_address)


class Broadcast(NcclPlan):
    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        _broadcast(on, received, self.root or 0)


def _broadcast(on: LaunchStream, array: Any, root: int) -> None:
    address, nbytes = array.data.ptr, array.nbytes
    if nbytes:
        on.communicator.broadcast(address, address, nbytes, UINT8, root, on.stream_address)


class AllGather(NcclPlan):
    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        if sent.nbytes:
            on.communicator.all_gather(sent.data.ptr, received.data.ptr, sent.nbytes, UINT8, on.stream_address)


class AllGatherList(AllGather):
    """Into a list of arrays of equal size, through one array."""

    computes = True

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        return packed(send), cupy_module().empty((self.size, *send.shape), send.dtype)

    def finish(self, received: Any, recv: Any) -> None:
        for place, array in enumerate(recv):
            array[...] = received[place].reshape(array.shape)


class AllGatherVarying(NcclPlan):
    """Into a list of arrays of different sizes: a broadcast from each rank."""

    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        own = received[self.rank].data.ptr
        copy(on, (sent.data.ptr, sent.nbytes), (own, sent.nbytes))
        with on.grouped():
            for place, array in enumerate(received):
                _broadcast(on, array, place)


class Gather(NcclPlan):
    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        mine = (sent.data.ptr, sent.nbytes)
        if self.rank != self.root:
            exchange(on, {self.root or 0: mine}, {})
            return
        take = dict(enumerate(blocks_of(received, self.size)))
        copy(on, mine, take.pop(self.rank))
        exchange(on, {}, take)


class Scatter(NcclPlan):
    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        mine = (received.data.ptr, received.nbytes)
        if self.rank != self.root:
            exchange(on, {}, {self.root or 0: mine})
            return
        give = dict(enumerate(blocks_of(sent, self.size)))
        copy(on, give.pop(self.rank), mine)
        exchange(on, give, {})


class AllToAll(NcclPlan):
    """A message to and from every rank: blocks of an array, rows of it, or arrays of a list."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._rows_to = None if call.splits is None else call.splits[0]
        self._rows_from = None if call.splits is None else call.splits[1]

    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        give = dict(enumerate(blocks_of(sent, self.size, self._rows_to)))
        take = dict(enumerate(blocks_of(received, self.size, self._rows_from)))
        copy(on, give.pop(self.rank), take.pop(self.rank))
        exchange(on, give, take)


class AllGatherCoalesced(AllGather):
    """Several all_gathers as one operation.

    The output is one array per input; or, for all_gather_coalesced, the arrays of rank 0, then those of rank 1, and so
    on.
    """

    computes = True

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        assert isinstance(call.send, list)
        assert isinstance(call.recv, list)
        self._by_rank = call.collective.name == "all_gather_coalesced"

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        if not self._by_rank:
            return packed(send), rooms_for(recv)
        return packed(send), [cupy_module().empty((self.size, *array.shape), array.dtype) for array in send]

    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        with on.grouped():
            for block, whole in zip(sent, received, strict=True):
                super().go(on, block, whole)

    def finish(self, received: Any, recv: Any) -> None:
        if not self._by_rank:
            super().finish(received, recv)
            return
        for place, array in enumerate(recv):
            rank, number = divmod(place, len(received))
            array[...] = received[number][rank].reshape(array.shape)


class Barrier(NcclPlan):
    """An all_reduce of one byte."""

    def go(self, on: LaunchStream, sent: Any, received: Any) -> None:
        address = received.data.ptr
        on.communicator.all_reduce(address, address, 1, UINT8, 0, on.stream_address)
