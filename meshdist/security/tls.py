"""TLS for the connections between the processes of a job: both sides verify the other's certificate.

The protocol within is unchanged, including the handshake with the job's secret. Only TLS 1.3; host names are not
compared, since any certificate of the authority belongs to the job. Imported only if needed, as it loads OpenSSL.
"""

from __future__ import annotations

import hashlib
import os
import selectors
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import (
    SECRET_VARIABLE,
    TLS_CA_VARIABLE,
    TLS_CERT_VARIABLE,
    TLS_KEY_VARIABLE,
    AlertError,
    OtherSecretAlert,
    OtherSecretError,
    TlsError,
    TlsFiles,
)
from meshdist.security.handshake import HandshakeBroken, HandshakeUnanswered, OtherJobError, answer_without_tls
from meshdist.security.job_certificate import job_certificate
from meshdist.system.deadline import Deadline

_HANDSHAKE = b"\x16"  # first byte of a TLS record: handshake, alert
_ALERT = b"\x15"
_PEEK_BYTES = 92
_OF_CERTIFICATES = ("unknown ca", "decrypt error", "certificate")
_REASONS = {
    "peer did not return a certificate": "it showed no certificate",
    "decryption failed or bad record mac": "what it sent was changed on the way",
}
_MOST_UNREAD_BYTES = 1 << 14
# What one system call reads or writes: eight records of TLS. Larger blocks leave the cache before they are used.
_BLOCK_BYTES = 128 << 10
_RECORD_BYTES = 17 << 10
_NOTHING = memoryview(b"")


