"""Arrays in the memory of a GPU on a backend for those of the CPU: copied to pinned memory there, and back.

The call itself is that of the copies, with all its checks and its plan. A copy waits for what the caller's current
stream was asked to do before the call, and the caller for the copies: so what is received is there when the call
returns, and of an async call when its Work is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from meshdist.cupy_arrays import as_device_array, as_device_buffers, cupy_module, on_current_stream, plain
from meshdist.device_calls import DeviceCalls, Parcel, Request
from meshdist.errors import DistBackendError, DistError
from meshdist.messages import Messages
from meshdist.work import ReceiptWork, Work


class StagedCalls(DeviceCalls):
    """The calls of a group whose backend takes arrays on the CPU alone."""

    def __init__(self) -> None:
        # By GPU: what copies for async calls, whose thread has no stream of its own.
        self._streams: dict[int, Any] = {}

    def submit(self, request: Request) -> Any:
        group, collective = request.group, request.collective
        given, taken = self.named_buffers(request)
        in_place = collective.in_place and request.recv is request.send
        copies = Copies(self._streams)
        send = copies.of(given)
        recv = send if in_place else copies.of(taken)
        # What is written in parts must come back with the rest as it was: all is fetched.
        copies.fetch()
        rest = (request.op, request.root, request.async_op, request.splits, request.timeout_s)
        # By the class: who watches the group's calls has been told of this one.
        made = type(group).submit(group, collective, send, recv, *rest)
        if not request.async_op:
            copies.bring(taken, recv)
            return request.recv
        work = Work(request.where, request.recv)
        made.watch(lambda: _settle(work, made, copies, taken, recv))
        return work

    def send(self, parcel: Parcel) -> None:
        assert parcel.peer is not None
        Messages.send(parcel.group.messages, self._fetched(parcel), parcel.peer, parcel.tag, parcel.of)

    def recv(self, parcel: Parcel) -> int:
        array, copies, room = self._room(parcel)
        source = Messages.recv(parcel.group.messages, room, parcel.peer, parcel.tag, parcel.of)
        copies.bring(array, room)
        return source

    def isend(self, parcel: Parcel) -> Work:
        assert parcel.peer is not None
        return Messages.isend(parcel.group.messages, self._fetched(parcel), parcel.peer, parcel.tag)

    def irecv(self, parcel: Parcel) -> Work:
        array, copies, room = self._room(parcel)
        made = Messages.irecv(parcel.group.messages, room, parcel.peer, parcel.tag)
        work = ReceiptWork(parcel.where, parcel.tensor)

        def arrive() -> None:
            if made.is_success():
                work.source = made.source_rank()
            _settle(work, made, copies, array, room)

        made.watch(arrive)
        return work

    def named_buffers(self, request: Request) -> tuple[Any, Any]:
        """Return what is sent and what is received, as CuPy's arrays."""
        group, collective = request.group, request.collective
        in_place = collective.in_place and request.recv is request.send
        names, lists = collective.names, collective.lists
        how = {"written": in_place}
        given = _named(group, request.where, as_device_buffers, request.send, names[0], "send" in lists, **how)
        if in_place:
            return given, given
        how = {"written": True}
        taken = _named(group, request.where, as_device_buffers, request.recv, names[1], "recv" in lists, **how)
        return given, taken

    def _fetched(self, parcel: Parcel) -> Any:
        array = _named(parcel.group, parcel.where, as_device_array, parcel.tensor, "tensor")
        copies = Copies(self._streams)
        copy = copies.of(array)
        copies.fetch()
        return copy

    def _room(self, parcel: Parcel) -> tuple[Any, Copies, Any]:
        array = _named(parcel.group, parcel.where, as_device_array, parcel.tensor, "tensor", written=True)
        copies = Copies(self._streams)
        room = copies.of(array)
        copies.settle_devices()
        return array, copies, room


class Copies:
    """Arrays of the GPUs of this process, and their copies in pinned memory.

    Args:
        streams: Those of copies that no caller's stream is for, by GPU; made as they are needed.
    """

    def __init__(self, streams: dict[int, Any]) -> None:
        self._cupy = cupy_module()
        self._streams = streams
        # The array, its copy, the number of its GPU.
        self._pairs: list[tuple[Any, Any, int]] = []

    def of(self, buffers: Any) -> Any:
        """Return the copies of an array, or of a list of them: rooms, until `fetch`."""
        if isinstance(buffers, list):
            return [self._room_of(array) for array in buffers]
        return None if buffers is None else self._room_of(buffers)

    def fetch(self) -> None:
        """Copy all elements to the CPU, behind what the current stream has been asked to do, and wait for it."""
        cuda = self._cupy.cuda
        kind = cuda.runtime.memcpyDeviceToHost
        for device in self._devices():
            with cuda.Device(device):
                stream = cuda.get_current_stream()
                mine = [(array, room) for array, room, where in self._pairs if where == device and room.size]
                # These live until the copies are there.
                packed = [plain(array) for array, _ in mine]
                for array, (_, room) in zip(packed, mine, strict=True):
                    cuda.runtime.memcpyAsync(room.ctypes.data, array.data.ptr, room.nbytes, kind, stream.ptr)
                stream.synchronize()

    def settle_devices(self) -> None:
        """Wait for what the current streams have been asked to do: it may still use what is going to be written."""
        for device in self._devices():
            on_current_stream(device, lambda stream: stream.synchronize())

    def bring(self, buffers: Any, rooms: Any, *, aside: bool = False) -> None:
        """Copy to the GPU what has been received, and wait for it.

        Args:
            buffers: The arrays there.
            rooms: Their copies, as `of` returned them.
            aside: Not by the current stream: that of the calling thread is nobody's.
        """
        pairs = list(zip(_each(buffers), _each(rooms), strict=True))
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
                # The pinned memory is given back with the copies: nothing may still be reading it then.
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


def _settle(work: Work, made: Work, copies: Copies, buffers: Any, rooms: Any) -> None:
    error = made.exception()
    if error is None:
        try:
            copies.bring(buffers, rooms, aside=True)
        except Exception as failure:  # it belongs to whoever waits for this work
            words = str(failure) if isinstance(failure, DistError) else f"{type(failure).__name__}: {failure}"
            error = DistBackendError(f"copying to the GPU failed: {words}")
    work.settle(error)


def _named(group: Any, where: str, function: Any, *args: Any, **how: Any) -> Any:
    try:
        return group.named(where, lambda: function(*args, **how))
    except DistBackendError as error:  # there is no CuPy
        raise DistBackendError(f"{where}: {error}") from None


def _each(buffers: Any) -> list[Any]:
    if buffers is None:
        return []
    return buffers if isinstance(buffers, list) else [buffers]
