"""AnySource: receives a message from any other rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshdist.backends.base import Backend
from meshdist.backends.gloo.match import GlooMatchQueue, GlooRecvRequest
from meshdist.backends.gloo.published import Senders, find_departure
from meshdist.backends.gloo.shm.receiver import ShmReceiver
from meshdist.backends.p2p.requests import UnexpectedMessage
from meshdist.runtime.departure import Departure, LeftOut, any_of, nobody_left, peer_gone
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.waiting import Incoming

if TYPE_CHECKING:
    from meshdist.backends.gloo.tcp.receiver import TcpReceiver


class AnySource:
    """A `Receiver` from any rank. `receivers` holds the existing receivers by rank; `make` creates that of a rank."""

    spin_s = Incoming.spin_s
    connect_error = ""

    def __init__(
        self,
        backend: Backend,
        receivers: dict[int, ShmReceiver | TcpReceiver],
        make: Callable[[int], object],
        queue: GlooMatchQueue,
    ) -> None:
        self._options = backend.options
        self._receivers = receivers
        self._make = make
        self._queue = queue
        self._senders = Senders(backend.options, backend.rank)
        self._others = others = [rank for rank in range(backend.size) if rank != backend.rank]
        self.description = any_of(others, backend.options.describe)
        backend.options.peers.cards(backend.options.ranks)  # now, for the checks of whether the processes are alive
        self._gone: dict[int, Departure] = {}
        self._monitor = PeerMonitor()
        self._turn = 0

    @property
    def awaited(self) -> list[int]:
        """All other ranks of the group, if each that has begun to send is known, so that its messages are read."""
        is_known = len(self._receivers) == len(self._others) or self._senders.has_asked
        return [self._options.ranks[rank] for rank in self._others] if is_known else []

    @property
    def reads_in(self) -> str:
        # From other hosts, both sides count.
        is_remote = self._options.remote_ranks().issuperset(self._others)
        return "" if is_remote else self._options.name

    def move(self, request: GlooRecvRequest) -> None:
        for src in self._senders.find():
            self._make(src)
        for receiver in self.receivers():
            receiver.move(request)
            if request.done:
                # Begin with another rank next time.
                with self._queue.lock:
                    self._receivers[request.source] = self._receivers.pop(request.source)
                return

    def look(self, tag: int | None) -> UnexpectedMessage | None:
        looks = (receiver.look(tag) for receiver in self.receivers())
        return next((message for message in looks if message is not None), None)

    def new_senders(self) -> list[int]:
        """Return the ranks that have begun to send to this one since the last call."""
        self._senders.poll_now()
        return self._senders.find()

    def all_senders(self) -> list[int]:
        """Return the ranks that have begun to send to this one; one request to the store, or two."""
        self.new_senders()
        return sorted(self._senders.found)

    def check(self) -> None:
        unknown = []
        for rank in self._others:
            receiver = self._receivers.get(rank)
            if receiver is None or not receiver.is_known:
                unknown.append(rank)
                continue
            departure = receiver.departure()
            if departure is not None and departure.exit.is_orderly:
                self._gone[rank] = departure
            else:
                receiver.check()
        if self._monitor.is_due():  # one request to the store for every rank that has sent nothing
            self._check_unknown(unknown)
        if len(self._gone) == len(self._others):
            self.poll_now()  # one of them may have sent a message that is not found yet
            raise nobody_left({self._options.describe(rank): self._gone[rank] for rank in self._others})

    def poll_now(self) -> None:
        self._senders.poll_now()
        for receiver in self.receivers():
            receiver.poll_now()

    def receivers(self) -> list[ShmReceiver | TcpReceiver]:
        return list(self._receivers.values())

    def _check_unknown(self, unknown: list[int]) -> None:
        # Ask the store about ended processes, and about the others, beginning with another one each time, until one of
        # them is alive.
        options = self._options
        self._turn += 1
        first = self._turn % max(1, len(unknown))
        is_anybody_there = False
        for rank in (*unknown[first:], *unknown[:first]):
            if rank not in self._gone and (not is_anybody_there or options.peers.ended(options.ranks[rank])):
                departure = find_departure(options, rank)
                if departure is None:
                    is_anybody_there = True
                elif departure.exit.is_orderly:
                    self._gone[rank] = departure
                else:
                    raise peer_gone(options.describe(rank), departure, LeftOut.SEND, rank=options.ranks[rank])
