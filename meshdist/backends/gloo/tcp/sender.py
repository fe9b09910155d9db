"""Sends a group's messages to one rank on another host, in order."""

from __future__ import annotations

from meshdist.arrays.host import Array, as_bytes
from meshdist.backends.base import Backend, FastPath
from meshdist.backends.gloo.tcp.fast_path import tcp_fast_send
from meshdist.backends.gloo.tcp.frames import DATA, EAGER, RTS, pack
from meshdist.backends.gloo.tcp.group_receive_state import MOST_KEPT_BYTES, GroupReceiveState
from meshdist.backends.gloo.tcp.outgoing import Outgoing
from meshdist.backends.gloo.tcp.transport import TcpTransport
from meshdist.backends.gloo.tcp.waits import OutgoingWait, StoreMonitor, check_rank
from meshdist.backends.p2p.eager_messages import MessageKind
from meshdist.backends.p2p.requests import SendRequest
from meshdist.runtime.departure import LeftOut
from meshdist.runtime.waiting import Waitable

_NOTHING = memoryview(b"")


class TcpSender:
    """Sends the messages to one rank. Any thread may post.

    A message of up to the eager limit, or of a collective, is sent at once (EAGER), and is done when the kernel has it.
    A longer one is announced (RTS), and its bytes are sent when the receiver has answered CTS.
    """

    def __init__(self, backend: Backend, dst: int, transport: TcpTransport, receive_state: GroupReceiveState) -> None:
        self.link = transport.link(backend.options.ranks[dst])
        self.transport = transport
        self.receive_state = receive_state
        self.src = backend.rank
        self.dst = dst
        self._store_monitor = StoreMonitor(backend.options, LeftOut.RECEIVE)

    def post(self, array: Array, tag: int, dtype_name: bytes, eager_bytes: int) -> Waitable:
        if self.dst in self.receive_state.departures:
            self.check()
        data, token = as_bytes(array).data, self.receive_state.token
        if tag >= 0 and len(data) > eager_bytes:
            return LongSendRequest(self, data, tag, dtype_name)
        outgoing = Outgoing(pack(EAGER, self.src, token, tag, len(data), 0, dtype_name), data)
        self.link.send(outgoing)
        return TcpSendRequest(self, outgoing, is_buffered=tag >= 0)

    def fast_path(self, kind: MessageKind) -> FastPath | None:
        return tcp_fast_send(self.link, self.receive_state, self.src, self.dst, kind) if kind.is_eager else None

    def check(self) -> None:
        check_rank(self.receive_state, self.link, self.dst, LeftOut.RECEIVE)
        self._store_monitor.check(self.dst, self.link)


class TcpSendRequest(OutgoingWait, SendRequest):
    def __init__(self, sender: TcpSender, outgoing: Outgoing, *, is_buffered: bool = False) -> None:
        super().__init__(sender.transport, outgoing)
        self._sender = sender
        self._is_buffered = is_buffered

    def ready(self) -> bool:
        self._sender.receive_state.queue.progress_sends()
        return super().ready()

    def check(self) -> None:
        self._sender.check()

    def receiver_words(self) -> str:
        return self._sender.link.describe(self._sender.receive_state)

    def full_buffer(self) -> str:
        if not self._is_buffered or self.is_done():
            return ""
        return f"a receiver buffers up to {MOST_KEPT_BYTES >> 20} MiB of unreceived messages"

    def missing(self) -> str:
        connect_error = self._sender.link.connect_error
        return super().missing() + (f" ({connect_error})" if connect_error else "")


class LongSendRequest(TcpSendRequest):
    """A long message: waits for the receiver's CTS, then until the kernel has the bytes."""

    def __init__(self, sender: TcpSender, data: memoryview, tag: int, dtype_name: bytes) -> None:
        link, src, token = sender.link, sender.src, sender.receive_state.token
        number = link.announce(self)
        self._data = data
        self._header = pack(DATA, src, token, tag, len(data), number, dtype_name)
        super().__init__(sender, Outgoing(pack(RTS, src, token, tag, len(data), number, dtype_name), _NOTHING))
        self._is_requested = False
        link.send(self.outgoing)
        # The CTS may be behind a held frame.
        link.resume()

    def is_done(self) -> bool:
        return self._is_requested and self.outgoing.done

    def awaits(self) -> list[int]:
        queue = self._sender.receive_state.queue
        return [] if self._is_requested or queue.arriving else [self._sender.link.rank]

    def sends_to(self) -> list[int]:
        return self._sender.receive_state.queue.sends_besides()

    def send_data(self) -> None:
        self.outgoing = Outgoing(self._header, self._data)
        self.outgoing.on_done = self.ring
        self._is_requested = True
        self._sender.link.send(self.outgoing)
