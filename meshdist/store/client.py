"""The client of a TCPStore: a pool of connections shared by threads."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeBroken, HandshakeUnanswered, connect_handshake
from meshdist.store.address import Address
from meshdist.store.keepalive import SilenceMonitor, tune
from meshdist.store.session import PURPOSE
from meshdist.store.table import MAX_REQUEST_BYTES, REPLY, REQUEST, Op, Status, fields_size, pack_fields, unpack_fields
from meshdist.system.deadline import Deadline, Reminder

if TYPE_CHECKING:
    from meshdist.security.encryption import Encryption

_log = logging.getLogger("meshdist")
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.2
_ATTEMPT_S = 5.0
_SHORTEST_ATTEMPT_S = 0.05
_GRACE_S = 0.5  # the client's deadline is that much later than the server's
_SLICE_S = 0.05  # signals that another thread received, such as Ctrl-C, are handled between two slices
_MOST_IDLE = 8
# The network has failed, not only the server. Detecting this takes seconds, so later calls fail at once for a while.
_CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_CUT_FOR_S = 5.0
_READ_BYTES = 1 << 16

Resolver = Callable[[], list[Address]]


class NotReachedError(DistNetworkError):
    """Report that no store answered within the timeout."""


class StoreClient:
    """A pool of connections to one server, whose addresses `resolver` returns; `name` is its "host:port", for messages.

    Each request takes one, so that a waiting thread does not block others. Those that `encryption` covers use TLS.
    """

    def __init__(self, name: str, resolver: Resolver, secret: bytes, encryption: Encryption | None = None) -> None:
        self.name = name
        self._resolver = resolver
        self._secret = secret
        self._encryption = encryption
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._busy: set[socket.socket] = set()
        self._is_closed = False
        self._cut: OSError | None = None
        self._cut_until_s = 0.0

    def connect(self, deadline: Deadline) -> None:
        """Make the first connection, as soon as there is a server.

        Raises:
            DistNetworkError: There was none until the deadline, or it is not a store of this job.
        """
        self._idle.append(_connect_patiently(self.name, self._resolver, self._secret, self._encryption, deadline))

    def request(self, op: Op, args: list[bytes], timeout_s: float) -> tuple[Status, list[bytes]]:
        """Send a request and return the reply.

        Raises:
            DistNetworkError: The connection to the server broke.
            DistStoreError: The server did not answer in time.
        """
        size = fields_size(args)
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"one call can carry at most {MAX_REQUEST_BYTES} bytes, got {size}")
        deadline = Deadline(timeout_s + _GRACE_S)
        sock = self._take(deadline)
        silence = SilenceMonitor(sock)
        try:
            _send(sock, REQUEST.pack(size, op, timeout_s) + pack_fields(args), deadline, silence)
            reply = _receive_reply(sock, deadline, silence)
        except TimeoutError as error:
            self._discard(sock)
            if error.errno is not None:  # the connection has ended
                raise self._lost(error) from error
            raise DistStoreError(
                f"the store at {self.name} did not answer within {timeout_s:g} s; is the process that hosts it stopped?"
            ) from None
        except OSError as error:
            self._discard(sock)
            raise self._lost(error) from error
        except BaseException:  # such as Ctrl-C: the reply may still arrive, so the connection cannot be reused
            self._discard(sock)
            raise
        self._put_back(sock)
        return reply

    def _lost(self, error: OSError) -> DistNetworkError:
        if self._is_closed:
            return DistNetworkError(f"the store at {self.name} was closed in this process during a call")
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return DistNetworkError(f"no file descriptor left to connect to {self.name}: raise `ulimit -n`")
        if error.errno in _CUT or isinstance(error, TimeoutError):
            if error is not self._cut:
                self._cut, self._cut_until_s = error, time.monotonic() + _CUT_FOR_S
            return DistNetworkError(f"lost the store at {self.name}: {error}; is the network to its host cut?")
        return DistNetworkError(f"lost the store at {self.name}: its process ended or closed it: {error}")

    def _take(self, deadline: Deadline) -> socket.socket:
        self.follow_fork()
        with self._lock:
            if self._is_closed:
                raise DistStoreError(f"the store at {self.name} was closed in this process")
            if self._idle:
                sock = self._idle.pop()
                self._busy.add(sock)
                return sock
        if self._cut is not None and time.monotonic() < self._cut_until_s:
            raise self._lost(self._cut)
        try:
            sock = _connect_once(self.name, self._resolver(), self._secret, self._encryption, deadline)
        except HandshakeUnanswered as error:  # it is a store: this client had a connection before
            raise DistNetworkError(
                f"the store at {self.name} does not answer on a new connection; is its process stopped, or the network"
                " to its host cut?"
            ) from error
        except (OSError, HandshakeBroken) as error:
            raise self._lost(error if isinstance(error, OSError) else OSError(str(error))) from error
        with self._lock:
            self._busy.add(sock)
            is_closed = self._is_closed
        if is_closed:  # just now, by another thread
            self._discard(sock)
            raise DistStoreError(f"the store at {self.name} was closed in this process")
        return sock

    def _put_back(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
            if not self._is_closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(sock)
                return
        sock.close()

    def _discard(self, sock: socket.socket) -> None:
        with self._lock:
            self._busy.discard(sock)
        sock.close()

    def follow_fork(self) -> None:
        """In a forked child, start without connections: the inherited ones belong to the parent."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._lock = threading.Lock()
        inherited = [*self._idle, *self._busy]
        self._idle, self._busy = [], set()
        for sock in inherited:
            sock.close()

    def close(self) -> None:
        """Close all connections; calls that wait on one fail."""
        self.follow_fork()
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for sock in self._busy:
                with suppress(OSError):  # the thread that uses it wakes up and closes it
                    sock.shutdown(socket.SHUT_RDWR)
        for sock in idle:
            with suppress(OSError):  # shut down, since a forked child may hold a copy
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def _send(sock: socket.socket, data: bytes, deadline: Deadline, silence: SilenceMonitor) -> None:
    rest = memoryview(data)
    while rest:
        try:
            sock.settimeout(max(deadline.slice_s(_SLICE_S), 1e-3))
            rest = rest[sock.send(rest) :]
        except TimeoutError as error:
            _check_slice(error, deadline, silence)


