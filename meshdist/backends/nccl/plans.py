"""The plans of backend `nccl`: what is enqueued for a collective.

A plan has three parts, all on the stream of the lane. `prepare` makes of the user's arrays what NCCL can take, with
kernels of CuPy's where that needs any; `go` enqueues NCCL's operations; `finish` brings what came where the user wants
it. Where the arrays are plain, and NCCL has the collective, there is nothing but the middle part.

What only moves is moved as bytes, so that every dtype is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from meshdist.backends.nccl.library import UINT8
from meshdist.call import Call
from meshdist.cupy_arrays import cupy_module, plain
from meshdist.debug.flight_recorder import CallFacts

if TYPE_CHECKING:
    from meshdist.backends.nccl.lane import Lane

# The address of a block, and its bytes.
Block = tuple[int, int]


class NcclPlan(ABC):
    """A collective prepared.

    Args:
        call: The call, with CuPy's arrays.

    Attributes:
        computes: There is something to prepare or to finish whatever the arrays.
        apart: What is sent must not share memory with what is received.
        facts: What the flight recorder keeps of its calls.
    """

    computes = False
    facts: CallFacts | None = None

    def __init__(self, call: Call) -> None:
        self.rank, self.size, self.root = call.rank, call.size, call.root
        self.apart = not call.collective.in_place

    def launch(self, lane: Lane, send: Any, recv: Any) -> None:
        """Enqueue the call."""
        if not self.computes and is_plain(send) and (recv is send or is_plain(recv)):
            self.go(lane, send, recv)
            return
        with lane.stream:
            sent, received = self.prepare(send, recv)
            self.go(lane, sent, received)
            self.finish(received, recv)

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        """Return what NCCL sends and receives, for what the user does."""
        sent = packed(send)
        return sent, sent if recv is send else rooms_for(recv)

    @abstractmethod
    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        """Enqueue NCCL's operations on plain arrays."""

    def finish(self, received: Any, recv: Any) -> None:
        """Bring what was received where the user wants it."""
        for room, array in zip(each(received), each(recv), strict=True):
            if room is not array:
                array[...] = room


def is_plain(buffers: Any) -> bool:
    """Return whether the elements of an array, or of every array of a list, lie side by side."""
    if type(buffers) is list:
        return all(array.flags.c_contiguous for array in buffers)
    return buffers is None or bool(buffers.flags.c_contiguous)


def each(buffers: Any) -> list[Any]:
    """Return the arrays of what is sent or received as a list."""
    if buffers is None:
        return []
    return buffers if isinstance(buffers, list) else [buffers]


def packed(buffers: Any) -> Any:
    """Return plain arrays: those given where they are, else copies, by the current stream."""
    if isinstance(buffers, list):
        return [plain(array) for array in buffers]
    return None if buffers is None else plain(buffers)


def rooms_for(buffers: Any) -> Any:
    """Return plain arrays to receive in: those given where they are plain, else new ones."""
    if isinstance(buffers, list):
        return [rooms_for(array) for array in buffers]
    if buffers is None or buffers.flags.c_contiguous:
        return buffers
    return cupy_module().empty(buffers.shape, buffers.dtype)


def blocks_of(buffers: Any, size: int, rows: tuple[int, ...] | None = None) -> list[Block]:
    """Return where the block of each rank lies: arrays of a list, so many rows of one, or equal parts of it."""
    if isinstance(buffers, list):
        return [(array.data.ptr, array.nbytes) for array in buffers]
    begin = buffers.data.ptr
    if rows is None:
        nbytes = buffers.nbytes // size
        return [(begin + k * nbytes, nbytes) for k in range(size)]
    row_bytes = buffers.nbytes // max(1, buffers.shape[0])
    ends = accumulate(rows)
    return [(begin + (end - count) * row_bytes, count * row_bytes) for count, end in zip(rows, ends, strict=True)]


def exchange(lane: Lane, give: dict[int, Block], take: dict[int, Block]) -> None:
    """Enqueue messages to and from other ranks as one operation; empty ones are none."""
    library, comm, stream = lane.library, lane.communicator, lane.stream_address
    library.group_start()
    try:
        for peer, (address, nbytes) in give.items():
            if nbytes:
                comm.send(address, nbytes, UINT8, peer, stream)
        for peer, (address, nbytes) in take.items():
            if nbytes:
                comm.recv(address, nbytes, UINT8, peer, stream)
    finally:
        library.group_end()


