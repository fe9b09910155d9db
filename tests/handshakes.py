"""The server's end of a handshake over a blocking socket; the product's servers poll many."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterable

from meshdist.errors import DistNetworkError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeBroken, ServerHandshake
from meshdist.system.deadline import Deadline


def accept_handshake(sock: socket.socket, secret: bytes, purpose: str, deadline: Deadline | None = None) -> bytes:
    """Prove this end to the client of `sock`, whose timeout is changed, and return the client's claim."""
    handshake = ServerHandshake(secret, purpose)
    deadline = deadline or Deadline(HANDSHAKE_TIMEOUT_S)
    too_slow = f"{purpose}: the client did not prove itself in {deadline.timeout_s:.3g} s"
    while not handshake.trusted and handshake.refusal is None:
        try:
            sock.settimeout(max(deadline.remaining_s(), 1e-3))
            data = sock.recv(handshake.wanted)
            sock.sendall(handshake.feed(data))
        except TimeoutError:
            raise DistNetworkError(too_slow) from None
        except OSError as error:
            raise HandshakeBroken(f"{purpose}: the connection broke during the handshake: {error}") from error
        if not data:
            raise HandshakeBroken(f"{purpose}: the client closed the connection during the handshake")
        if deadline.expired() and not handshake.trusted:
            raise DistNetworkError(too_slow)
    if handshake.refusal is not None:
        raise DistNetworkError(f"{purpose}: refused a client: {handshake.refusal}")
    return handshake.claim


def begin_tls(strangers: Iterable[socket.socket]) -> None:
    """Have strangers begin a TLS handshake and say no more: by turns a whole ClientHello, half of one, or one byte."""
    said, unused = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(unused, said).do_handshake()
    hello = said.read()
    for number, stranger in enumerate(strangers):
        with contextlib.suppress(ConnectionError):  # the first ones may have made room
            stranger.sendall(hello[: [len(hello), len(hello) // 2, 1][number % 3]])
