"""Messages of the `nccl` backend: those posted together are one operation, unordered with respect to collectives.

NCCL sends messages on a communicator, which both ranks have to create. The first message must not wait for that: in a
ring, every rank would wait for the next. So a thread creates it with the other rank, at a moment when both can
(`launch_gate`), and messages begun meanwhile are posted afterwards. Each direction has a CommStream of its own, so that
two ranks that both send first do not deadlock.

The first message on a communicator blocks the host until the peer arrives. So the threads of both ranks first exchange
a byte on each CommStream; messages of the program then find them connected.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import copy_context
from typing import Any, Protocol

from meshdist.arrays.device import cupy_module, plain
from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.nccl.comm_stream import CommStream, LaunchStream
from meshdist.backends.nccl.launch_gate import LaunchGate, PairAgreement
from meshdist.backends.nccl.library import UINT8, Library
from meshdist.backends.nccl.works import DeviceWork
from meshdist.core import Record
from meshdist.errors import DistError
from meshdist.runtime.waiting import wait_until
from meshdist.system.deadline import Deadline
from meshdist.system.platform import start_thread


class Message:
    """A message to or from `peer`, a rank of the communicator, with the Work that the caller holds."""

    __slots__ = ("array", "is_send", "peer", "record", "work")

    def __init__(self, array: Any, peer: int, work: DeviceWork, record: Record, *, is_send: bool) -> None:
        self.array, self.peer, self.work, self.is_send, self.record = array, peer, work, is_send, record


class Batch:
    """Messages that are posted as one operation, so that none waits for another; holds its arrays itself."""

    def __init__(self, messages: list[Message] | None = None) -> None:
        self.messages = messages or []

    def records(self) -> list[Record]:
        return [message.record for message in self.messages]

    def launch(self, on: LaunchStream, send: Any, recv: Any) -> None:
        if all(message.array.flags.c_contiguous for message in self.messages):
            self._go(on, [message.array for message in self.messages])
            return
        cupy = cupy_module()
        with on.stream:
            arrays = [
                plain(message.array)
                if message.is_send or message.array.flags.c_contiguous
                else cupy.empty(message.array.shape, message.array.dtype)
                for message in self.messages
            ]
            self._go(on, arrays)
            for message, array in zip(self.messages, arrays, strict=True):
                if array is not message.array and not message.is_send:
                    message.array[...] = array

    def _go(self, on: LaunchStream, arrays: list[Any]) -> None:
        library, comm, stream = on.library, on.communicator, on.stream_address
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

    def launch(self, on: LaunchStream, send: Any, recv: Any) -> None:
        """Enqueue it; blocks the host until the peer has arrived."""
        comm = on.communicator
        enqueue = comm.send if self._is_send else comm.recv
        enqueue(self._byte.data.ptr, 1, UINT8, int(self._is_send), on.stream_address)


class PairBackend(Protocol):
    """What a Pair needs of the group's backend."""

    options: BackendOptions
    rank: int
    library: Library
    cuda: Any
    gate: LaunchGate
    error: DistError | None

    def check_open(self) -> None:
        """Raise if the backend has given up, or the group is destroyed."""

    def check(self) -> None:
        """Raise the error that the backend has given up with, if it has."""

    def fail(self, error: BaseException) -> None: ...

    def new_comm_stream(self, place: str, members: tuple[int, ...], error_prefix: str) -> CommStream: ...


