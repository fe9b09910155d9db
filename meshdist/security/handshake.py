"""Mutual authentication over a connected socket: both ends prove that they belong to the same job.

Both ends hold the job's secret and never send it. Four messages of fixed size, 244 bytes in all:

1. client, hello: job id, purpose, claim and a fresh nonce.
2. server, challenge: a code, its job id, its own fresh nonce, and its proof.
3. client: its proof.
4. server, verdict: a code.

A proof is the HMAC-SHA256, keyed by the secret, of the prover's role and all earlier fields: job id, purpose, claim and
both nonces; inside TLS, also the certificates of both ends. So a proof cannot be replayed (fresh nonces), reflected
(the role), reused for a different purpose or claim, or passed on by a third process with a certificate of its own. The
job id is derived from the secret; it only serves to distinguish, in messages, another job from a program other than
meshdist. HMAC authenticates the two ends; it does not encrypt what follows.
"""

from __future__ import annotations

import os
import socket
import struct

from meshdist.errors import DistNetworkError
from meshdist.security.credentials import SECRET_VARIABLE, SET_ALIKE, TlsError
from meshdist.system.deadline import Deadline

HANDSHAKE_TIMEOUT_S = 3.0
"""How long a server waits for a client's proof."""

CLAIM_BYTES = 32
"""Size of the claim: data about the client, such as its rank, authenticated along with the rest."""

MAGIC = b"MESHDIST"
"""First bytes of either side."""

PROTOCOL = 6
"""The version of all protocols between the processes of a job: raise it with any change.

6: a list of objects is one message; before, their sizes came first.
5: so is a connection with the store; its requests are numbered.
4: a connection between ranks that was reset is made again, by a claim that says so.
3: connections to other hosts use TLS, and ranks publish it where they listen.
2: ranks report how they ended by a record, `departure.Departure`; in 1 by a sentence.
"""

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_HEADER = struct.Struct("!8sBB2x")  # magic, version, code
_HELLO = struct.Struct(f"!16s16s{CLAIM_BYTES}s{_NONCE_BYTES}s")  # job id, purpose, claim, nonce
_CHALLENGE = struct.Struct(f"!16s{_NONCE_BYTES}s{_PROOF_BYTES}s")  # job id, nonce, proof

_OK, _OTHER_JOB, _OTHER_PURPOSE, _OTHER_VERSION, _BAD_PROOF, _BUSY, _TLS_ONLY, _NO_TLS = range(8)

_TLS_RECORD = b"\x16"


class HandshakeBroken(DistNetworkError):
    """Report a connection that ended before the verdict; a retry may succeed, since the server may be starting."""


class HandshakeUnanswered(DistNetworkError):
    """Report a server that took the connection and has not answered: a stranger, or a process that is busy."""


class OtherJobError(DistNetworkError):
    """Report a server with a different secret than this process."""


def job_id(secret: bytes) -> bytes:
    """Return the 16 bytes that identify the job of `secret` without revealing it."""
    return _hmac(secret, b"meshdist job id")[:16]


def busy_notice() -> bytes:
    """Return what a server without a free file descriptor sends instead of a challenge."""
    return _HEADER.pack(MAGIC, PROTOCOL, _BUSY) + bytes(_CHALLENGE.size)


def answer_without_tls(answer: bytes, purpose: str, peer: str) -> DistNetworkError:
    """Return the error for a server that answers a client's TLS with the bytes `answer`, not TLS."""
    if not answer.startswith(MAGIC):
        return DistNetworkError(f"{peer} is not a meshdist {purpose}: it answered {answer[:24]!r}; choose another port")
    if answer == busy_notice()[: len(answer)]:
        return _too_busy(purpose, peer)
    return DistNetworkError(f"the {purpose} at {peer} does not use TLS, but this process does: {SET_ALIKE}")


def _too_busy(purpose: str, peer: str) -> HandshakeBroken:
    return HandshakeBroken(f"the meshdist {purpose} at {peer} has no file descriptor left: raise `ulimit -n` there")


def _hmac(secret: bytes, message: bytes) -> bytes:
    import hmac  # 3 ms; only processes that connect need it

    return hmac.digest(secret, message, "sha256")


def _equal(ours: bytes, theirs: bytes) -> bool:
    import hmac

    return hmac.compare_digest(ours, theirs)


def _purpose_id(purpose: str) -> bytes:
    return _hmac(b"meshdist purpose", purpose.encode())[:16]


class _Transcript:
    """The fields of both ends; computes the proof of either role."""

    def __init__(self, secret: bytes, job: bytes, purpose: bytes, claim: bytes, nonces: bytes, binding: bytes) -> None:
        self._secret = secret
        self._said = b"".join((bytes([PROTOCOL]), job, purpose, claim, nonces, binding))

    def proof(self, role: bytes) -> bytes:
        return _hmac(self._secret, b"meshdist " + role + b"\0" + self._said)


