"""Waits for TCP, and the checks of whether the awaited ranks are alive."""

from __future__ import annotations

from abc import abstractmethod

from meshdist.backends.backend_options import BackendOptions
from meshdist.backends.gloo.published import check_withdrawn
from meshdist.backends.gloo.tcp.collective_frames import NUMBER
from meshdist.backends.gloo.tcp.group_receive_state import GroupReceiveState
from meshdist.backends.gloo.tcp.link import Link
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.backends.gloo.tcp.transport import TcpTransport
from meshdist.errors import DistError
from meshdist.runtime.departure import Departure, LeftOut, PeerExit, peer_gone
from meshdist.runtime.doorbells import SocketDoorbell
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.waiting import Doorbell, Waitable

# A message in flight takes some tens of microseconds. Polling longer keeps other processes from computing, and the
# scheduler then gives the polling thread less time.
SPIN_S = 0.0001
# After these, the peer's record in the store says more, if there is one.
_RECORDED = (PeerExit.LEFT_WORLD, PeerExit.DIED, PeerExit.RESET)


class TcpWait(Waitable):
    spin_s = SPIN_S

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport
        self._bell: Doorbell | None = None

    @abstractmethod
    def is_done(self) -> bool: ...

    def ready(self) -> bool:
        if not self.is_done():
            self._transport.progress()
        return self.is_done()

    def ring(self) -> None:
        if self._bell is not None:
            self._bell.ring()

    def arm(self, bell: Doorbell) -> None:
        self._bell = bell
        watch(self._transport, bell)

    def disarm(self, bell: Doorbell) -> None:
        self._bell = None
        unwatch(self._transport, bell)


class OutgoingWait(TcpWait):
    def __init__(self, transport: TcpTransport, outgoing: Outgoing) -> None:
        super().__init__(transport)
        self.outgoing = outgoing

    def is_done(self) -> bool:
        return self.outgoing.done

    def arm(self, bell: Doorbell) -> None:
        self.outgoing.on_done = self.ring
        super().arm(bell)

    def disarm(self, bell: Doorbell) -> None:
        self.outgoing.on_done = None
        super().disarm(bell)


def watch(transport: TcpTransport, bell: Doorbell) -> None:
    assert isinstance(bell, SocketDoorbell)
    bell.watch(transport.fd)


def unwatch(transport: TcpTransport, bell: Doorbell) -> None:
    assert isinstance(bell, SocketDoorbell)
    bell.unwatch(transport.fd)


def check_rank(receive_state: GroupReceiveState, link: Link, rank: int, left_out: LeftOut) -> None:
    """Raise DistBackendError if a rank on another host has left the group, or its connection has ended."""
    departure = receive_state.departures.get(rank)
    if departure is not None:
        raise peer_gone(link.describe(receive_state), departure, left_out, rank=link.rank)
    end = how_ended(link)
    if end is not None:
        raise peer_gone(link.describe(receive_state), end, left_out, rank=link.rank)


def how_ended(link: Link) -> Departure | None:
    """Return how the peer ended; None while it can be reached.

    A failing rank says why in its groups and in the store; the end of its connection alone says little.
    """
    end = link.end()
    if end is None or end.exit not in _RECORDED:
        return end
    try:
        record = link.departure()
    except DistError:  # the store may be lost as well
        return end
    if record is None and end.exit is PeerExit.RESET and link.has_just_ended:
        return None  # the store learns of the end of a process at the same time
    if record is None or (end.exit is PeerExit.DIED and record.exit is PeerExit.CUT_OFF):
        return end
    return record


class StoreMonitor(PeerMonitor):
    """Asks the store now and then whether a rank is gone: one without connection, or whose last frames are held."""

    def __init__(self, options: BackendOptions, left_out: LeftOut) -> None:
        super().__init__()
        self._options = options
        self._left_out = left_out

    def ask(self, rank: int, link: Link) -> None:
        check_withdrawn(self._options, rank, self._left_out, is_read=link.is_read)

    def check(self, rank: int, link: Link) -> None:
        if self.is_due():
            self.ask(rank, link)


def check_collective(options: BackendOptions, receive_state: GroupReceiveState, transport: TcpTransport) -> None:
    """Raise DistBackendError if a collective cannot complete: a rank of the group gave it up, or has died."""
    for rank, departure in list(receive_state.departures.items()):
        # A rank that failed only after its part in this collective does not keep the others from completing it.
        if (
            not departure.exit.is_orderly
            and receive_state.completed_by.get(rank, 0) < receive_state.collectives.word & NUMBER
        ):
            raise peer_gone(options.describe(rank), departure, rank=options.ranks[rank])
    for link in transport.links_of(receive_state):
        end = link.end()
        if end is not None and not end.exit.is_orderly:
            end = how_ended(link)
            if end is not None and not end.exit.is_orderly:
                raise peer_gone(link.describe(receive_state), end, rank=link.rank)