class Pair:
    """The messages between this rank and `peer`; `device` is the number of this rank's GPU."""

    def __init__(self, backend: PairBackend, peer: int, device: int) -> None:
        self._backend, self._device = backend, device
        self._low, self._high = sorted((backend.rank, peer))
        self._lock = threading.Lock()
        # By direction: True is that in which this rank sends. None until they are created.
        self._comm_streams: dict[bool, CommStream] | None = None
        self._waiting: list[tuple[bool, Batch, str, float, Sequence[DeviceWork], Any]] = []
        self._thread: threading.Thread | None = None

    def is_busy(self, *, sends_alone: bool = False) -> bool:
        """Return whether messages are waiting or in flight; with `sends_alone`, only messages that this rank sends."""
        if any(is_send or not sends_alone for is_send, *_ in list(self._waiting)):
            return True
        comm_streams = self._comm_streams or {}
        return any(comm_stream.flights for is_send, comm_stream in comm_streams.items() if is_send or not sends_alone)

    def check_stream(self, error_prefix: str) -> None:
        """Raise ValueError for a message that cannot be posted later: the current stream is captured into a graph."""
        cuda = self._backend.cuda
        if self._comm_streams is not None:
            return
        with cuda.Device(self._device):
            if cuda.runtime.streamIsCapturing(cuda.get_current_stream().ptr):
                raise ValueError(
                    f"{error_prefix}: the first message between two ranks cannot be captured into a graph, since"
                    " another thread posts it when they are connected; send one before the capture"
                )

    def post(
        self, batch: Batch, error_prefix: str, timeout_s: float, works: Sequence[DeviceWork], *, is_send: bool
    ) -> None:
        """Post messages of one direction, now or once the CommStreams exist; the current device is the pair's."""
        with self._lock:
            if self._comm_streams is not None:
                self._comm_streams[is_send].launch(
                    batch.launch, batch.messages, None, error_prefix, timeout_s, works, batch.records()
                )
                return
            cuda = self._backend.cuda
            start = cuda.Event(disable_timing=True)
            start.record(cuda.get_current_stream())
            for work in works:
                work.await_post(self._backend.check)
            self._waiting.append((is_send, batch, error_prefix, timeout_s, works, start))
            if self._thread is None:
                run = copy_context().run
                name = f"meshdist-nccl-pair-{self._low}-{self._high}"
                self._backend.gate.begin_connecting()
                self._thread = threading.Thread(target=run, args=(self._make, error_prefix), name=name, daemon=True)
                try:
                    start_thread(self._thread)
                except BaseException:
                    self._backend.gate.end_connecting()
                    raise

    def fail(self, error: DistError | None) -> None:
        """Complete the messages that wait for the CommStreams with an error."""
        for _, _, _, _, works, _ in list(self._waiting):
            for work in works:
                work.complete(error)

    def _make(self, error_prefix: str) -> None:
        backend = self._backend
        try:
            # CUDA creates a context on the thread's current device at its first call, which may be a query of an event.
            backend.cuda.Device(self._device).use()
            comm_streams = self._connected(error_prefix)
            with self._lock:
                for is_send, batch, of, timeout_s, works, start in self._waiting:
                    comm_streams[is_send].launch(
                        batch.launch, batch.messages, None, of, timeout_s, works, batch.records(), start
                    )
                self._waiting.clear()
                self._comm_streams = comm_streams
        except BaseException as error:  # raised where the messages are waited for
            failure = backend.library.failure(error)
            if isinstance(failure, DistError):
                failure.locate(error_prefix)
            backend.fail(failure)
            self.fail(backend.error)
        finally:
            backend.gate.end_connecting()

    def _connected(self, error_prefix: str) -> dict[bool, CommStream]:
        """Return the CommStreams by direction, once both ranks have created them."""
        backend, mine = self._backend, self._backend.rank
        options = backend.options
        peer = self._high if self._low == mine else self._low
        agreement = PairAgreement(backend.gate, options, peer, backend.check_open)
        try:
            deadline = Deadline(options.timeout_s)
            wait_until(agreement, options.bells.mine(), deadline, error_prefix, options.observer)
            with backend.cuda.Device(self._device):
                comm_streams = {
                    src == mine: backend.new_comm_stream(f"{src}-{dst}", (src, dst), error_prefix)
                    for src, dst in ((self._low, self._high), (self._high, self._low))
                }
                # In the same order on both ranks.
                for is_send in (self._low == mine, self._low != mine):
                    comm_stream = comm_streams[is_send]
                    with comm_stream.stream:  # ordered after no other stream
                        byte = cupy_module().empty(1, "uint8")
                        greeting = ConnectOp(byte, is_send=is_send)
                        comm_stream.launch(
                            greeting.launch, byte, None, error_prefix, options.timeout_s, (), (), connects=True
                        )
            return comm_streams
        finally:
            agreement.leave()
