"""Point-to-point messages of one group over MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import FastPath
from meshdist.backends.mpi.dispatcher import EAGER, FAILED, RTS, Dispatcher, Packet, pack_header
from meshdist.backends.mpi.library import Member, Polled, Requests
from meshdist.backends.p2p.eager_messages import MOST_EAGER_BYTES, MessageKinds, fast_recv
from meshdist.backends.p2p.match_queue import MatchQueue
from meshdist.backends.p2p.own_messages import OwnMessages
from meshdist.backends.p2p.requests import (
    NO_ARRAY,
    NO_TAG,
    Probing,
    RecvRequest,
    SendRequest,
    UnexpectedMessage,
    arrive,
    post,
)
from meshdist.errors import DistBackendError
from meshdist.runtime.departure import Departure, LeftOut, peer_gone
from meshdist.runtime.peer_monitor import PeerMonitor
from meshdist.runtime.waiting import Incoming, Probe, Waitable
from meshdist.system.deadline import Deadline

_DELIVERY_S = 5.0
_MOST_TEXT_BYTES = 1500
# How long the fast path polls for a message, yielding to other threads, before it posts a receive.
_LOOKING_S = 0.0002


class P2P:
    """The messages of one rank in its group, which `token` identifies in the dispatcher.

    `places` maps ranks in MPI.COMM_WORLD to ranks in the group, in the group's order.
    """

    def __init__(self, backend: Member, dispatcher: Dispatcher, token: int, places: dict[int, int]) -> None:
        self.failure: tuple[int, Departure] | None = None  # the first rank that gave up the group, and how
        self.dispatcher = dispatcher
        self._backend = backend
        self._token = token
        self._places = places
        self._addresses = list(places)
        self._kinds = MessageKinds(MOST_EAGER_BYTES)
        self.queue: MatchQueue[_Message, _RecvRequest] = MatchQueue(backend.session.lock)
        self.queue.describe = backend.options.call
        self.own = OwnMessages(backend.rank, self.queue)
        self._room = _Room(self)
        dispatcher.register(token, self)

    def send(self, array: Array, dst: int, tag: int) -> Waitable:
        self.dispatcher.poll()
        self.check_failure()
        data, name, address = as_bytes(array), self._kinds.names[array.dtype], self._addresses[dst]
        if data.size > self._kinds.eager_bytes:
            return _SendRequest(self, self.dispatcher.send_long(self._token, address, tag, data, name), dst)
        self.dispatcher.send(self._token, address, EAGER, tag, data, name)
        return self._room

    def recv(self, array: Array, src: int | None, tag: int) -> Incoming:
        request = _RecvRequest(self, array, self._kinds.names[array.dtype], src, tag)
        with self.queue.lock:
            post(request)
        return request

    def probe(self, src: int | None, tag: int | None) -> Probe:
        return _Probe(self, src, tag)

    def fast_send(self, dst: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        """Return the fast path of small messages of a kind; None if they exceed the eager limit."""
        kind = self._kinds.kind(tag, dtype, shape)
        if kind is None:
            return None
        token, address, send_now = self._token, self._addresses[dst], self.dispatcher.send_now
        header = pack_header(token, EAGER, tag, kind.num_bytes, kind.dtype_name)
        return lambda array: self.failure is None and send_now(token, address, header + array.tobytes())

    def fast_recv(self, src: int, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> FastPath | None:
        """Return the fast path of small messages of a kind; None if they exceed the eager limit."""
        kind = self._kinds.kind(tag, dtype, shape)
        if kind is None:
            return None
        queue, address, take_next = self.queue, self._addresses[src], self.dispatcher.take_next
        header = pack_header(self._token, EAGER, tag, kind.num_bytes, kind.dtype_name)

        def take(array: Array) -> bool | None:
            with queue.lock:
                if not queue.is_idle or self.failure is not None:
                    return False
                return take_next(address, header, as_bytes(array))

        return fast_recv(take, _LOOKING_S, self._backend.session.spins)

    def handle(self, packet: Packet) -> None:
        """Handle a packet; called with the lock held."""
        src = self._places[packet.source]
        if packet.kind == FAILED:
            self.failure = self.failure or (src, Departure.decode(bytes(packet.data)))
            return
        message = _Message(self, src, packet)
        if not arrive(message) and packet.kind == EAGER:
            message.data = packet.data.copy()

    def fail(self, departure: Departure) -> None:
        """Notify all ranks of the group that this one gives up."""
        text = np.frombuffer(departure.encode(_MOST_TEXT_BYTES), np.uint8)
        for place in self.others():
            self.dispatcher.send(self._token, self._addresses[place], FAILED, 0, text, b"")

    def close(self) -> None:
        """Wait until MPI has taken the messages sent, for a limited time, and receive no more."""
        deadline, pause = Deadline(_DELIVERY_S), threading.Event()
        while not self.dispatcher.all_sent(self._token) and not deadline.expired():
            pause.wait(0.001)
        self.dispatcher.unregister(self._token)

    def check_failure(self) -> None:
        """Raise DistBackendError if another rank has given up the group."""
        if self.failure is not None:
            src, departure = self.failure
            raise peer_gone(self.queue.describe(src), departure, rank=self.global_rank(src))

    def check(self, places: list[int], left_out: LeftOut) -> None:
        """Raise DistBackendError if all of these ranks are gone without doing `left_out`."""
        self.dispatcher.poll()
        self._backend.look()
        gone = [self._backend.options.gone(place) for place in places]
        if None not in gone and gone[0] is not None:
            raise peer_gone(self.queue.describe(places[0]), gone[0], left_out, rank=self.global_rank(places[0]))

    def global_rank(self, place: int) -> int:
        return self._backend.options.ranks[place]

    def others(self) -> list[int]:
        return [place for place in range(len(self._addresses)) if place != self._backend.rank]


class _Message(UnexpectedMessage):
    """A message that has arrived or is announced."""

    def __init__(self, p2p: P2P, source: int, packet: Packet) -> None:
        is_announced = packet.kind == RTS
        super().__init__(p2p.queue, source, packet.tag, packet.num_bytes, packet.dtype, is_announced=is_announced)
        self._packet = packet
        self._dispatcher = p2p.dispatcher
        self._requests: Requests | None = None
        if not is_announced:
            self.data = packet.data
            self.arrived()

    def fetch(self, target: Array, then: Callable[[], None]) -> None:
        self._requests, self._then = self._dispatcher.fetch(self._packet, target), then

    def progress(self) -> None:
        if self._requests is not None and self._requests.done():
            self._requests = None
            self._then()


class _Watched(Polled):
    """A request that fails when its peers are gone, which then have not done `left_out`."""

    left_out: LeftOut

    def __init__(self, p2p: P2P, places: list[int]) -> None:
        super().__init__()
        self.p2p = p2p
        self._places = places
        self._monitor = PeerMonitor()

    def check(self) -> None:
        if self.p2p.failure is not None or self._monitor.is_due():
            self.p2p.check(self._places, self.left_out)


class _Room(Polled):
    """Capacity for copies of eager messages; waited for only when very many are in flight."""

    def __init__(self, p2p: P2P) -> None:
        super().__init__()
        self._p2p = p2p

    def ready(self) -> bool:
        return self._p2p.dispatcher.has_room()

    def check(self) -> None:
        self._p2p.check_failure()

    def missing(self) -> str:
        return "the other ranks to receive messages"


class _SendRequest(_Watched, SendRequest):
    """A long message in flight."""

    left_out = LeftOut.RECEIVE

    def __init__(self, p2p: P2P, requests: Requests, dst: int) -> None:
        super().__init__(p2p, [dst])
        self._requests = requests
        self._dst = dst

    def ready(self) -> bool:
        self.p2p.dispatcher.poll()
        self.done = self.done or self._requests.done()
        return self.done

    def receiver_words(self) -> str:
        return self.p2p.queue.describe(self._dst)


class _RecvRequest(_Watched, RecvRequest):
    left_out = LeftOut.SEND

    def __init__(self, p2p: P2P, array: Array, dtype_name: bytes, wanted: int | None, tag: int) -> None:
        _Watched.__init__(self, p2p, p2p.others() if wanted is None else [wanted])
        RecvRequest.__init__(self, array, dtype_name, wanted, tag, p2p.queue)

    def check(self) -> None:
        try:
            super().check()
        except DistBackendError as error:
            self.add_instead(error)
            raise

    def progress(self) -> None:
        if self.message is None:
            self.p2p.dispatcher.poll()
        message = self.message  # another thread may finish the receive meanwhile
        if message is not None:
            message.progress()

    def awaits(self) -> list[int]:
        sources = self.p2p.others() if self.wanted is None else [self.wanted]
        if self.done or self.message is not None or len(sources) > 1:  # any of several
            return []
        return [self.p2p.global_rank(sources[0])]


class _Probe(Probing, _RecvRequest):
    def __init__(self, p2p: P2P, wanted: int | None, tag: int | None) -> None:
        self.wanted_tag = tag
        super().__init__(p2p, *NO_ARRAY, wanted, NO_TAG if tag is None else tag)

    def progress(self) -> None:
        self.p2p.dispatcher.poll()
