"""DeviceWork: the Work of an async call on a CommStream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from meshdist.arrays.device import on_current_stream
from meshdist.backends.nccl.comm_stream import CommStream, InFlightOp
from meshdist.errors import DistError, DistTimeoutError
from meshdist.runtime.work import Work, not_yet
from meshdist.system.deadline import Deadline, Timeout

_SHORTEST_NAP_S, _LONGEST_NAP_S = 20e-6, 1e-3


class DeviceWork(Work):
    """The Work of a call on GPU arrays.

    `wait()` makes the current stream wait, not the host: work enqueued on that stream afterwards finds the call
    complete. With a timeout, the host waits. `is_completed()` asks the device.

    Args:
        error_prefix: Prefix of error messages about the call.
        result: What the sync call returns.
        waits_on_host: `wait` also blocks the host without a timeout, as for a barrier.
        source: The rank that an `irecv` receives from.
    """

    __slots__ = ("_check", "_comm_stream", "_in_flight", "_source", "_waits_on_host")

    def __init__(
        self, error_prefix: str, result: Any, *, waits_on_host: bool = False, source: int | None = None
    ) -> None:
        super().__init__(error_prefix, result)
        self._waits_on_host = waits_on_host
        self._source = source
        self._comm_stream: CommStream | None = None
        self._in_flight: InFlightOp | None = None
        self._check: Callable[[], None] | None = None

    def await_post(self, check: Callable[[], None]) -> None:
        """Expect another thread to enqueue the operation later; `check` raises if it never will."""
        self._check = check

    def depart(self, comm_stream: CommStream, in_flight: InFlightOp) -> None:
        # In this order: a thread that sees the operation finds its CommStream.
        self._comm_stream = comm_stream
        self._in_flight = in_flight

    def wait(self, timeout: Timeout | None = None) -> bool:
        """Make the current stream, or with a timeout the host, wait for the call; return True.

        Raises:
            DistTimeoutError: The call did not end in time. It continues; call `wait` again.
            DistError: The call failed.
        """
        deadline = None if timeout is None else Deadline(timeout)
        if self._in_flight is None and not self._is_done:
            self._await_flight(deadline)
        comm_stream, in_flight = self._comm_stream, self._in_flight
        if self._is_done or comm_stream is None or in_flight is None:
            return super().wait(None)
        comm_stream.check()
        if deadline is None and not self._waits_on_host:
            on_current_stream(comm_stream.device, lambda stream: stream.wait_event(in_flight.end))
            self._was_awaited = True
            return True

        def is_done() -> bool:
            comm_stream.check()
            return in_flight.is_done(comm_stream.cuda)

        self._wait_until(is_done, deadline)
        # An aborted operation counts as done.
        comm_stream.check()
        self._was_awaited = True
        return True

    def is_completed(self) -> bool:
        """Return True once the call is complete, successfully or not.

        Raises:
            DistBackendError: The device is broken.
        """
        comm_stream, in_flight = self._comm_stream, self._in_flight
        return self._is_done or (
            comm_stream is not None and in_flight is not None and in_flight.is_done(comm_stream.cuda)
        )

    def is_success(self) -> bool:
        """Return True once the call is complete and did not fail."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, None if it did not fail or is not complete."""
        if not self._is_done and self._comm_stream is not None:
            try:
                self._comm_stream.check()
            except DistError as error:  # `wait` raises it too, even before the Work is completed
                return error
        return super().exception()

    def source_rank(self) -> int:
        """Return the global rank of the sender of an `irecv`; raise for any other call."""
        if self._source is None:
            return super().source_rank()
        self.wait()
        return self._source

    def _await_flight(self, deadline: Deadline | None) -> None:
        if self._check is None:
            raise DistError(
                f"{self._error_prefix}: it begins with the other messages when the block ends; wait after that"
            )
        check = self._check

        def is_posted() -> bool:
            if self._in_flight is None and not self._is_done:
                check()
            return self._in_flight is not None or self._is_done

        self._wait_until(is_posted, deadline)

    def _wait_until(self, done: Callable[[], bool], deadline: Deadline | None) -> None:
        poll_interval_s = _SHORTEST_NAP_S
        while not done():
            if deadline is not None and deadline.expired():
                raise DistTimeoutError(f"{self._error_prefix}: {not_yet(deadline.timeout_s)}")
            time.sleep(poll_interval_s)
            poll_interval_s = min(2 * poll_interval_s, _LONGEST_NAP_S)
