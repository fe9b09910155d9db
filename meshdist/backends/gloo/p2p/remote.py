"""Point-to-point messages of a group with ranks on other hosts."""

from __future__ import annotations

from meshdist.backends.base import Backend
from meshdist.backends.gloo.match import Receiver
from meshdist.backends.gloo.published import publish_departed
from meshdist.backends.gloo.shm.receiver import ShmReceiver
from meshdist.backends.gloo.tcp.frames import LEFT, pack_text
from meshdist.backends.gloo.tcp.receiver import CollectiveReceiver, TcpReceiver
from meshdist.backends.gloo.tcp.sender import TcpSender
from meshdist.backends.gloo.tcp.transport import tcp_transport
from meshdist.runtime.departure import Departure


class RemoteP2P:
    def __init__(self, backend: Backend, ranks: frozenset[int]) -> None:
        self.ranks = ranks
        self.transport = tcp_transport(backend.options)
        self.receive_state = self.transport.open(backend.options.name, backend.options.ranks)
        self._backend = backend
        self._links = {rank: self.transport.link(backend.options.ranks[rank]) for rank in ranks}
        self._in_collectives: dict[int, Receiver] = {}

    def sender(self, dst: int) -> TcpSender:
        return TcpSender(self._backend, dst, self.transport, self.receive_state)

    def receiver(self, src: int) -> TcpReceiver:
        return TcpReceiver(self._backend, src, self.transport, self.receive_state)

    def in_collective(self, src: int, receiver: ShmReceiver | TcpReceiver) -> Receiver:
        """Return the receiver of a collective's messages; the sender may be on this host."""
        if src not in self._in_collectives:
            self._in_collectives[src] = CollectiveReceiver(self._backend, receiver, self.transport, self.receive_state)
        return self._in_collectives[src]

    def resume(self, src: int | None) -> None:
        """Parse held frames: a receive is posted, from one rank or from any."""
        for link in self._links.values() if src is None else [self._links[src]] if src in self.ranks else []:
            link.resume()

    def leave(self, departure: Departure) -> None:
        self.announce(departure)
        self.transport.leave_group(self.receive_state)
        publish_departed(self._backend.options, self._backend.rank)

    def announce(self, departure: Departure) -> None:
        receive_state = self.receive_state
        self.transport.close_group(
            receive_state,
            *pack_text(
                LEFT, self._backend.rank, receive_state.token, departure.encode(), receive_state.collectives.completed
            ),
        )
