"""CommStream: a communicator, the streams of its operations, and the operations in flight.

The operation of a sync call is enqueued on the caller's current stream: it begins after the work enqueued there so far,
and later work sees its result. That of an async call is enqueued on a stream of the CommStream, after the work on the
caller's current stream; events order the two, without the host. NCCL carries out the operations of one communicator in
the order in which they were enqueued, whatever their streams.

The caller may drop its arrays meanwhile, and CuPy's pool would reuse their memory on the stream that allocated them,
without regard to other ones. So the CommStream keeps the arrays until the operation is complete.

NCCL connects at first use and blocks the host until the peer arrives, without a deadline. So an operation is
registered with the watchdog before NCCL is called, and aborting the communicator ends the blocked call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any, Protocol, TypeAlias

from meshdist.backends.nccl.launch_gate import LaunchGate
from meshdist.backends.nccl.library import Communicator, Library
from meshdist.core import Record
from meshdist.errors import DistBackendError
from meshdist.runtime.flight_recorder import clock, note_error
from meshdist.runtime.peer_monitor import PeerMonitor

# cudaErrorNotReady
_NOT_READY = 600


def has_come(cuda: Any, event: Any) -> bool:
    """Return whether the device has reached an event; `cuda` is the module cupy.cuda.

    CuPy's `Event.done` is False both on a busy and on a broken device.

    Raises:
        DistBackendError: The device is broken by an earlier kernel; with CUDA's text.
    """
    status = int(cuda.runtime.eventQuery(event.ptr))
    if status in (0, _NOT_READY):
        return status == 0
    raise DistBackendError(
        f"the GPU can no longer be used; CUDA says: {cuda.runtime.CUDARuntimeError(status)}; an operation that was"
        " enqueued earlier has failed, perhaps a kernel of the program: CUDA_LAUNCH_BLOCKING=1 shows which"
    )


_MOST_SPARE = 512
_MOST_STREAMS = 64
# How many operations may be in flight before a launch looks whether the first of them is complete.
_FEW_KEPT = 4
_LAUNCH_S = 0.2
# The address that stands for the default stream of the calling thread (cudaStreamPerThread): one for many streams.
_OF_THREAD = 2
_NOWHERE = object()


class LaunchStream:
    """A communicator, and the stream on which an operation of it is enqueued."""

    __slots__ = ("communicator", "cuda", "device", "library", "stream", "stream_address")

    def __init__(self, library: Library, cuda: Any, communicator: Communicator, device: int, stream: Any) -> None:
        self.library, self.cuda, self.communicator = library, cuda, communicator
        self.device, self.stream, self.stream_address = device, stream, int(stream.ptr)

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Make what the block enqueues one operation."""
        self.library.group_start()
        try:
            yield
        finally:
            self.library.group_end()


# Enqueues an operation that sends and receives these arrays.
Enqueue: TypeAlias = Callable[[LaunchStream, Any, Any], None]


class CallerWork(Protocol):
    """The Work that the caller of an operation holds."""

    def depart(self, comm_stream: CommStream, in_flight: InFlightOp) -> None: ...
    def complete(self, error: BaseException | None) -> None: ...


class InFlightOp:
    __slots__ = ("arrays", "began_s", "end", "error_prefix", "number", "records", "stream", "timeout_s", "works")

    def __init__(
        self,
        error_prefix: str,
        arrays: Any,
        timeout_s: float,
        works: Sequence[CallerWork],
        records: Sequence[Record],
        number: int | None = None,
    ) -> None:
        self.error_prefix = error_prefix
        self.number = number  # which collective of the communicator it is; None for messages
        self.stream: LaunchStream | None = None  # where it is enqueued
        self.end: Any = None  # the event after it on the stream; None while it is being enqueued
        self.arrays = arrays  # what it reads and writes
        self.timeout_s = timeout_s  # how old it may become
        self.began_s = monotonic()
        self.works = works  # the Works that callers hold; none for a sync call
        self.records = records  # its records in the flight recorder

    def age_s(self) -> float:
        return monotonic() - self.began_s

    def is_done(self, cuda: Any) -> bool:
        """Return whether the device has completed it; raise DistBackendError if the device is broken."""
        if self.end is None:
            return False
        try:
            return has_come(cuda, self.end)
        except DistBackendError as error:
            raise DistBackendError(str(error), error_prefix=self.error_prefix) from None

    def record_end(self, error: BaseException | None) -> None:
        records, self.records = self.records, ()
        now = clock()
        for record in records:
            if error is not None:
                note_error(record, error)
            record.completed = now

    def end_with(self, error: BaseException | None) -> None:
        """Record its end and complete its Works."""
        self.record_end(error)
        for work in self.works:
            work.complete(error)


