"""TLS around the connections to a store: both sides show certificates of the job's authority, and check the other's.

What goes on inside is the same as without it, the handshake that proves the job's secret as well. Only TLS 1.3 is
spoken, and no names are compared: who has a certificate of the authority is of the job, whatever its host is called.
Imported where TLS is used, as it loads OpenSSL.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from contextlib import suppress
from typing import Any

from meshdist.deadline import Deadline
from meshdist.errors import DistNetworkError
from meshdist.handshake import MAGIC, HandshakeBroken, answer_without_tls
from meshdist.tls_files import TLS_CA_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TlsError, TlsFiles

_HANDSHAKE = b"\x16"  # what a record of TLS begins with: handshake, alert
_ALERT = b"\x15"
_PEEK_BYTES = 92
_RECORD_BYTES = 5
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG")
_OF_CERTIFICATES = ("unknown ca", "decrypt error", "certificate")
_MOST_UNREAD_BYTES = 1 << 14


class TlsSocket(ssl.SSLSocket):
    """A socket with TLS that fails as others do: what does not block raises BlockingIOError, an end is no bytes.

    Example:
        >>> issubclass(TlsSocket, socket.socket)
        True
    """

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Return what has come; nothing where the other side has closed the connection."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        except ssl.SSLError as error:
            raise TlsError(in_words(error)) from error

    def send(self, data: Any, flags: int = 0) -> int:
        """Send what there is room for, and return how much that is."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ConnectionError, ssl.SSLEOFError):
            self._read_last_word()
            raise
        except ssl.SSLError as error:
            raise TlsError(in_words(error)) from error

    def shutdown(self, how: int) -> None:
        """End the connection, while another thread may be using it."""
        # SSLSocket's own takes the TLS away first, from under that thread.
        socket.socket.shutdown(self, how)

    def handshake_is_done(self) -> bool:
        """Go on with the handshake as far as that is possible now; return whether that was all.

        Raises:
            TlsError: The other side's certificate is refused, or it speaks no TLS 1.3.
            OSError: The connection broke.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError("closed during the TLS handshake") from None
        except ssl.SSLError as error:  # that there is no room to write among them: the few bytes of it always have some
            raise TlsError(in_words(error)) from error
        return True

    def drain(self) -> None:
        """Take what has come: left unread, it would turn the close into a reset, and the last word be lost."""
        with suppress(OSError):
            socket.socket.recv(self, _MOST_UNREAD_BYTES)

    def _read_last_word(self) -> None:
        """Raise what the other side said as it closed the connection, if it said anything."""
        with suppress(BlockingIOError, TimeoutError):
            self.recv(1)


def in_words(error: ssl.SSLError) -> str:
    """Return what a failure of TLS means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one of {TLS_CA_VARIABLE}: {error.verify_message}"
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if reason == "peer did not return a certificate":
        return "it showed no certificate"
    alert = reason.partition("alert ")[2]
    if any(words in alert for words in _OF_CERTIFICATES):
        return f"it does not take the certificate of this side, {TLS_CERT_VARIABLE}: {alert}"
    if alert:
        return f"it broke off: {alert}"
    return f"it speaks no TLS as this side does: {reason}"


def tls_context(files: TlsFiles, *, is_server: bool) -> ssl.SSLContext:
    """Return how one side of connections speaks TLS.

    Raises:
        ValueError: A file cannot be used; says which.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # nobody resumes a session
    for variable, path in ((TLS_CA_VARIABLE, files.authority), (TLS_CERT_VARIABLE, files.certificate)):
        if not os.path.isfile(path):
            raise ValueError(f"{variable}={path} cannot be read: no such file")
    try:
        context.load_verify_locations(files.authority)
    except OSError as error:
        raise ValueError(f"{TLS_CA_VARIABLE}={files.authority} holds no certificate in PEM format: {error}") from error
    try:
        context.load_cert_chain(files.certificate, files.key, password=_refuse_to_ask)
    except OSError as error:
        raise ValueError(
            f"{TLS_CERT_VARIABLE}={files.certificate} and {TLS_KEY_VARIABLE}={files.key} must hold a certificate and"
            f" its key in PEM format: {error}"
        ) from error
    return context


def _refuse_to_ask() -> str:
    raise ValueError(
        f"{TLS_KEY_VARIABLE} is encrypted with a password; give a key without one, which only you can read"
    )


def looks_like_tls(sock: socket.socket) -> bool:
    """Return whether what a client has sent first begins as TLS does; whatever else may be, nothing is taken of it.

    Raises:
        OSError: Nothing has come, or the connection broke.
    """
    return sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE


def accept_tls(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """Return the server's side of a connection that does not block, its handshake still to be done; `sock` is gone."""
    wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def connect_tls(sock: socket.socket, context: ssl.SSLContext, purpose: str, peer: str, deadline: Deadline) -> TlsSocket:
    """Return the client's side of a connection, its handshake done; `sock` is gone.

    Args:
        sock: A connected socket.
        context: Of a client.
        purpose: What the connection is for, for messages.
        peer: The server's "host:port".
        deadline: When to give up.

    Raises:
        HandshakeBroken: The connection ended; another attempt may succeed.
        DistNetworkError: The server is silent, speaks no TLS, or one side refuses the certificate of the other.
    """
    sock.setblocking(False)
    wrapped = context.wrap_socket(sock, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    try:
        has_answered = False
        while not wrapped.handshake_is_done():
            _await_answer(wrapped, purpose, peer, deadline)
            if not has_answered:
                has_answered = True
                _check_answer(wrapped, purpose, peer)
    except TlsError as error:
        answer = _answer_behind(wrapped, error)
        wrapped.close()
        if answer:
            raise answer_without_tls(answer, purpose, peer) from error
        raise DistNetworkError(f"no TLS with the {purpose} at {peer}: {error}") from error
    except OSError as error:
        wrapped.close()
        raise HandshakeBroken(f"{peer} is not a meshdist {purpose}: TLS: {error}") from error
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _await_answer(sock: TlsSocket, purpose: str, peer: str, deadline: Deadline) -> None:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    if not poller.poll(1000 * max(deadline.remaining_s(), 0.0)):
        raise DistNetworkError(
            f"{peer} is not a meshdist {purpose} with TLS: it took the connection but did not answer within"
            f" {deadline.timeout_s:.3g} s; choose another port"
        )


def _answer_behind(sock: TlsSocket, error: TlsError) -> bytes:
    """Return what a server said that spoke no TLS, where it was so quick that TLS has begun to read it already."""
    cause = error.__cause__
    if not isinstance(cause, ssl.SSLError) or cause.reason not in _NO_TLS:
        return b""
    try:
        rest = socket.socket.recv(sock, _PEEK_BYTES)
    except OSError:
        return b""
    # TLS has taken the five bytes of a record's header.
    return MAGIC[:_RECORD_BYTES] + rest if rest.startswith(MAGIC[_RECORD_BYTES:]) else rest


def _check_answer(sock: TlsSocket, purpose: str, peer: str) -> None:
    """Raise what a server means that answers otherwise than by TLS."""
    answer = socket.socket.recv(sock, _PEEK_BYTES, socket.MSG_PEEK)
    if answer and answer[:1] not in (_HANDSHAKE, _ALERT):
        raise answer_without_tls(answer, purpose, peer)
