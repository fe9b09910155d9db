"""Lane: a communicator, the stream that its operations are enqueued on, and what is on its way there.

An operation of a caller begins behind what the caller's current stream has been asked to do, and the caller's stream
goes on behind the operation: events say so to the device, and the host waits for neither. The caller may drop its
arrays meanwhile. CuPy's pool would give their memory to whoever asks next on the stream that they were made on, which
knows nothing of the lane; so the lane keeps them until the operation is done.

But NCCL makes a connection when it is first used, and blocks the host until the other side comes to it, without a
deadline. So an operation is known to who looks after the lane before NCCL is called, and what ends that call is that
the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.backends.nccl.events import has_come
from meshdist.backends.nccl.library import Communicator, Library
from meshdist.deadline import Deadline
from meshdist.debug.flight_recorder import COMPLETED, Record, clock
from meshdist.errors import DistBackendError

if TYPE_CHECKING:
    from meshdist.backends.nccl.works import DeviceWork

_MOST_SPARE = 64
_LAUNCH_S = 0.2


class Launchable(Protocol):
    """What is enqueued on a lane."""

    def launch(self, lane: Lane, send: Any, recv: Any, /) -> None:
        """Enqueue it, with what is sent and what is received."""


class Flight:
    """An operation on its way.

    Attributes:
        where: How messages about it begin.
        end: The event behind it on the lane's stream; None as long as it is being enqueued.
        arrays: What it reads and writes.
        deadline: When it must be done.
        works: What callers hold; nothing for a sync call.
        records: Those of the flight recorder that it is the end of.
    """

    __slots__ = ("arrays", "deadline", "end", "records", "where", "works")

    def __init__(
        self,
        where: str,
        arrays: Any,
        timeout_s: float,
        works: Sequence[DeviceWork],
        records: Sequence[Record],
    ) -> None:
        self.where = where
        self.end: Any = None
        self.arrays = arrays
        self.deadline = Deadline(timeout_s)
        self.works = works
        self.records = records

    def is_done(self, cuda: Any) -> bool:
        """Return whether the device has done it.

        Raises:
            DistBackendError: The device is broken.
        """
        if self.end is None:
            return False
        try:
            return has_come(cuda, self.end)
        except DistBackendError as error:
            raise DistBackendError(f"{self.where}: {error}") from None

    def record_end(self, error: BaseException | None) -> None:
        """Have its records say that it is done, well or not."""
        records, self.records = self.records, ()
        for record in records:
            if error is not None:
                record.append(f"{type(error).__name__}: {error}")
            record[COMPLETED] = clock()

    def end_with(self, error: BaseException | None) -> None:
        """Tell those who want to know that it is done, well or not."""
        self.record_end(error)
        for work in self.works:
            work.settle(error)


class Lane:
    """One communicator of this rank and its stream.

    Args:
        library: NCCL.
        cuda: The module cupy.cuda.
        communicator: Made on `device`.
        device: The number of the GPU.
        stream: The stream of its operations, which no other stream waits for by itself.
        check: Raises what the engine has given up for.
        wake: Tells who looks after the lane that there is something on its way.

    Attributes:
        flights: What is on its way, in order.
        next_look_s: When what is on its way is looked at again.
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
        self.flights: deque[Flight] = deque()
        self.next_look_s = 0.0
        # Flights whose arrays are kept.
        self._keeping: deque[Flight] = deque()
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
        where: str,
        timeout_s: float,
        works: Sequence[DeviceWork],
        records: Sequence[Record] = (),
        start: Any = None,
    ) -> Flight:
        """Enqueue an operation, behind the current stream.

        The current device is the lane's.

        Args:
            plan: The operation.
            send: What is sent.
            recv: What is received.
            where: How messages about it begin.
            timeout_s: How long it may take.
            works: What callers hold.
            records: Those of the flight recorder that it is the end of.
            start: An event that it is enqueued behind, instead of what the current stream has been asked to do by now.

        Returns:
            What is on its way.

        Raises:
            BaseException: What NCCL or CuPy raised; parts of the operation may be on their way.
        """
        with self._lock:
            self.check()
            flight = Flight(where, (send, recv), timeout_s, works, records)
            # In this order: who finds nothing on its way, and is about to rest, is woken.
            self.flights.append(flight)
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
                with contextlib.suppress(ValueError):  # who gave up meanwhile has taken it away
                    self.flights.remove(flight)
                raise
            flight.end = end
            for work in works:
                work.depart(self, flight)
            self._keeping.append(flight)
        self.let_go()
        return flight

    def check_async_error(self) -> None:
        """Raise where NCCL has failed since the last call."""
        with self._ending:
            if not self._is_over:
                self.communicator.check_async_error()

    def finish(self) -> None:
        """End the communicator once what was enqueued is done; may wait for the other ranks, until `abort`."""
        if self._is_over:
            return
        with self.cuda.Device(self.device):
            self.communicator.finalize()
            if self._is_ours_to_end():
                self.communicator.destroy()

    def abort(self) -> None:
        """End the communicator, and what is on its way; waits for what runs on the GPU."""
        # Who calls NCCL is about to return, or waits for ranks that do not come: then this is what ends it.
        launches = self._lock.acquire(timeout=_LAUNCH_S)
        try:
            if self._is_ours_to_end():
                with self.cuda.Device(self.device):
                    self.communicator.abort()
        finally:
            if launches:
                self._lock.release()

    def _is_ours_to_end(self) -> bool:
        with self._ending:  # nobody may look at what is being taken down
            is_over, self._is_over = self._is_over, True
        return not is_over

    def let_go(self) -> None:
        """Forget the arrays of operations that are done; memory must not wait for somebody to look."""
        if not self._letting_go.acquire(blocking=False):
            return  # another thread is at it
        try:
            while self._keeping and has_come(self.cuda, self._keeping[0].end):
                self._keeping.popleft().arrays = None
        except DistBackendError:  # who looks for the end of an operation is told; the device uses no memory any more
            self._keeping.clear()
        finally:
            self._letting_go.release()

    def keeps_arrays(self) -> bool:
        """Return whether arrays of operations are kept that are not done."""
        self.let_go()
        return bool(self._keeping)

    def landed(self) -> list[Flight]:
        """Return the operations that are done, and forget them; for one thread."""
        done = []
        # What is aborted is done as well, but not in order: who gave up says so.
        while self.flights and self.flights[0].is_done(self.cuda) and not self._is_over:
            done.append(self.flights.popleft())
        if done:
            self.let_go()
        return done

    def reuse(self, flight: Flight) -> None:
        """Take the event of an operation that is done for another; who still waits for it waits a bit longer."""
        if len(self._spare) < _MOST_SPARE:
            self._spare.append(flight.end)
