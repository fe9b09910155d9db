"""Messages of backend `nccl`: those posted together are one operation."""

from __future__ import annotations

from typing import Any

from meshdist.arrays.device import cupy_module, plain
from meshdist.backends.nccl.comm_stream import CommStream
from meshdist.backends.nccl.library import UINT8
from meshdist.backends.nccl.works import DeviceWork
from meshdist.runtime.flight_recorder import Record


class Message:
    """A message to or from another rank.

    Attributes:
        peer: The other side, as a rank of the communicator.
        work: What the caller holds.
        record: Its record in the flight recorder.
    """

    __slots__ = ("array", "is_send", "peer", "record", "work")

    def __init__(self, array: Any, peer: int, work: DeviceWork, record: Record, *, is_send: bool) -> None:
        self.array, self.peer, self.work, self.is_send, self.record = array, peer, work, is_send, record


class Batch:
    """Messages that are posted as one operation, so that none waits for another; holds its arrays itself."""

    def __init__(self, messages: list[Message] | None = None) -> None:
        self.messages = messages or []

    def records(self) -> list[Record]:
        return [message.record for message in self.messages]

    def launch(self, comm_stream: CommStream, send: Any, recv: Any) -> None:
        if all(message.array.flags.c_contiguous for message in self.messages):
            self._go(comm_stream, [message.array for message in self.messages])
            return
        cupy = cupy_module()
        with comm_stream.stream:
            arrays = [
                plain(message.array)
                if message.is_send or message.array.flags.c_contiguous
                else cupy.empty(message.array.shape, message.array.dtype)
                for message in self.messages
            ]
            self._go(comm_stream, arrays)
            for message, array in zip(self.messages, arrays, strict=True):
                if array is not message.array and not message.is_send:
                    message.array[...] = array

    def _go(self, comm_stream: CommStream, arrays: list[Any]) -> None:
        library, comm, stream = comm_stream.library, comm_stream.communicator, comm_stream.stream_address
        library.group_start()
        try:
            for message, array in zip(self.messages, arrays, strict=True):
                if array.nbytes:
                    enqueue = comm.send if message.is_send else comm.recv
                    enqueue(array.data.ptr, array.nbytes, UINT8, message.peer, stream)
        finally:
            library.group_end()


class ConnectOp:
    """The first message between two ranks: one byte, which makes NCCL connect them. The sender is rank 0."""

    def __init__(self, byte: Any, *, is_send: bool) -> None:
        self._byte, self._is_send = byte, is_send

    def launch(self, comm_stream: CommStream, send: Any, recv: Any) -> None:
        """Enqueue it; blocks the host until the peer has arrived."""
        comm = comm_stream.communicator
        enqueue = comm.send if self._is_send else comm.recv
        enqueue(self._byte.data.ptr, 1, UINT8, int(self._is_send), comm_stream.stream_address)
