"""DeviceWork: an async call on the stream of a lane."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshdist.cupy_arrays import on_current_stream
from meshdist.deadline import Deadline, Timeout
from meshdist.errors import DistError, DistTimeoutError
from meshdist.outcome import not_yet
from meshdist.work import Work

if TYPE_CHECKING:
    from meshdist.backends.nccl.lane import Flight, Lane

_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class DeviceWork(Work):
    """The Work of a call whose arrays are in the memory of a GPU.

    `wait()` makes the current stream wait and not the host: what is enqueued on that stream afterwards finds the call
    done. With a timeout it is the host that waits. `is_completed()` asks the device.

    Args:
        where: How messages about the call begin.
        result: What the sync call returns.
        waits_on_host: `wait` blocks the host also without a timeout: so a barrier does.
        source: The rank that a message comes from, for an `irecv`.
    """

    __slots__ = ("_check", "_flight", "_lane", "_source", "_waits_on_host")

    def __init__(self, where: str, result: Any, *, waits_on_host: bool = False, source: int | None = None) -> None:
        super().__init__(where, result)
        self._waits_on_host = waits_on_host
        self._source = source
        self._lane: Lane | None = None
        self._flight: Flight | None = None
        self._check: Callable[[], None] | None = None

    def await_post(self, check: Callable[[], None]) -> None:
        """Learn that the operation is enqueued later, by another thread; `check` raises where it never will be."""
        self._check = check

    def depart(self, lane: Lane, flight: Flight) -> None:
        """Learn of the operation that this is the Work of."""
        # In this order: who finds a flight finds a lane.
        self._lane = lane
        self._flight = flight

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Make the current stream wait for the call, or with a timeout the host, and return True.

        Raises:
            DistTimeoutError: Not done in time. The call goes on; wait again.
            DistError: The call failed.
        """
        deadline = None if timeout is None else Deadline(timeout)
        if self._flight is None and not self._is_done:
            self._await_flight(deadline)
        lane, flight = self._lane, self._flight
        if self._is_done or lane is None or flight is None:
            return super().wait(None)
        lane.check()
        if deadline is None and not self._waits_on_host:
            on_current_stream(lane.device, lambda stream: stream.wait_event(flight.end))
            return True

        def is_done() -> bool:
            lane.check()
            return flight.is_done(lane.cuda)

        self._wait_until(is_done, deadline)
        # What NCCL has aborted is done as well.
        lane.check()
        return True

    def is_completed(self) -> bool:
        """Return True once the call is done, well or not.

        Raises:
            DistBackendError: The device is broken.
        """
        lane, flight = self._lane, self._flight
        return self._is_done or (lane is not None and flight is not None and flight.is_done(lane.cuda))

    def is_success(self) -> bool:
        """Return True once the call is done and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what the call failed with, None where it did not, or not yet."""
        if not self._is_done and self._lane is not None:
            try:
                self._lane.check()
            except DistError as error:  # which is what `wait` raises, a moment before all calls are told
                return error
        return super().exception()

    def source_rank(self) -> int:
        """Return the global rank of the sender of an `irecv`; nothing else has one."""
        if self._source is None:
            return super().source_rank()
        self.wait()
        return self._source

    def _await_flight(self, deadline: Deadline | None) -> None:
        if self._check is None:
            raise DistError(f"{self._where}: it begins with the other messages when the block ends; wait after that")
        check = self._check

        def is_posted() -> bool:
            if self._flight is None and not self._is_done:
                check()
            return self._flight is not None or self._is_done

        self._wait_until(is_posted, deadline)

    def _wait_until(self, done: Callable[[], bool], deadline: Deadline | None) -> None:
        nap_s = _SHORTEST_NAP_S
        while not done():
            if deadline is not None and deadline.expired():
                raise DistTimeoutError(f"{self._where}: {not_yet(deadline.timeout_s)}")
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
