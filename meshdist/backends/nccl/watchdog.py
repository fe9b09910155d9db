"""Watchdog: a thread that monitors the operations in flight of one backend.

The host does not wait for operations, so no other thread would notice one that never ends. The watchdog completes the
operations that are done, and makes the backend give up if one fails, exceeds its deadline or needs a rank that is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context

from meshdist.backends.nccl.comm_stream import CommStream
from meshdist.runtime.work import ProgressThread
from meshdist.system.deadline import Deadline


class Aborting:
    """Aborts the communicators of all CommStreams concurrently.

    NCCL's abort waits for what runs on the GPU, which may be an operation of another communicator that has to be
    aborted.
    """

    def __init__(self, comm_streams: Sequence[CommStream], label: str) -> None:
        self._label = label
        self._threads = [
            threading.Thread(target=self._abort, args=(comm_stream,), name="meshdist-nccl-abort", daemon=True)
            for comm_stream in comm_streams
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait for the aborts, at most `timeout_s`; log those that take longer, and leave them running."""
        deadline = Deadline(timeout_s)
        for thread in self._threads:
            thread.join(max(deadline.remaining_s(), 0.0))
        late = sum(thread.is_alive() for thread in self._threads)
        if late:
            logging.getLogger("meshdist").warning(
                "group %r: %d communicators are not aborted after %g s; they are left behind",
                self._label,
                late,
                timeout_s,
            )

    def _abort(self, comm_stream: CommStream) -> None:
        try:
            comm_stream.abort()
        except Exception as error:  # nothing else can be done with the communicator
            words = comm_stream.library.failure(error)
            logging.getLogger("meshdist").warning("group %r: a communicator was not aborted: %s", self._label, words)


_SHORTEST_NAP_S, _LONGEST_NAP_S, _IDLE_S = 0.5e-3, 10e-3, 5.0
_LAST_LOOKS = 20


class Watchdog:
    """Monitors CommStreams.

    `look` is called regularly for a CommStream with operations in flight, and raises if one cannot complete; `failed`
    is called with what `look` or the device raises, `begin` by the thread first. `look_around` is called regularly,
    also without any operation, and returns after how many seconds to call it again.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[CommStream], None],
        failed: Callable[[BaseException], None],
        begin: Callable[[], None],
        look_around: Callable[[], float] = lambda: _IDLE_S,
    ) -> None:
        self._name, self._look, self._failed, self._begin = name, look, failed, begin
        self._look_around = look_around
        self._comm_streams: tuple[CommStream, ...] = ()
        self._beginning = threading.Lock()
        self._thread: ProgressThread | None = None
        self._is_idle = False
        self._stopping = False
        self._bell = threading.Event()

    def watch(self, comm_stream: CommStream) -> None:
        """Monitor another CommStream; may be called by several threads."""
        with self._beginning:
            self._comm_streams = (*self._comm_streams, comm_stream)
            if self._thread is None:
                # Callbacks run on this thread and need the caller's context, which holds the world.
                self._thread = ProgressThread(
                    target=copy_context().run, args=(self._run,), name=self._name, daemon=True
                )
                self._thread.start()

    def wake(self) -> None:
        """Wake the thread if it sleeps: an operation was added."""
        if self._is_idle:
            self._bell.set()

    def stop(self) -> None:
        self._stopping = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        poll_interval_s, spins = _SHORTEST_NAP_S, 0
        self._begin()
        while not self._stopping:
            try:
                moved = [self._attend(comm_stream) for comm_stream in self._comm_streams]
                next_look_s = self._look_around()
            except BaseException as error:  # the device is broken: the next call raises it
                self._failed(error)
                return
            if not any(comm_stream.has_works() for comm_stream in self._comm_streams):
                # Nobody waits for the end of a sync call, and a woken thread delays the one that launches.
                poll_interval_s = _LONGEST_NAP_S
            else:
                poll_interval_s = _SHORTEST_NAP_S if any(moved) else min(2 * poll_interval_s, _LONGEST_NAP_S)
            spins = 0 if any(comm_stream.flights for comm_stream in self._comm_streams) else spins + 1
            if spins < _LAST_LOOKS:
                self._bell.wait(poll_interval_s)
            else:
                # Only after some idle polls: being woken costs the caller more than these.
                self._rest(max(0.0, min(next_look_s, _IDLE_S)))
                spins = 0
            self._bell.clear()

    def _attend(self, comm_stream: CommStream) -> bool:
        completed = comm_stream.completed()
        if completed:
            for in_flight in completed:
                in_flight.end_with(None)
            comm_stream.reuse(completed)
        if comm_stream.flights and not completed:
            self._look(comm_stream)
        return bool(completed)

    def _rest(self, longest_s: float) -> None:
        self._is_idle = True
        # A launching thread appends the operation and then reads `_is_idle`; here the order is reversed. So at
        # least one of the two sees the other.
        if not any(comm_stream.flights for comm_stream in self._comm_streams) and not self._stopping:
            self._bell.wait(longest_s)
        self._is_idle = False