def _receive_reply(sock: socket.socket, deadline: Deadline, silence: SilenceMonitor) -> tuple[Status, list[bytes]]:
    received = bytearray()
    while len(received) < REPLY.size:
        received += _receive_some(sock, _READ_BYTES, deadline, silence)
    size, status = REPLY.unpack_from(received)
    end = REPLY.size + size
    while len(received) < end:
        received += _receive_some(sock, min(end - len(received), 1 << 20), deadline, silence)
    with memoryview(received) as whole:
        return Status(status), unpack_fields(whole[REPLY.size : end])


def _receive_some(sock: socket.socket, most: int, deadline: Deadline, silence: SilenceMonitor) -> bytes:
    while True:
        try:
            sock.settimeout(max(deadline.slice_s(_SLICE_S), 1e-3))
            data = sock.recv(most)
        except TimeoutError as error:
            _check_slice(error, deadline, silence)
        else:
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "connection closed")
            return data


def _check_slice(error: TimeoutError, deadline: Deadline, silence: SilenceMonitor) -> None:
    """Raise TimeoutError, with an errno if the connection has ended; else return, to wait for another slice."""
    if error.errno is not None or deadline.expired():
        raise error
    silence.check()


def _connect_patiently(
    name: str, resolver: Resolver, secret: bytes, encryption: Encryption | None, deadline: Deadline
) -> socket.socket:
    """Return a connection as soon as a store of this job listens; its process may start later than this one."""
    pause_s, reminder = _FIRST_PAUSE_S, Reminder()
    while True:
        failure: HandshakeBroken | OSError
        try:
            return _connect_once(name, resolver(), secret, encryption, deadline)
        except HandshakeBroken as error:
            failure = error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise DistNetworkError(f"no file descriptor left to connect to {name}: raise `ulimit -n`") from error
            failure = error
        # Make no attempt with hardly any time left: its error would be less clear than this one.
        is_last = deadline.remaining_s() < pause_s + _SHORTEST_ATTEMPT_S
        waited_s = reminder.due_s()
        if waited_s is not None:
            words = "no store answers at %s after %.0f s (%s); trying for %.0f s more"
            _log.warning(words, name, waited_s, failure, deadline.remaining_s())
        time.sleep(deadline.remaining_s() if is_last else pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if is_last and isinstance(failure, HandshakeBroken):
            raise NotReachedError(f"{failure} (for {round(deadline.timeout_s, 2):g} s)") from failure
        if is_last:
            raise NotReachedError(
                f"no store answered at {name} within {round(deadline.timeout_s, 2):g} s (last error: {failure}); "
                "does its host run, and are address and port right?"
            ) from failure


def _connect_once(
    name: str, addresses: list[Address], secret: bytes, encryption: Encryption | None, deadline: Deadline
) -> socket.socket:
    """Return a connection to the first of `addresses` that accepts one and proves to be a store of this job."""
    last_error: OSError | None = None
    for address in addresses:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline.slice_s(_ATTEMPT_S), 1e-3))
            sock.connect(address.sockaddr)
            if sock.getsockname() == sock.getpeername():
                # If no process listens, a TCP socket may connect to itself, on the same port.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            tune(sock)
            grace_s = max(HANDSHAKE_TIMEOUT_S, deadline.timeout_s / 10)  # for a busy server
            patience = Deadline(deadline.slice_s(grace_s))
            binding = b""
            if encryption is not None and encryption.covers(str(address.sockaddr[0])):
                from meshdist.security.tls import connect_tls

                sock = tls = connect_tls(sock, encryption.client, PURPOSE, name, patience)
                binding = tls.binding()
            connect_handshake(sock, secret, PURPOSE, name, patience, binding=binding)
            return sock
        except OSError as error:
            sock.close()
            last_error = error
        except BaseException:
            sock.close()
            raise
    raise last_error or OSError(f"{name} has no address")
