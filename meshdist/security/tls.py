"""TLS for the connections to a store: both sides verify that the peer's certificate is from the job's authority.

The protocol within is unchanged, including the handshake with the job's secret. Only TLS 1.3; host names are not
compared, since any certificate of the authority belongs to the job. Imported only if needed, as it loads OpenSSL.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
from contextlib import suppress
from typing import Any

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import TLS_CA_VARIABLE, TLS_CERT_VARIABLE, TLS_KEY_VARIABLE, TlsError, TlsFiles
from meshdist.security.handshake import MAGIC, HandshakeBroken, answer_without_tls
from meshdist.system.deadline import Deadline

_HANDSHAKE = b"\x16"  # first byte of a TLS record: handshake, alert
_ALERT = b"\x15"
_PEEK_BYTES = 92
_RECORD_BYTES = 5
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "PACKET_LENGTH_TOO_LONG")
_OF_CERTIFICATES = ("unknown ca", "decrypt error", "certificate")
_MOST_UNREAD_BYTES = 1 << 14


class TlsSocket(ssl.SSLSocket):
    """A TLS socket with the errors of a plain one: BlockingIOError if it would block, no bytes at the end."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        except ssl.SSLError as error:
            raise TlsError(in_words(error)) from error

    def send(self, data: Any, flags: int = 0) -> int:
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
        # SSLSocket.shutdown also drops the TLS object that the other thread uses.
        socket.socket.shutdown(self, how)

    def handshake_is_done(self) -> bool:
        """Advance the TLS handshake without blocking; return whether it is complete.

        Raises:
            TlsError: A certificate is refused, or the peer does not speak TLS 1.3.
            OSError: The connection broke.
        """
        try:
            self.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError("closed during the TLS handshake") from None
        except ssl.SSLError as error:  # including SSLWantWriteError, which the few bytes of a handshake never cause
            raise TlsError(in_words(error)) from error
        return True

    def drain(self) -> None:
        """Read what has arrived: closing a socket with unread data resets it and may lose our last message."""
        with suppress(OSError):
            socket.socket.recv(self, _MOST_UNREAD_BYTES)

    def _read_last_word(self) -> None:
        """Raise the alert that the peer sent before it closed the connection, if any."""
        with suppress(BlockingIOError, TimeoutError):
            self.recv(1)


def in_words(error: ssl.SSLError) -> str:
    # By OpenSSL's text: the ssl module reports no alert codes.
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
    """Return the SSLContext of one side; raise ValueError for a file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = TlsSocket
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # sessions are not resumed
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
    """Return whether the first byte from a client is that of TLS; it stays unread."""
    return sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE


def accept_tls(sock: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """Return the server's side of a nonblocking connection, before its handshake; it replaces `sock`."""
    wrapped = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
    assert isinstance(wrapped, TlsSocket)
    return wrapped


def connect_tls(sock: socket.socket, context: ssl.SSLContext, purpose: str, peer: str, deadline: Deadline) -> TlsSocket:
    """Return the client's side of a connection, after its handshake; it replaces `sock`.

    Raises:
        HandshakeBroken: The connection ended; a retry may succeed.
        DistNetworkError: The server does not answer, does not speak TLS, or one side refuses the other's certificate.
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
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        has_come = selector.select(max(deadline.remaining_s(), 0.0))
    if not has_come:
        raise DistNetworkError(
            f"{peer} is not a meshdist {purpose} with TLS: it took the connection but did not answer within"
            f" {deadline.timeout_s:.3g} s; choose another port"
        )


def _answer_behind(sock: TlsSocket, error: TlsError) -> bytes:
    """Return the answer of a server without TLS, if OpenSSL has already read its beginning."""
    cause = error.__cause__
    if not isinstance(cause, ssl.SSLError) or cause.reason not in _NO_TLS:
        return b""
    try:
        rest = socket.socket.recv(sock, _PEEK_BYTES)
    except OSError:
        return b""
    # OpenSSL has consumed the five bytes of a record header.
    return MAGIC[:_RECORD_BYTES] + rest if rest.startswith(MAGIC[_RECORD_BYTES:]) else rest


def _check_answer(sock: TlsSocket, purpose: str, peer: str) -> None:
    """Raise an error if the server answers without TLS."""
    answer = socket.socket.recv(sock, _PEEK_BYTES, socket.MSG_PEEK)
    if answer and answer[:1] not in (_HANDSHAKE, _ALERT):
        raise answer_without_tls(answer, purpose, peer)