class TlsSocket(socket.socket):
    """A TLS socket with the errors of a plain one: BlockingIOError if it would block, no bytes at the end.

    OpenSSL encrypts and decrypts in memory, and one system call moves many records: on its own socket it makes two for
    each record it reads, of 16 KiB. What has been read and not yet decrypted is not reported by a selector: after each
    read, `take` it until it raises BlockingIOError.
    """

    def __init__(self, sock: socket.socket, context: TlsContext, *, is_server: bool) -> None:
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout_s)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._of_job = context.of_job
        self._expects_answer = is_server  # the client speaks first
        self._block = memoryview(bytearray(_RECORD_BYTES))  # larger once the peer is known
        self._digest, self._is_server = context.digest, is_server
        self._unsent = _NOTHING
        # Bytes of the caller that are encrypted, but not yet all with the kernel: they do not count as sent.
        self._ahead = 0
        self._kept = b""  # a byte that was read to find an alert
        self._is_dry = False  # nothing whole is left of what has been read
        self._failure: ssl.SSLError | None = None  # what came behind bytes that have been returned

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        data = bytearray(buflen)
        return bytes(data[: self.recv_into(data)])

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        place = memoryview(buffer)[: nbytes or None]
        while True:
            with suppress(BlockingIOError):
                return self.take_into(place)
            if not self._read_block():
                return 0

    def take(self, buflen: int) -> bytes:
        """Return bytes that have been read from the socket already; raise BlockingIOError if there are none."""
        data = bytearray(buflen)
        return bytes(data[: self.take_into(data)])

    def take_into(self, buffer: bytearray | memoryview) -> int:
        """Write bytes that have been read from the socket already to `buffer`; see `take`."""
        if self._kept:
            buffer[:1], self._kept = self._kept, b""
            return 1
        if self._is_dry:
            raise BlockingIOError
        if self._failure is not None:
            raise self._error(self._failure)
        # A record at a time, since OpenSSL returns no more in one call.
        read, count = self._tls.read, 0
        try:
            place = memoryview(buffer)
            while place:
                num_read: int = read(len(place), place)  # type: ignore[assignment]
                count += num_read
                place = place[num_read:]
        except ssl.SSLWantReadError:
            self._is_dry = True
            if not count:
                raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            pass
        except ssl.SSLError as error:
            if not count:
                raise self._error(error) from error
            self._failure = error
        return count

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([memoryview(data)])

    def sendall(self, data: Any, flags: int = 0) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.send(rest) :]

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        """Send the first bytes of `buffers`; after BlockingIOError, call again with the same bytes, as OpenSSL asks."""
        if not self._ahead:
            room = _BLOCK_BYTES
            for piece in buffers:
                part = memoryview(piece)[:room]
                if part:
                    room -= self._encrypt(part)
            self._ahead = _BLOCK_BYTES - room
        self._flush()
        sent, self._ahead = self._ahead, 0
        return sent

    def handshake_is_done(self) -> bool:
        """Advance the TLS handshake without blocking, when there is an answer; return whether it is complete.

        Raises:
            TlsError: A certificate is refused, or the peer does not speak TLS 1.3.
            OSError: The connection broke.
        """
        if self._expects_answer:
            try:
                if not self._read_block():
                    raise ConnectionResetError("closed during the TLS handshake")
            except BlockingIOError:
                return False
        self._expects_answer = True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()  # a new connection always has room for so few bytes
            return False
        except ssl.SSLError as error:
            with suppress(OSError):
                self._flush()  # the alert
            raise self._error(error) from error
        self._flush()
        self._block = memoryview(bytearray(_BLOCK_BYTES))
        return True

    def binding(self) -> bytes:
        """Return what both sides of this connection have in common, and nobody who has come between them."""
        certificate = self._tls.getpeercert(binary_form=True)
        digests = [self._digest, _digest(certificate or b"")]
        return b"".join(digests if self._is_server else reversed(digests))

    def drain(self) -> None:
        """Read what has arrived: closing a socket with unread data resets it and may lose our last message."""
        with suppress(OSError):
            super().recv(_MOST_UNREAD_BYTES)

    def _read_block(self) -> bool:
        """Read once from the socket; return False at its end; raise OSError, such as BlockingIOError."""
        count = super().recv_into(self._block)
        self._incoming.write(self._block[:count])
        self._is_dry = False
        return count > 0

    def _encrypt(self, data: memoryview) -> int:
        try:
            return self._tls.write(data)
        except ssl.SSLError as error:
            raise self._error(error) from error

    def _flush(self) -> None:
        try:
            while self._unsent or self._outgoing.pending:
                if not self._unsent:
                    self._unsent = memoryview(self._outgoing.read())
                self._unsent = self._unsent[super().send(self._unsent) :]
        except ConnectionError:
            with suppress(BlockingIOError, TimeoutError):
                self._kept = self.recv(1)  # raises the alert that the peer sent before it closed the connection
            raise

    def _error(self, error: ssl.SSLError) -> TlsError:
        return _tls_error(error, self._of_job)


def _tls_error(error: ssl.SSLError, of_job: bool) -> TlsError:
    """Return what went wrong; `of_job` if the certificates stand for the job's secret."""
    # By OpenSSL's text: the ssl module reports no alert codes.
    reason = (error.reason or str(error)).replace("_", " ").lower()
    alert = reason.partition("alert ")[2]
    is_refused = any(words in alert for words in _OF_CERTIFICATES)
    if of_job and isinstance(error, ssl.SSLCertVerificationError):
        return OtherSecretError(f"it has another {SECRET_VARIABLE}")
    if of_job and is_refused:
        return OtherSecretAlert(f"it says that this side has another {SECRET_VARIABLE}: {alert}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsError(f"its certificate is not one of {TLS_CA_VARIABLE}: {error.verify_message}")
    if is_refused:
        return AlertError(f"it does not accept the certificate of this side, {TLS_CERT_VARIABLE}: {alert}")
    if alert:
        return AlertError(f"it broke off: {alert}")
    return TlsError(_REASONS.get(reason, f"its TLS is not compatible with that of this side: {reason}"))


class TlsContext(ssl.SSLContext):
    """TLS 1.3 in which both sides show a certificate, with `of_job` the one that stands for the job's secret."""

    of_job = False
    digest = b""  # of the certificate that this side shows


def _new_context(*, is_server: bool) -> TlsContext:
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if is_server:
        context.num_tickets = 0  # sessions are not resumed
    return context


def context_of_job(secret: bytes, *, is_server: bool) -> TlsContext:
    """Return the SSLContext of one side, with the certificate that stands for the job's secret."""
    context, made = _new_context(is_server=is_server), job_certificate(secret)
    context.of_job = True
    context.load_verify_locations(cadata=made.certificate)
    _load_key(context, made.key + made.certificate)
    context.digest = _digest(ssl.PEM_cert_to_DER_cert(made.certificate))
    return context


def _load_key(context: ssl.SSLContext, pem: str) -> None:
    """Load a key, and its certificate, from a file in memory where the system has such: the ssl module reads files."""
    if sys.platform == "linux":
        with open(os.memfd_create("meshdist-key", os.MFD_CLOEXEC), "w") as file:
            file.write(pem)
            file.flush()
            with suppress(FileNotFoundError):  # without /proc, that file has no name
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
                return
    fd, path = tempfile.mkstemp()  # of mode 0600
    try:
        with open(fd, "w") as file:
            file.write(pem)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)