class CommStream:
    """One communicator of this rank on the GPU `device`, and its stream, which is non-blocking.

    `cuda` is the module cupy.cuda. `gate` holds launches back while a communicator is created. `check` raises if the
    backend has given up; `wake` wakes the watchdog after an operation was added.
    """

    def __init__(
        self,
        library: Library,
        cuda: Any,
        communicator: Communicator,
        device: int,
        stream: Any,
        gate: LaunchGate,
        check: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.library, self.cuda, self.communicator = library, cuda, communicator
        self.device, self.stream, self.check, self._wake = device, stream, check, wake
        self.flights: deque[InFlightOp] = deque()  # the operations in flight, in order
        self.monitor = PeerMonitor()  # paces the checks of operations and peers
        self.num_launched = 0  # how many collectives were launched, or are about to be
        self._gate = gate
        self._own = LaunchStream(library, cuda, communicator, device, stream)
        self._on_callers: dict[int, LaunchStream] = {}  # by the address of the stream
        # Memory that plans have allocated for operations of graphs, whose launches use it.
        self._of_graphs: list[Any] = []
        # Operations whose arrays are kept alive.
        self._keeping: deque[InFlightOp] = deque()
        self._lock = threading.Lock()
        self._letting_go = threading.Lock()
        self._ending = threading.Lock()
        self._is_over = False
        self._start = cuda.Event(disable_timing=True)
        self._spare: list[Any] = []
        gate.watch(self)

    def launch(
        self,
        enqueue: Enqueue,
        send: Any,
        recv: Any,
        error_prefix: str,
        timeout_s: float,
        works: Sequence[CallerWork],
        records: Sequence[Record] = (),
        start: Any = None,
        *,
        inline: bool = False,
        connects: bool = False,
        number: int | None = None,
    ) -> InFlightOp:
        """Enqueue an operation after the work on the current stream; the current device must be the CommStream's.

        With `start`, it begins after that event instead of the work on the current stream. With `inline`, it is
        enqueued on the current stream itself. If the current stream is being captured into a graph, the operation
        becomes a part of the graph, and is complete for the host. `connects` is for the messages that connect a pair
        of ranks, which no gate holds back. For the others see InFlightOp.

        Raises:
            DistTimeoutError: The gate is closed for `timeout_s`.
            BaseException: An error of NCCL or CuPy; parts of the operation may be enqueued.
        """
        caller = self.cuda.get_current_stream()
        if start is None and self.cuda.runtime.streamIsCapturing(caller.ptr):
            return self._capture(enqueue, send, recv, error_prefix, timeout_s, works, records)
        with self._lock:
            self.check()
            in_flight = InFlightOp(error_prefix, (send, recv), timeout_s, works, records, number)
            # Append before waking, so that a watchdog that is about to sleep sees either the operation or the wake;
            # and before reading the gate, which is closed before the operations in flight are looked for.
            self.flights.append(in_flight)
            while self._gate.is_closed and not connects:
                with contextlib.suppress(ValueError):  # removed already by the thread that gave up
                    self.flights.remove(in_flight)
                self._gate.pass_through(self.check, timeout_s)
                self.check()
                self.flights.append(in_flight)
            self._wake()
            try:
                if inline:
                    on = self._on(caller)
                else:
                    on = self._own
                    if start is None:
                        start = self._start
                        start.record(caller)
                    self.stream.wait_event(start)
                enqueue(on, send, recv)
                end = self._spare.pop() if self._spare else self.cuda.Event(disable_timing=True)
                end.record(on.stream)
            except BaseException:
                with contextlib.suppress(ValueError):  # removed already by the thread that gave up
                    self.flights.remove(in_flight)
                raise
            in_flight.stream = on
            in_flight.end = end
            for work in works:
                work.depart(self, in_flight)
            self._keeping.append(in_flight)
        if len(self._keeping) > _FEW_KEPT:
            self.let_go()
        return in_flight

    def _on(self, stream: Any) -> LaunchStream:
        address = stream.ptr
        on = self._on_callers.get(address)
        if on is None:
            if len(self._on_callers) >= _MOST_STREAMS:
                self._on_callers.clear()
            on = LaunchStream(self.library, self.cuda, self.communicator, self.device, stream)
            if address != _OF_THREAD:
                self._on_callers[address] = on
        return on

    def _capture(
        self,
        enqueue: Enqueue,
        send: Any,
        recv: Any,
        error_prefix: str,
        timeout_s: float,
        works: Sequence[CallerWork],
        records: Sequence[Record],
    ) -> InFlightOp:
        # Events of a capture cannot be queried, and the operation runs when the graph is launched: there is nothing to
        # watch. The program keeps its arrays as long as the graph; what the plan allocates is kept here, since when a
        # graph ends is unknown.
        captured = InFlightOp(error_prefix, None, timeout_s, works, records)
        allocate = self.cuda.get_allocator()

        def keep(nbytes: int) -> Any:
            memory = allocate(nbytes)
            self._of_graphs.append(memory)
            return memory

        with self._lock, self.cuda.using_allocator(keep):
            self.check()
            enqueue(self._on(self.cuda.get_current_stream()), send, recv)
        captured.end_with(None)
        return captured

    def check_async_error(self) -> None:
        """Raise if NCCL has failed since the last call."""
        with self._ending:
            if not self._is_over:
                self.communicator.check_async_error()

    def finish(self) -> None:
        """End the communicator after its operations; may wait for the other ranks, until `abort`."""
        if self._is_over:
            return
        with self.cuda.Device(self.device):
            self.communicator.finalize()
            if self._is_ours_to_end():
                self.communicator.destroy()

    def abort(self) -> None:
        """Abort the communicator and its operations; waits for what runs on the GPU."""
        # A launching thread returns soon, or blocks for missing ranks; then only the abort ends its call.
        launches = self._lock.acquire(timeout=_LAUNCH_S)
        try:
            if self._is_ours_to_end():
                with self.cuda.Device(self.device):
                    self.communicator.abort()
        finally:
            if launches:
                self._lock.release()

    def _is_ours_to_end(self) -> bool:
        with self._ending:  # `check_async_error` must not run while the communicator is destroyed
            is_over, self._is_over = self._is_over, True
        return not is_over

    def let_go(self) -> None:
        """Release the arrays of completed operations, at once and not only when the watchdog looks."""
        if not self._letting_go.acquire(blocking=False):
            return  # another thread does it
        try:
            for in_flight in self._complete(self._keeping):
                in_flight.arrays = None
        except DistBackendError:  # reported by the check of the operation; the device uses no memory any more
            self._keeping.clear()
        finally:
            self._letting_go.release()

    def has_works(self) -> bool:
        """Return whether an operation in flight has a Work, which somebody may wait for."""
        return any(in_flight.works for in_flight in self.flights.copy())

    def is_quiet(self) -> bool:
        """Return whether no operation is in flight; called by any thread."""
        last_on = {in_flight.stream: in_flight for in_flight in self.flights.copy()}
        try:
            return all(last.is_done(self.cuda) for last in last_on.values())
        except DistBackendError:  # the device is broken, which the watchdog reports
            return False

    def keeps_arrays(self) -> bool:
        """Return whether arrays are kept for operations that are not complete."""
        self.let_go()
        return bool(self._keeping)

    def completed(self) -> list[InFlightOp]:
        """Return the completed operations and remove them; called by one thread only."""
        done = list(self._complete(self.flights, until=lambda: self._is_over))
        if done:
            self.let_go()
        return done

    def _complete(
        self, operations: deque[InFlightOp], until: Callable[[], bool] = lambda: False
    ) -> Iterator[InFlightOp]:
        """Remove and yield the complete operations at the front, until `until`.

        Those of one stream are complete in order: most often, all are that were launched so far, or none is. Those of
        several streams are not: an operation that moves nothing, and what follows NCCL's part, wait for no other.
        """
        num = len(operations)
        last = operations[num - 1] if num > 1 else None
        done_on = last.stream if last is not None and last.is_done(self.cuda) else _NOWHERE
        # Aborted operations count as complete, but not in order: the thread that gave up ends them.
        while operations and not until():
            first = operations[0]
            if not (num > 0 and first.stream is done_on) and not first.is_done(self.cuda):
                return
            operations.popleft()
            num -= 1
            yield first

    def reuse(self, completed: Sequence[InFlightOp]) -> None:
        """Reuse the events of completed operations; a thread still waiting on one waits slightly longer."""
        self._spare += [in_flight.end for in_flight in completed[: _MOST_SPARE - len(self._spare)]]
