"""Receives a group's messages from one rank on another host."""

from __future__ import annotations

from meshdist.backends.base import Backend, FastPath
from meshdist.backends.gloo.match import GlooRecvRequest, Receiver
from meshdist.backends.gloo.tcp.fast_path import tcp_fast_recv
from meshdist.backends.gloo.tcp.group_receive_state import GroupReceiveState
from meshdist.backends.gloo.tcp.transport import TcpTransport
from meshdist.backends.gloo.tcp.waits import SPIN_S, StoreMonitor, check_collective, check_rank, unwatch, watch
from meshdist.backends.p2p.eager_messages import MessageKind
from meshdist.runtime.departure import Departure, LeftOut
from meshdist.runtime.waiting import Doorbell


class TcpReceiver:
    reads_in = ""  # both sides count

    def __init__(self, backend: Backend, src: int, transport: TcpTransport, receive_state: GroupReceiveState) -> None:
        self.link = transport.link(backend.options.ranks[src])
        self.description = self.link.describe(receive_state)
        self.spin_s = SPIN_S
        self._store_monitor = StoreMonitor(backend.options, LeftOut.SEND)
        self.src = src
        self.awaited = (self.link.rank,)
        self._transport = transport
        self.receive_state = receive_state

    @property
    def is_known(self) -> bool:
        return self.link.is_connected or self.src in self.receive_state.departures

    @property
    def connect_error(self) -> str:
        return f" ({self.link.connect_error})" if self.link.connect_error else ""

    def fast_path(self, kind: MessageKind) -> FastPath | None:
        return tcp_fast_recv(self.link, self.receive_state, self.src, kind) if kind.is_eager else None

    def move(self, request: GlooRecvRequest) -> None:
        self._transport.progress()

    def check(self) -> None:
        check_rank(self.receive_state, self.link, self.src, LeftOut.SEND)
        self._store_monitor.check(self.src, self.link)

    def poll_now(self) -> None:
        """Do nothing: arriving messages need no request to the store."""

    def look(self, tag: int | None) -> None:
        """Find nothing: each frame that comes is read."""

    def receivers(self) -> list[TcpReceiver]:
        return [self]

    def departure(self) -> Departure | None:
        return self.receive_state.departures.get(self.src)

    def arm(self, bell: Doorbell) -> bool:
        watch(self._transport, bell)
        return True

    def disarm(self, bell: Doorbell) -> None:
        unwatch(self._transport, bell)


class CollectiveReceiver:
    """Receives messages of a collective: any rank of the group may be why one is missing, so `check` checks all."""

    def __init__(
        self, backend: Backend, receiver: Receiver, transport: TcpTransport, receive_state: GroupReceiveState
    ) -> None:
        self.description = receiver.description
        self.spin_s = receiver.spin_s
        self._options = backend.options
        self._receiver = receiver
        self._transport = transport
        self._receive_state = receive_state
        self.move = receiver.move
        self.poll_now = receiver.poll_now
        self.receivers = receiver.receivers
        self.awaited, self.reads_in = receiver.awaited, receiver.reads_in

    @property
    def connect_error(self) -> str:
        return self._receiver.connect_error

    def check(self) -> None:
        self._transport.progress()
        check_collective(self._options, self._receive_state, self._transport)
        self._receiver.check()