def _digest(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def context_of_files(files: TlsFiles, *, is_server: bool) -> TlsContext:
    """Return the SSLContext of one side; raise ValueError for a file that cannot be used."""
    context = _new_context(is_server=is_server)
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
    context.digest = _digest(_first_certificate(files.certificate))
    return context


def _first_certificate(path: str) -> bytes:
    with open(path, encoding="ascii", errors="replace") as file:
        text = file.read()
    begin, end = (text.index(f"-----{word} CERTIFICATE-----") for word in ("BEGIN", "END"))
    return ssl.PEM_cert_to_DER_cert(text[begin : end + len("-----END CERTIFICATE-----")])


def _refuse_to_ask() -> str:
    raise ValueError(
        f"{TLS_KEY_VARIABLE} is encrypted with a password; give a key without one, which only you can read"
    )


def looks_like_tls(sock: socket.socket) -> bool:
    """Return whether the first byte from a client is that of TLS; it stays unread."""
    return sock.recv(1, socket.MSG_PEEK) == _HANDSHAKE


def connect_tls(sock: socket.socket, context: TlsContext, purpose: str, peer: str, deadline: Deadline) -> TlsSocket:
    """Return the client's side of a connection, after its handshake; it replaces `sock`.

    Raises:
        HandshakeBroken: The connection ended, or the server or another sent an alert; a retry may succeed.
        HandshakeUnanswered: The server is silent.
        DistNetworkError: The server does not speak TLS, or has the certificate of another job.
    """
    sock.setblocking(False)
    wrapped = TlsSocket(sock, context, is_server=False)
    try:
        has_answered = False
        while not wrapped.handshake_is_done():
            _await_answer(wrapped, purpose, peer, deadline)
            if not has_answered:
                has_answered = True
                _check_answer(wrapped, purpose, peer)
    except TlsError as error:
        wrapped.close()
        if isinstance(error, OtherSecretError):
            raise OtherJobError(
                f"{peer} belongs to another job: choose another port, or start all processes of this job with the same"
                f" {SECRET_VARIABLE}"
            ) from error
        kind = HandshakeBroken if isinstance(error, AlertError) else DistNetworkError
        raise kind(f"no TLS with the {purpose} at {peer}: {error}") from error
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
        raise HandshakeUnanswered(
            f"{peer} is not a meshdist {purpose} with TLS: it accepted the connection but did not answer within"
            f" {deadline.timeout_s:.3g} s; choose another port"
        )


def _check_answer(sock: TlsSocket, purpose: str, peer: str) -> None:
    """Raise an error if the server answers without TLS."""
    answer = socket.socket.recv(sock, _PEEK_BYTES, socket.MSG_PEEK)
    if answer and answer[:1] not in (_HANDSHAKE, _ALERT):
        raise answer_without_tls(answer, purpose, peer)
