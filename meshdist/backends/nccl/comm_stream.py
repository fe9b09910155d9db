"""CommStream: a communicator, the stream of its operations, and the operations in flight.

An operation begins after the work enqueued so far on the caller's current stream, and the caller's stream continues
after the operation; both are ordered by events, without the host. The caller may drop its arrays meanwhile, and CuPy's
pool would reuse their memory on the stream that allocated them, without regard to this one. So the CommStream keeps
the arrays until the operation is complete.

NCCL connects at first use and blocks the host until the peer arrives, without a deadline. So an operation is
registered with the watchdog before NCCL is called, and aborting the communicator ends the blocked call.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from meshdist.backends.nccl.library import Communicator, Library
from meshdist.errors import DistBackendError
from meshdist.runtime.flight_recorder import COMPLETED, Record, clock
from meshdist.runtime.peers import PeerMonitor
from meshdist.system.deadline import Deadline

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
        f"the GPU cannot be used any more, CUDA says: {cuda.runtime.CUDARuntimeError(status)}; an operation enqueued"
        " before has failed, perhaps a kernel of the program: CUDA_LAUNCH_BLOCKING=1 shows which"
    )


_MOST_SPARE = 64
_LAUNCH_S = 0.2


class Launchable(Protocol):
    """An operation that can be enqueued on a CommStream."""

    def launch(self, comm_stream: CommStream, send: Any, recv: Any, /) -> None:
        """Enqueue the operation."""


class CallerWork(Protocol):
    """The Work that the caller of an operation holds."""

    def depart(self, comm_stream: CommStream, in_flight: InFlightOp) -> None: ...
    def complete(self, error: BaseException | None) -> None: ...


class InFlightOp:
    __slots__ = ("arrays", "deadline", "end", "error_prefix", "records", "works")

    def __init__(
        self,
        error_prefix: str,
        arrays: Any,
        timeout_s: float,
        works: Sequence[CallerWork],
        records: Sequence[Record],
    ) -> None:
        self.error_prefix = error_prefix
        self.end: Any = None  # the event after it on the stream; None while it is being enqueued
        self.arrays = arrays  # what it reads and writes
        self.deadline = Deadline(timeout_s)  # when it must be complete
        self.works = works  # the Works that callers hold; none for a sync call
        self.records = records  # its records in the flight recorder

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
        for record in records:
            if error is not None:
                record.append(f"{type(error).__name__}: {error}")
            record[COMPLETED] = clock()

    def end_with(self, error: BaseException | None) -> None:
        """Record its end and complete its Works."""
        self.record_end(error)
        for work in self.works:
            work.complete(error)


class CommStream:
    """One communicator of this rank on the GPU `device`, and its stream, which is non-blocking.

    `cuda` is the module cupy.cuda. `check` raises if the backend has given up; `wake` wakes the watchdog after an
    operation was added.
    """

    def __init__(
        self,
        library: Library,
        cuda: Any,
        communicator: Communicator,
        device: int,
        stream: Any,
        check: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self.library, self.cuda, self.communicator = library, cuda, communicator
        self.device, self.stream, self.check, self._wake = device, stream, check, wake
        self.stream_address = int(stream.ptr)
        self.flights: deque[InFlightOp] = deque()  # the operations in flight, in order
        self.monitor = PeerMonitor()  # paces the checks of operations and peers
        # Operations whose arrays are kept alive.
        self._keeping: deque[InFlightOp] = deque()
        self._lock = threading.Lock()
        self._letting_go = threading.Lock()
        self._ending = threading.Lock()
        self._is_over = False
        self._start = cuda.Event(disable_timing=True)
        self._spare: list[Any] = []

    def launch(
        self,
        plan: Launchable,
        send: Any,
        recv: Any,
        error_prefix: str,
        timeout_s: float,
        works: Sequence[CallerWork],
        records: Sequence[Record] = (),
        start: Any = None,
    ) -> InFlightOp:
        """Enqueue an operation after the work on the current stream; the current device must be the CommStream's.

        With `start`, it begins after that event instead of the work on the current stream. For the others see
        InFlightOp.

        Raises:
            BaseException: An error of NCCL or CuPy; parts of the operation may be enqueued.
        """
        with self._lock:
            self.check()
            in_flight = InFlightOp(error_prefix, (send, recv), timeout_s, works, records)
            # Append before waking, so that a watchdog that is about to sleep sees either the operation or the wake.
            self.flights.append(in_flight)
            self._wake()
            try:
                if start is None:
                    start = self._start
                    start.record(self.cuda.get_current_stream())
                self.stream.wait_event(start)
                plan.launch(self, send, recv)
                end = self._spare.pop() if self._spare else self.cuda.Event(disable_timing=True)
                end.record(self.stream)
            except BaseException:
                with contextlib.suppress(ValueError):  # removed already by the thread that gave up
                    self.flights.remove(in_flight)
                raise
            in_flight.end = end
            for work in works:
                work.depart(self, in_flight)
            self._keeping.append(in_flight)
        self.let_go()
        return in_flight

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Make what the block enqueues one operation."""
        self.library.group_start()
        try:
            yield
        finally:
            self.library.group_end()

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
            while self._keeping and has_come(self.cuda, self._keeping[0].end):
                self._keeping.popleft().arrays = None
        except DistBackendError:  # reported by the check of the operation; the device uses no memory any more
            self._keeping.clear()
        finally:
            self._letting_go.release()

    def keeps_arrays(self) -> bool:
        """Return whether arrays are kept for operations that are not complete."""
        self.let_go()
        return bool(self._keeping)

    def completed(self) -> list[InFlightOp]:
        """Return the completed operations and remove them; called by one thread only."""
        done = []
        # Aborted operations count as complete, but not in order: the thread that gave up ends them.
        while self.flights and self.flights[0].is_done(self.cuda) and not self._is_over:
            done.append(self.flights.popleft())
        if done:
            self.let_go()
        return done

    def reuse(self, in_flight: InFlightOp) -> None:
        """Reuse the event of a completed operation; a thread still waiting on it waits slightly longer."""
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(in_flight.end)
