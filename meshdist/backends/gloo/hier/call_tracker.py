"""Tracks the collectives of a group on several hosts: whether all ranks make the same call, and are alive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from meshdist.backends.base import Backend, Plan
from meshdist.backends.gloo.tcp.collective_frames import NUMBER
from meshdist.backends.gloo.tcp.frames import MISMATCH, pack_text
from meshdist.backends.gloo.tcp.group_receive_state import GroupReceiveState
from meshdist.backends.gloo.tcp.transport import TcpTransport
from meshdist.backends.gloo.tcp.waits import StoreMonitor, check_collective
from meshdist.errors import DistBackendError, DistError
from meshdist.runtime.call import Buffers, Call, Signature
from meshdist.runtime.call_mismatch import CallCheck
from meshdist.runtime.departure import LeftOut
from meshdist.runtime.waiting import Waitable

# Pause between two requests to the store for the calls of the others.
_PAUSE_S = 0.005


class CallTracker:
    """The sequence of a group's collectives; every frame of the current one carries its `word`."""

    def __init__(self, backend: Backend, transport: TcpTransport, receive_state: GroupReceiveState) -> None:
        self.transport = transport
        self.receive_state = receive_state
        self.word = 0
        self._backend = backend
        self._options = backend.options
        self._others = [rank for rank in range(backend.size) if rank != backend.rank]
        self._store_monitor = StoreMonitor(backend.options, LeftOut.CALL)
        self.signature = Signature("nothing")

    def begin(self, signature: Signature, fingerprint: int) -> None:
        self.signature = signature
        with self.transport.lock:
            self.word = self.receive_state.collectives.begin(fingerprint)

    def is_behind(self) -> bool:
        """Return whether another rank has begun a call that this one has yet to make, as far as its frames say."""
        self.transport.progress()
        with self.transport.lock:
            return self.receive_state.collectives.is_behind()

    def check(self) -> None:
        """Raise DistBackendError if the ranks' calls differ, or one has given the group up or died."""
        # Read what has arrived first.
        self.transport.progress()
        if self.receive_state.collectives.has_mismatch():
            raise self.mismatch_error()
        check_collective(self._options, self.receive_state, self.transport)

    def check_store(self) -> None:
        """Raise DistBackendError if, according to the store, a rank is gone or has found a mismatch."""
        if self._store_monitor.is_due():
            if self._options.store.check([self._key("any")]):
                raise self.mismatch_error()
            # Ask about any rank: the departure of one whose frames have all been read may be behind a held frame.
            [rank] = self._store_monitor.turn(self._others, 1)
            if not self._has_completed(rank):
                try:
                    self._store_monitor.ask(rank, self.transport.link(self._options.ranks[rank]))
                except DistBackendError:
                    # It may have left between the two checks, after its part in this collective.
                    if not self._has_completed(rank):
                        raise

    def finish(self) -> None:
        self.receive_state.collectives.completed = self.word & NUMBER

    def publish_completed(self) -> None:
        with suppress(DistError):
            self._options.store.set(_completed_key(self._backend.rank), str(self.receive_state.collectives.completed))

    def _has_completed(self, rank: int) -> bool:
        """Return whether a rank left after its part in the current collective."""
        if rank not in self.receive_state.completed_by:
            key = _completed_key(rank)
            if not self._options.store.check([key]):
                return False
            self.receive_state.completed_by[rank] = int(self._options.store.get(key))
        return self.receive_state.completed_by[rank] >= self.word & NUMBER

    def mismatch_error(self) -> DistBackendError:
        """Send this rank's call to all ranks, collect theirs, and return the error that lists all."""
        store, rank, number = self._options.store, self._backend.rank, self.word & NUMBER
        calls: dict[int, str] = {}

        def publish(mine: str) -> None:
            with suppress(DistError):  # without a store, only connected ranks exchange their calls
                store.set(self._key(rank), mine)
                store.set(self._key("any"), "")
            header, text = pack_text(MISMATCH, rank, self.receive_state.token, mine.encode(), self.word)
            for link in self.transport.links_of(self.receive_state):
                if link.is_connected:
                    link.send_frame(header, text)

        def collect() -> dict[int, str]:
            self.transport.progress()
            told = self.receive_state.collectives.calls.items()
            calls.update((other, words) for other, (word, words) in told if word & NUMBER == number)
            with suppress(DistError):
                for other in [other for other in self._others if other not in calls]:
                    if store.check([self._key(other)]):
                        calls[other] = store.get(self._key(other)).decode()
            return calls

        check = CallCheck(rank, self._options.ranks)
        mine = check.words(self.signature)
        return check.explain(mine, len(self._others), publish, collect, pause_s=_PAUSE_S)

    def _key(self, rank: object) -> str:
        return f"calls/{self.word & NUMBER}/{rank}"


def _completed_key(rank: int) -> str:
    return f"through/{rank}"


class TrackedPlan(Plan):
    """A plan that records its completion."""

    def __init__(self, plan: Plan, backend: Backend, call: Call, tracker: CallTracker) -> None:
        self.copies = plan.copies
        super().__init__(backend, call)
        self._plan = plan
        self._tracker = tracker

    def steps(self, send: Buffers, recv: Buffers) -> Iterator[Waitable]:
        yield from self._plan.steps(send, recv)
        self._tracker.finish()