def copy(lane: Lane, source: Block, target: Block) -> None:
    """Enqueue a copy on this GPU."""
    runtime = lane.cuda.runtime
    if source[1] and source[0] != target[0]:
        kind = runtime.memcpyDeviceToDevice
        runtime.memcpyAsync(target[0], source[0], source[1], kind, lane.stream_address)


class Broadcast(NcclPlan):
    """From the root to all, in place."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        address, nbytes = received.data.ptr, received.nbytes
        if nbytes:
            lane.communicator.broadcast(address, address, nbytes, UINT8, self.root or 0, lane.stream_address)


class AllGather(NcclPlan):
    """Into one array."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        if sent.nbytes:
            lane.communicator.all_gather(sent.data.ptr, received.data.ptr, sent.nbytes, UINT8, lane.stream_address)


class AllGatherList(NcclPlan):
    """Into a list of arrays of one size: by way of one array."""

    computes = True

    def prepare(self, send: Any, recv: Any) -> tuple[Any, Any]:
        return packed(send), cupy_module().empty((self.size, *send.shape), send.dtype)

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        if sent.nbytes:
            lane.communicator.all_gather(sent.data.ptr, received.data.ptr, sent.nbytes, UINT8, lane.stream_address)

    def finish(self, received: Any, recv: Any) -> None:
        for place, array in enumerate(recv):
            array[...] = received[place].reshape(array.shape)


class AllGatherVarying(NcclPlan):
    """Into a list of arrays of several sizes: a broadcast from each rank."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        own = received[self.rank].data.ptr
        copy(lane, (sent.data.ptr, sent.nbytes), (own, sent.nbytes))
        library, comm = lane.library, lane.communicator
        library.group_start()
        try:
            for place, array in enumerate(received):
                if array.nbytes:
                    comm.broadcast(array.data.ptr, array.data.ptr, array.nbytes, UINT8, place, lane.stream_address)
        finally:
            library.group_end()


class Gather(NcclPlan):
    """Into a list on the root: messages to it."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        mine = (sent.data.ptr, sent.nbytes)
        if self.rank != self.root:
            exchange(lane, {self.root or 0: mine}, {})
            return
        take = dict(enumerate(blocks_of(received, self.size)))
        copy(lane, mine, take.pop(self.rank))
        exchange(lane, {}, take)


class Scatter(NcclPlan):
    """Of a list on the root: messages from it."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        mine = (received.data.ptr, received.nbytes)
        if self.rank != self.root:
            exchange(lane, {}, {self.root or 0: mine})
            return
        give = dict(enumerate(blocks_of(sent, self.size)))
        copy(lane, give.pop(self.rank), mine)
        exchange(lane, give, {})


class AllToAll(NcclPlan):
    """Blocks of an array, rows of it, or arrays of a list: a message to and from every rank."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._rows_to = None if call.splits is None else call.splits[0]
        self._rows_from = None if call.splits is None else call.splits[1]

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        give = dict(enumerate(blocks_of(sent, self.size, self._rows_to)))
        take = dict(enumerate(blocks_of(received, self.size, self._rows_from)))
        copy(lane, give.pop(self.rank), take.pop(self.rank))
        exchange(lane, give, take)


class AllGatherCoalesced(NcclPlan):
    """Several arrays, each into one of its own, or into one for each rank; as one operation.

    What is received is a list of the arrays for rank 0, those for rank 1 and so on, or an array for each input.
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

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        library, comm = lane.library, lane.communicator
        library.group_start()
        try:
            for block, whole in zip(sent, received, strict=True):
                if block.nbytes:
                    comm.all_gather(block.data.ptr, whole.data.ptr, block.nbytes, UINT8, lane.stream_address)
        finally:
            library.group_end()

    def finish(self, received: Any, recv: Any) -> None:
        if not self._by_rank:
            super().finish(received, recv)
            return
        for place, array in enumerate(recv):
            rank, number = divmod(place, len(received))
            array[...] = received[number][rank].reshape(array.shape)


class Barrier(NcclPlan):
    """A byte that all ranks add to: who has the sum knows that all have come."""

    def go(self, lane: Lane, sent: Any, received: Any) -> None:
        address = received.data.ptr
        lane.communicator.all_reduce(address, address, 1, UINT8, 0, lane.stream_address)
