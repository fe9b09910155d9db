"""GPU arrays on a backend for CPU arrays, staged through pinned memory.

The call itself is that of the copies, with all its checks and its plan. The copy to the CPU waits for the work on the
caller's current stream, and the caller for the copies: so received data is in place when the call returns or, for an
async call, when its Work is complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.arrays.device import as_device_array, cupy_module, on_current_stream, plain
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import each
from meshdist.runtime.device_calls import DeviceCalls, Parcel, Request, named
from meshdist.runtime.work import ReceiptWork, Work


class HostStagedCalls(DeviceCalls):
    """The calls of a group whose backend takes CPU arrays only."""

    sends_to_itself = True

    def __init__(self) -> None:
        super().__init__()
        # By GPU: the stream for copies of async calls, whose thread has no current stream.
        self._streams: dict[int, Any] = {}

    def submit(self, request: Request) -> Any:
        group, collective = request.group, request.collective
        given, taken = self.arrays(request)
        copies = Copies(self._streams)
        send = copies.of(given)
        recv = send if given is taken else copies.of(taken)
        # Fetch the outputs too: parts of them that the call does not write must come back unchanged.
        copies.fetch()
        rest = (request.op, request.root, request.async_op, request.splits, request.timeout_s)
        made = group.submit_unobserved(collective, send, recv, *rest)
        if not isinstance(made, Work):
            copies.bring(taken, recv)
            return request.recv
        work = Work(request.error_prefix, request.recv)
        work._stand_for(made)
        made.add_callback(lambda: _complete(work, made, copies, taken, recv))
        return work

    def send(self, parcel: Parcel) -> None:
        assert parcel.peer is not None
        parcel.group.messages.unobserved("send")(self._fetched(parcel), parcel.peer, parcel.tag, parcel.of)

    def recv(self, parcel: Parcel) -> int:
        array, copies, room = self._room(parcel)
        source: int = parcel.group.messages.unobserved("recv")(room, parcel.peer, parcel.tag, parcel.of)
        copies.bring(array, room)
        return source

    def isend(self, parcel: Parcel) -> Work:
        assert parcel.peer is not None
        work: Work = parcel.group.messages.unobserved("isend")(
            self._fetched(parcel), parcel.peer, parcel.tag, parcel.of
        )
        return work

    def irecv(self, parcel: Parcel) -> Work:
        array, copies, room = self._room(parcel)
        made = parcel.group.messages.unobserved("irecv")(room, parcel.peer, parcel.tag, parcel.of)
        work = ReceiptWork(parcel.error_prefix, parcel.tensor)

        work._stand_for(made)

        def arrive() -> None:
            if made.is_success():
                work.source = made.source_rank()
            _complete(work, made, copies, array, room)

        made.add_callback(arrive)
        return work

    def _fetched(self, parcel: Parcel) -> Any:
        array = named(parcel, as_device_array, parcel.tensor, "tensor")
        copies = Copies(self._streams)
        copy = copies.of(array)
        copies.fetch()
        return copy

    def _room(self, parcel: Parcel) -> tuple[Any, Copies, Any]:
        array = named(parcel, as_device_array, parcel.tensor, "tensor", written=True)
        copies = Copies(self._streams)
        room = copies.of(array)
        copies.settle_devices()
        return array, copies, room


class Copies:
    """Arrays of the GPUs of this process, and their copies in pinned memory.

    `streams` has, by GPU, the stream for copies outside a caller's stream; created at first use.
    """

    def __init__(self, streams: dict[int, Any]) -> None:
        self._cupy = cupy_module()
        self._streams = streams
        # The array, its copy, the number of its GPU.
        self._pairs: list[tuple[Any, Any, int]] = []

    def of(self, buffers: Any) -> Any:
        """Return the copies of an array or a list of arrays, uninitialized until `fetch`."""
        if isinstance(buffers, list):
            return [self._room_of(array) for array in buffers]
        return None if buffers is None else self._room_of(buffers)

    def fetch(self) -> None:
        """Copy all elements to the CPU, after the work on the current stream, and wait for it."""
        cuda = self._cupy.cuda
        kind = cuda.runtime.memcpyDeviceToHost
        for device in self._devices():
            with cuda.Device(device):
                stream = cuda.get_current_stream()
                mine = [(array, room) for array, room, there in self._pairs if there == device and room.size]
                # Keep these alive until the copies are complete.
                packed = [plain(array) for array, _ in mine]
                for array, (_, room) in zip(packed, mine, strict=True):
                    cuda.runtime.memcpyAsync(room.ctypes.data, array.data.ptr, room.nbytes, kind, stream.ptr)
                stream.synchronize()

    def settle_devices(self) -> None:
        """Wait for the work on the current streams, which may still use the arrays that are going to be written."""
        for device in self._devices():
            on_current_stream(device, lambda stream: stream.synchronize())

    def bring(self, buffers: Any, rooms: Any, *, aside: bool = False) -> None:
        """Copy the received data to the GPU arrays `buffers` from `rooms`, their copies by `of`, and wait for it.

        With `aside`, use a stream of our own: the current stream of the calling thread belongs to no caller.
        """
        pairs = list(zip(each(buffers), each(rooms), strict=True))
        cuda = self._cupy.cuda
        kind = cuda.runtime.memcpyHostToDevice
        for device in self._devices():
            with cuda.Device(device):
                if aside and device not in self._streams:
                    self._streams[device] = cuda.Stream(non_blocking=True)
                stream = self._streams[device] if aside else cuda.get_current_stream()
                with stream:
                    for array, room in pairs:
                        if int(array.device.id) == device and room.size:
                            there = array if array.flags.c_contiguous else self._cupy.empty(array.shape, array.dtype)
                            cuda.runtime.memcpyAsync(there.data.ptr, room.ctypes.data, room.nbytes, kind, stream.ptr)
                            if there is not array:
                                array[...] = there
                # The pinned memory is freed with the copies: no transfer may still read it.
                stream.synchronize()

    def _devices(self) -> list[int]:
        return sorted({device for _, _, device in self._pairs})

    def _room_of(self, array: Any) -> Any:
        nbytes = int(array.nbytes)
        if nbytes == 0:
            room = np.empty(array.shape, array.dtype)
        else:
            pinned = self._cupy.cuda.alloc_pinned_memory(nbytes)
            room = np.frombuffer(pinned, np.uint8, nbytes).view(array.dtype).reshape(array.shape)
        self._pairs.append((array, room, int(array.device.id)))
        return room


def _complete(work: Work, made: Work, copies: Copies, buffers: Any, rooms: Any) -> None:
    error = made.exception()
    if error is None:
        try:
            copies.bring(buffers, rooms, aside=True)
        except Exception as failure:  # raised where the work is waited for
            words = str(failure) if isinstance(failure, DistError) else f"{type(failure).__name__}: {failure}"
            error = DistBackendError(f"copying to the GPU failed: {words}")
    work.complete(error)
