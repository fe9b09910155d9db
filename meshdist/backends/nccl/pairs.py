"""Pair: the messages between this rank and one other, which keep no order with the collectives of the group.

NCCL carries messages on a communicator, which the two ranks have to make together. Whoever begins a message must not
wait for that: in a ring every rank would wait for the next. So a thread meets the other rank, and what is begun
meanwhile is posted as soon as there is a lane. There is a lane for each direction: two ranks that both send before they
receive do not wait for each other.

The first message on a communicator blocks the host until the other side comes to it. So the thread passes a byte over
each lane before anything else, which the other rank's does too: the messages of the program find all connected.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from meshdist.backends.nccl.lane import Lane
from meshdist.backends.nccl.mail import Batch, Greeting
from meshdist.backends.nccl.works import DeviceWork
from meshdist.cupy_arrays import cupy_module
from meshdist.errors import DistError

if TYPE_CHECKING:
    from meshdist.backends.nccl.backend import NcclBackend


class Pair:
    """This rank and another.

    Args:
        backend: The group's engine.
        peer: The other, as a rank of the group.
        device: The number of this rank's GPU.
    """

    def __init__(self, backend: NcclBackend, peer: int, device: int) -> None:
        self._backend, self._device = backend, device
        self._low, self._high = sorted((backend.rank, peer))
        self._lock = threading.Lock()
        # By whether this rank sends; None until they are made.
        self._lanes: dict[bool, Lane] | None = None
        self._waiting: list[tuple[bool, Batch, str, float, Sequence[DeviceWork], Any]] = []
        self._thread: threading.Thread | None = None

    def is_busy(self, *, sends_alone: bool = False) -> bool:
        """Return whether messages wait for the lanes, or are on their way.

        Args:
            sends_alone: Look at those alone that this rank sends.
        """
        if any(is_send or not sends_alone for is_send, *_ in list(self._waiting)):
            return True
        lanes = self._lanes or {}
        return any(lane.flights for is_send, lane in lanes.items() if is_send or not sends_alone)

    def post(self, batch: Batch, where: str, timeout_s: float, works: Sequence[DeviceWork], *, is_send: bool) -> None:
        """Post messages of one direction, now or as soon as there is a lane. The current device is the pair's.

        Raises:
            BaseException: What NCCL or CuPy raised.
        """
        with self._lock:
            if self._lanes is not None:
                self._lanes[is_send].launch(batch, batch.messages, None, where, timeout_s, works, batch.records())
                return
            cuda = self._backend.cuda
            start = cuda.Event(disable_timing=True)
            start.record(cuda.get_current_stream())
            for work in works:
                work.await_post(self._backend.check)
            self._waiting.append((is_send, batch, where, timeout_s, works, start))
            if self._thread is None:
                run = copy_context().run
                name = f"meshdist-nccl-pair-{self._low}-{self._high}"
                self._thread = threading.Thread(target=run, args=(self._make, where), name=name, daemon=True)
                self._thread.start()

    def fail(self, error: DistError | None) -> None:
        """Have the messages that wait for the lanes fail."""
        for _, _, _, _, works, _ in list(self._waiting):
            for work in works:
                work.settle(error)

    def _make(self, where: str) -> None:
        mine = self._backend.rank
        try:
            with self._backend.cuda.Device(self._device):
                lanes = {
                    src == mine: self._backend.new_lane(f"{src}-{dst}", (src, dst), where)
                    for src, dst in ((self._low, self._high), (self._high, self._low))
                }
                # In the same order on both ranks.
                for is_send in (self._low == mine, self._low != mine):
                    lane = lanes[is_send]
                    with lane.stream:  # and behind nothing of anybody's
                        byte = cupy_module().empty(1, "uint8")
                        greeting = Greeting(byte, is_send=is_send)
                        lane.launch(greeting, byte, None, where, self._backend.options.timeout_s, (), ())
                with self._lock:
                    for is_send, batch, of, timeout_s, works, start in self._waiting:
                        lanes[is_send].launch(batch, batch.messages, None, of, timeout_s, works, batch.records(), start)
                    self._waiting.clear()
                    self._lanes = lanes
        except BaseException as error:  # it belongs to those who wait for the messages
            failure = self._backend.library.failure(error)
            if isinstance(failure, DistError) and not str(failure).startswith(where):
                failure.args = (f"{where}: {failure}",)
            self._backend.fail(failure)
            self.fail(self._backend.error)
