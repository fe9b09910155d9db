"""Watchdog: the thread that looks after what is on its way on the lanes of one engine.

Nobody else would notice that an operation does not end: the host goes on, and the device waits. The thread settles what
is done, and where an operation fails, is late, or waits for a rank that is gone, it has the engine give up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context

from meshdist.backends.nccl.lane import Lane
from meshdist.outcome import CarrierThread

_SHORTEST_NAP_S, _LONGEST_NAP_S, _IDLE_S = 0.5e-3, 10e-3, 5.0
_LAST_LOOKS = 20


class Watchdog:
    """Looks after lanes.

    Args:
        name: Of the thread.
        look: Called now and then while something is on its way, with the lane: raises where that can never be done.
        failed: Told of what `look` raises, or the device.
        begin: Called by the thread before anything else.
    """

    def __init__(
        self,
        name: str,
        look: Callable[[Lane], None],
        failed: Callable[[BaseException], None],
        begin: Callable[[], None],
    ) -> None:
        self._name, self._look, self._failed, self._begin = name, look, failed, begin
        self._lanes: tuple[Lane, ...] = ()
        self._beginning = threading.Lock()
        self._thread: CarrierThread | None = None
        self._is_idle = False
        self._stopping = False
        self._bell = threading.Event()

    def watch(self, lane: Lane) -> None:
        """Look after a lane as well; threads that make lanes may come here at once."""
        with self._beginning:
            self._lanes = (*self._lanes, lane)
            if self._thread is None:
                # Callbacks run on it: they must find the world that they belong to.
                self._thread = CarrierThread(target=copy_context().run, args=(self._run,), name=self._name, daemon=True)
                self._thread.site = lambda: (None, 0)
                self._thread.start()

    def wake(self) -> None:
        """Say that there is something on its way."""
        if self._is_idle:
            self._bell.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._bell.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        nap_s, looks = _SHORTEST_NAP_S, 0
        self._begin()
        while not self._stopping:
            try:
                moved = [self._attend(lane) for lane in self._lanes]
            except BaseException as error:  # the device itself is broken: it belongs to whoever calls next
                self._failed(error)
                return
            nap_s = _SHORTEST_NAP_S if any(moved) else min(2 * nap_s, _LONGEST_NAP_S)
            looks = 0 if any(lane.flights for lane in self._lanes) else looks + 1
            if looks < _LAST_LOOKS:
                self._bell.wait(nap_s)
            else:
                # Not at once: to be woken costs the caller more than these looks.
                self._rest()
                looks = 0
            self._bell.clear()

    def _attend(self, lane: Lane) -> bool:
        landed = lane.landed()
        for flight in landed:
            flight.end_with(None)
            lane.reuse(flight)
        if lane.flights and not landed:
            self._look(lane)
        return bool(landed)

    def _rest(self) -> None:
        self._is_idle = True
        # Whoever launches first appends and then looks whether this rests; so one of them sees the other.
        if not any(lane.flights for lane in self._lanes) and not self._stopping:
            self._bell.wait(_IDLE_S)
        self._is_idle = False