class ServerHandshake:
    """The server's side, sans I/O: feed it what arrives, send what it returns.

    Read at most `wanted` bytes at a time, so that no more than one message of an untrusted client is buffered. With
    `wants_tls`, the client is refused because it connected without TLS. `binding` is what both ends know of the TLS
    connection that carries this; empty without TLS.
    """

    __slots__ = (
        *("_binding", "_has_said_hello", "_inbox", "_purpose", "_secret", "_transcript", "_wants_tls"),
        *("claim", "refusal", "trusted"),
    )

    def __init__(self, secret: bytes, purpose: str, wants_tls: bool = False, binding: bytes = b"") -> None:
        self._wants_tls = wants_tls
        self._binding = binding
        self._secret = secret
        self._purpose = _purpose_id(purpose)
        self._inbox = b""
        self._transcript: _Transcript | None = None
        self._has_said_hello = False
        self.trusted = False  # True once the client has proven itself; the caller reads the rest of the connection
        self.refusal: str | None = None  # why the client must be dropped (after sending the last reply), or None
        self.claim = bytes(CLAIM_BYTES)  # the client's claim; meaningful once trusted

    @property
    def is_of_meshdist(self) -> bool:
        """True once the client has sent a hello, or begun TLS as a process of meshdist with other settings does."""
        return self._has_said_hello

    @property
    def wanted(self) -> int:
        """How many bytes of the current message are missing."""
        size = _HEADER.size + _HELLO.size if self._transcript is None else _PROOF_BYTES
        return size - len(self._inbox)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wanted` bytes and return the reply to send, often empty."""
        self._inbox += data
        if self._transcript is None and self._inbox.startswith(_TLS_RECORD):
            self._has_said_hello = True
            self.refusal = f"speaks TLS, but this side does not: {SET_ALIKE}"
            return _HEADER.pack(MAGIC, PROTOCOL, _NO_TLS) + bytes(_CHALLENGE.size)
        if self._transcript is None and not MAGIC.startswith(self._inbox[: len(MAGIC)]):
            self.refusal = "not a meshdist client"
            return b""
        if self.wanted > 0:
            return b""
        message, self._inbox = self._inbox, b""
        return self._challenge(message) if self._transcript is None else self._verdict(self._transcript, message)

    def _challenge(self, hello: bytes) -> bytes:
        _, version, _ = _HEADER.unpack_from(hello)
        job, purpose, self.claim, nonce = _HELLO.unpack_from(hello, _HEADER.size)
        self._has_said_hello = True
        own_job, own_nonce = job_id(self._secret), os.urandom(_NONCE_BYTES)
        code = _OK
        if version != PROTOCOL:
            code, self.refusal = _OTHER_VERSION, f"speaks version {version} of meshdist's protocol, not {PROTOCOL}"
        elif self._wants_tls:
            code, self.refusal = _TLS_ONLY, f"came without TLS, which this side asks for: {SET_ALIKE}"
        elif job != own_job:
            code, self.refusal = (
                _OTHER_JOB,
                f"belongs to job {job.hex()[:8]}, not to {own_job.hex()[:8]}: it has another {SECRET_VARIABLE}",
            )
        elif purpose != self._purpose:
            code, self.refusal = _OTHER_PURPOSE, "connected for another purpose"
        header = _HEADER.pack(MAGIC, PROTOCOL, code)
        if code != _OK:
            return header + _CHALLENGE.pack(own_job, bytes(_NONCE_BYTES), bytes(_PROOF_BYTES))
        self._transcript = _Transcript(self._secret, job, purpose, self.claim, nonce + own_nonce, self._binding)
        return header + _CHALLENGE.pack(own_job, own_nonce, self._transcript.proof(b"server"))

    def _verdict(self, transcript: _Transcript, proof: bytes) -> bytes:
        self.trusted = _equal(transcript.proof(b"client"), proof)
        if not self.trusted:
            self.refusal = "does not know the job's secret"
        return _HEADER.pack(MAGIC, PROTOCOL, _OK if self.trusted else _BAD_PROOF)


def connect_handshake(
    sock: socket.socket,
    secret: bytes,
    purpose: str,
    peer: str,
    deadline: Deadline | None = None,
    claim: bytes = b"",
    binding: bytes = b"",
) -> None:
    """Prove this end to the server of `sock` and have it prove itself.

    Args:
        sock: A connected socket; its timeout is changed.
        secret: The job's secret, empty where there is none.
        purpose: What the connection is for, as a noun ("store"); both ends must say the same.
        peer: The server's "host:port", for messages.
        deadline: When to give up; HANDSHAKE_TIMEOUT_S from now if None.
        claim: At most CLAIM_BYTES that the server gets, proven.
        binding: What both ends know of the TLS connection that carries this; empty without TLS.

    Raises:
        HandshakeBroken: The connection ended before the verdict.
        HandshakeUnanswered: The server is silent.
        DistNetworkError: The server is a stranger, or of another job. Close the socket.
    """
    if len(claim) > CLAIM_BYTES:
        raise ValueError(f"claim must have at most {CLAIM_BYTES} bytes, got {len(claim)}")
    client = _Client(sock, purpose, peer, deadline or Deadline(HANDSHAKE_TIMEOUT_S))
    job, purpose_id, nonce = job_id(secret), _purpose_id(purpose), os.urandom(_NONCE_BYTES)
    claim = claim.ljust(CLAIM_BYTES, b"\0")
    client.send(_HEADER.pack(MAGIC, PROTOCOL, _OK) + _HELLO.pack(job, purpose_id, claim, nonce))
    server_job, server_nonce, server_proof = _CHALLENGE.unpack(client.receive(_CHALLENGE.size, job))
    transcript = _Transcript(secret, job, purpose_id, claim, nonce + server_nonce, binding)
    if server_job != job or not _equal(transcript.proof(b"server"), server_proof):
        raise DistNetworkError(f"{peer} claims to be this job's {purpose} but does not know its {SECRET_VARIABLE}")
    client.send(transcript.proof(b"client"))
    client.receive(0, job)


class _Client:
    """Sends and receives the client's messages, and words what can go wrong with them."""

    def __init__(self, sock: socket.socket, purpose: str, peer: str, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline
        self._purpose = purpose
        self._peer = peer
        self._stranger = f"{peer} is not a meshdist {purpose}"

    def send(self, message: bytes) -> None:
        try:
            self._sock.settimeout(max(self._deadline.remaining_s(), 1e-3))
            self._sock.sendall(message)
        except TlsError as error:
            raise self._no_tls(error) from error
        except OSError as error:
            raise self._broken(error) from error

    def receive(self, size: int, job: bytes) -> bytes:
        """Return the `size` bytes behind the next header, whose code is checked."""
        received = b""
        while len(received) < _HEADER.size + size:
            received += self._receive_some(_HEADER.size + size - len(received))
            if not MAGIC.startswith(received[: len(MAGIC)]):
                raise DistNetworkError(f"{self._stranger}: it answered {received[:24]!r}; choose another port")
        _, version, code = _HEADER.unpack_from(received)
        if code != _OK:
            raise self._refused(version, code, received[_HEADER.size :], job)
        return received[_HEADER.size :]

    def _receive_some(self, most: int) -> bytes:
        try:
            self._sock.settimeout(max(self._deadline.remaining_s(), 1e-3))
            data = self._sock.recv(most)
        except TimeoutError as error:
            if error.errno is not None:  # the kernel has ended the connection
                raise self._broken(error) from error
            raise HandshakeUnanswered(
                f"{self._stranger}: it accepted the connection but did not answer within"
                f" {self._deadline.timeout_s:.3g} s; choose another port"
            ) from None
        except TlsError as error:
            raise self._no_tls(error) from error
        except OSError as error:
            raise self._broken(error) from error
        if not data:
            raise HandshakeBroken(f"{self._stranger}, or is overloaded: it closed the connection during the handshake")
        return data

    def _broken(self, error: OSError) -> HandshakeBroken:
        return HandshakeBroken(f"{self._stranger}: the connection broke during the handshake: {error}")

    def _no_tls(self, error: TlsError) -> DistNetworkError:
        # Whether its own certificate is taken, a client learns after its part of TLS is done.
        return DistNetworkError(f"no TLS with the {self._purpose} at {self._peer}: {error}")

    def _refused(self, version: int, code: int, challenge: bytes, job: bytes) -> DistNetworkError:
        if code == _OTHER_JOB:
            return OtherJobError(
                f"{self._peer} belongs to another job (its id is {challenge[:4].hex()}, ours {job[:4].hex()}): choose "
                f"another port, or start all processes of this job with the same {SECRET_VARIABLE}"
            )
        if code == _OTHER_VERSION:
            return DistNetworkError(
                f"{self._peer} speaks version {version} of meshdist's protocol, this process {PROTOCOL}: install the"
                " same meshdist on all hosts"
            )
        if code == _BUSY:
            return _too_busy(self._purpose, self._peer)
        if code == _TLS_ONLY:
            return DistNetworkError(
                f"the {self._purpose} at {self._peer} requires TLS, but this process does not use it: {SET_ALIKE}"
            )
        reason = "serves another purpose" if code == _OTHER_PURPOSE else "refused this process's proof"
        return DistNetworkError(f"{self._stranger}: it {reason}")
