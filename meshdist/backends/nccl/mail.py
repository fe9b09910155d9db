"""Messages of backend `nccl`: what is posted at once is one operation."""

from __future__ import annotations

from typing import Any

from meshdist.backends.nccl.lane import Lane
from meshdist.backends.nccl.library import UINT8
from meshdist.backends.nccl.works import DeviceWork
from meshdist.cupy_arrays import cupy_module, plain
from meshdist.debug.flight_recorder import Record


class Message:
    """A message to or from another rank.

    Attributes:
        array: What is sent, or received in.
        peer: The other side, as a rank of the lane.
        work: What the caller holds.
        is_send: It goes to the other side.
        record: That of the flight recorder.
    """

    __slots__ = ("array", "is_send", "peer", "record", "work")

    def __init__(self, array: Any, peer: int, work: DeviceWork, record: Record, *, is_send: bool) -> None:
        self.array, self.peer, self.work, self.is_send, self.record = array, peer, work, is_send, record


class Batch:
    """Messages that are posted together: then none of them waits for another.

    It is a plan that carries its arrays itself.

    Attributes:
        messages: In the order in which they were begun.
    """

    def __init__(self, messages: list[Message] | None = None) -> None:
        self.messages = messages or []

    def records(self) -> list[Record]:
        """Return the records of the messages."""
        return [message.record for message in self.messages]

    def launch(self, lane: Lane, send: Any, recv: Any) -> None:
        """Enqueue them."""
        if all(message.array.flags.c_contiguous for message in self.messages):
            self._go(lane, [message.array for message in self.messages])
            return
        cupy = cupy_module()
        with lane.stream:
            arrays = [
                plain(message.array)
                if message.is_send or message.array.flags.c_contiguous
                else cupy.empty(message.array.shape, message.array.dtype)
                for message in self.messages
            ]
            self._go(lane, arrays)
            for message, array in zip(self.messages, arrays, strict=True):
                if array is not message.array and not message.is_send:
                    message.array[...] = array

    def _go(self, lane: Lane, arrays: list[Any]) -> None:
        library, comm, stream = lane.library, lane.communicator, lane.stream_address
        library.group_start()
        try:
            for message, array in zip(self.messages, arrays, strict=True):
                if array.nbytes:
                    enqueue = comm.send if message.is_send else comm.recv
                    enqueue(array.data.ptr, array.nbytes, UINT8, message.peer, stream)
        finally:
            library.group_end()


class Greeting:
    """The first message on a lane between two ranks, of a byte: with it NCCL connects them.

    Args:
        byte: What is sent, or received in.
        is_send: Whether this rank sends; the sender is the first on the lane.
    """

    def __init__(self, byte: Any, *, is_send: bool) -> None:
        self._byte, self._is_send = byte, is_send

    def launch(self, lane: Lane, send: Any, recv: Any) -> None:
        """Enqueue it; blocks the host until the other side has come."""
        comm = lane.communicator
        enqueue = comm.send if self._is_send else comm.recv
        enqueue(self._byte.data.ptr, 1, UINT8, int(self._is_send), lane.stream_address)
