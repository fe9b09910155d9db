"""A relay between clients and a store that resets connections, closes them, holds bytes back or changes them."""

from __future__ import annotations

import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

LOOPBACK = "127.0.0.1"
_RESET = struct.pack("ii", 1, 0)


class Middlebox:
    """Relays what comes to `port` to the store's; its methods return when they have taken effect."""

    def __init__(self, store_port: int) -> None:
        self.store_port = store_port
        self.num_connections = 0
        self.num_passed_on = 0  # pieces of requests
        self.swallows_replies = False  # until the connections end
        self.num_swallowed = 0
        self.change: Callable[[bytes], bytes] = bytes  # what becomes of bytes from a client
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[tuple[str, socket.socket]] = []  # of all connections, towards the "client" or the "store"
        self._todo: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._ours, self._wake = socket.socketpair()
        self._is_over = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._ours, selectors.EVENT_READ, self._obey)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self, at: str = "both") -> None:
        """Reset all connections, at the "client", at the "store", or at "both"; forget the other half in silence."""
        self._do(lambda: self._end(at, _RESET))

    def close_connections(self) -> None:
        """End all connections in order, at both sides."""
        self._do(lambda: self._end("both", None))

    def refuse(self) -> None:
        """Take no more connections: nothing listens here."""
        self._do(self._stop_listening)

    def close(self) -> None:
        self._do(self._finish)
        self._thread.join()
        self._wake.close()

    def _do(self, what: Callable[[], None]) -> None:
        done = threading.Event()
        self._todo.put((what, done))
        self._wake.send(b"x")
        assert done.wait(30)

    def _run(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select():
                if not self._is_over and key.fd in self._selector.get_map():  # not closed by an earlier one of these
                    key.data()

    def _obey(self) -> None:
        self._ours.recv(1)
        what, done = self._todo.get()
        what()
        done.set()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        store = socket.create_connection((LOOPBACK, self.store_port))
        self.num_connections += 1
        self._ends += [("client", client), ("store", store)]
        self._selector.register(client, selectors.EVENT_READ, lambda: self._relay(client, store, from_client=True))
        self._selector.register(store, selectors.EVENT_READ, lambda: self._relay(store, client, from_client=False))

    def _relay(self, source: socket.socket, target: socket.socket, *, from_client: bool) -> None:
        try:
            data = source.recv(1 << 16)
            if from_client:
                data = self.change(data)
            elif self.swallows_replies and data:
                self.num_swallowed += 1
                return
            if data:
                target.sendall(data)
                self.num_passed_on += from_client
                return
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one side has reset it
            pass
        self._selector.unregister(source)

    def _end(self, at: str, linger: bytes | None) -> None:
        ends, self._ends = self._ends, []
        self.swallows_replies = False
        for side, sock in ends:
            with suppress(KeyError):
                self._selector.unregister(sock)
            if at not in ("both", side):
                self._ends.append((side, sock))  # open, and silent
                continue
            if linger is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.close()

    def _stop_listening(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()

    def _finish(self) -> None:
        self._end("both", _RESET)
        self._listener.close()
        self._selector.close()
        self._ours.close()
        self._is_over = True
