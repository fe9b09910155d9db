"""The client of a TCPStore: a pool of connections shared by threads, which are made again when they are reset."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from meshdist.errors import DistNetworkError, DistStoreError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeBroken, HandshakeUnanswered
from meshdist.store.brief_requests import bounded
from meshdist.store.connect import (
    ATTEMPT_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Resolver,
    connect_once,
    connect_patiently,
)
from meshdist.store.exchange import ask
from meshdist.store.interface import DEFAULT_STORE_TIMEOUT_S
from meshdist.store.keepalive import SilenceMonitor
from meshdist.store.repeated_requests import GRACE_S, SLOT_CLAIM, is_reset, resumption_s
from meshdist.store.table import MAX_REQUEST_BYTES, REQUEST, Op, Status, fields_size, pack_fields
from meshdist.system.deadline import Deadline
from meshdist.system.platform import start_thread

if TYPE_CHECKING:
    from meshdist.security.encryption import Encryption

_log = logging.getLogger("meshdist")
_AGAIN_ATTEMPT_S = 1.0  # packets are lost while the network is cut: try anew, before the kernel does
_GRACE_S = 0.5  # the client's deadline is that much later than the server's
_LOOK_S = 1.0
_JOIN_S = 5.0
_MOST_IDLE = 8
# The network has failed, not only the server. Detecting this takes seconds, so later calls fail at once for a while.
_CUT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_CUT_FOR_S = 5.0


class _ForgottenError(DistNetworkError):
    """Report a connection that was made again, and that the server does not know."""

    def __init__(self, name: str, server_id: bytes) -> None:
        super().__init__(f"lost the store at {name}: a connection was reset, and restored too late or to another store")
        self.server_id = server_id


class _Slot:
    """A connection to the server, which is made again under its name when it was reset; see `store.slots`."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.num_requests = 0
        self._name = b""
        self._num_attempts = 0

    def claim(self) -> bytes:
        """Return what the next attempt to connect says; before the first request each one begins anew."""
        if not self.num_requests:
            self._name, self._num_attempts = os.urandom(16), 0
        else:
            self._num_attempts += 1
        return SLOT_CLAIM.pack(self._name, self._num_attempts)

    def shut(self) -> None:
        """End the connection for all threads and forked processes that use it."""
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()


class StoreClient:
    """A pool of connections to one server, whose addresses `resolver` returns; `name` is its "host:port", for messages.

    Each request takes one, so that a waiting thread does not block others. Those that `encryption` covers use TLS. One
    that was reset is made again, and the server carries out its last request once.
    """

    def __init__(self, name: str, resolver: Resolver, secret: bytes, encryption: Encryption | None = None) -> None:
        self.name = name
        self._resolver = resolver
        self._secret = secret
        self._encryption = encryption
        self._idle: list[_Slot] = []
        self._busy: set[_Slot] = set()
        self._closing = threading.Event()
        self._cut: OSError | None = None
        self._cut_until_s = 0.0
        self._unreachable_since_s: float | None = None
        self._server_id = b""
        self._begin()

    def _begin(self) -> None:
        """Take this process as the client's; it may be a forked child."""
        self._pid = os.getpid()
        self._lock = threading.RLock()  # the garbage collector may close a store in any thread
        self._will_lock = threading.RLock()
        self._will_keeper: threading.Thread | None = None

    def connect(self, deadline: Deadline) -> None:
        """Make the first connection, as soon as there is a server.

        Raises:
            DistNetworkError: There was none until the deadline, or it is not a store of this job.
        """
        slot = _Slot()
        slot.sock = connect_patiently(self.name, self._resolver, self._secret, self._encryption, deadline, slot.claim)
        self._idle.append(slot)

    def request(self, op: Op, args: list[bytes], timeout_s: float) -> tuple[Status, list[bytes]]:
        """Send a request and return the reply.

        Raises:
            DistNetworkError: The connection to the server broke, and could not be made again.
            DistStoreError: The server did not answer in time.
        """
        if op is Op.SET_LAST_WILL:
            with self._will_lock:
                reply = self._request(op, args, timeout_s)
                self._keep_will()
                return reply
        began_s = time.monotonic()
        while True:
            try:
                reply = self._request(op, args, timeout_s)
            except _ForgottenError as error:
                # A connection that was reset long ago, while it was idle: the server forgets a slot `resumption_s`
                # after the reset, so it has not carried out a request that is younger.
                spent_s = time.monotonic() - began_s
                if error.server_id != self._server_id or spent_s > resumption_s() - _GRACE_S:
                    raise
                timeout_s = max(timeout_s - spent_s, 0.0)
                continue
            if op is Op.JOIN and reply[0] is Status.OK:
                self._server_id = reply[1][0]
            return reply

    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> tuple[Status, list[bytes]]:
        size = fields_size(args)
        if size > MAX_REQUEST_BYTES:
            raise ValueError(f"one call can carry at most {MAX_REQUEST_BYTES} bytes, got {size}")
        deadline = bounded(Deadline(timeout_s + _GRACE_S))
        slot = self._take()
        try:
            if slot.sock is None:
                self._connect_first(slot, deadline)
            slot.num_requests += 1
            header = REQUEST.pack(size, op, timeout_s, slot.num_requests)
            reply = self._ask(slot, header + pack_fields(args), deadline)
        except TimeoutError as error:
            self._discard(slot)
            if error.errno is not None:  # the connection has ended
                raise self._lost(error) from error
            raise DistStoreError(
                f"the store at {self.name} did not answer within {timeout_s:g} s; is the process that hosts it stopped?"
            ) from None
        except OSError as error:
            self._discard(slot)
            raise self._lost(error) from error
        except BaseException:  # such as Ctrl-C: the reply may still arrive, so the connection cannot be reused
            self._discard(slot)
            raise
        if reply[0] is Status.FORGOTTEN:
            self._discard(slot)
            raise _ForgottenError(self.name, reply[1][0])
        self._put_back(slot)
        return reply

    def _ask(self, slot: _Slot, message: bytes, deadline: Deadline) -> tuple[Status, list[bytes]]:
        while True:
            assert slot.sock is not None
            silence = SilenceMonitor(slot.sock)
            try:
                return ask(slot.sock, message, deadline, silence)
            except ConnectionError as error:
                if not is_reset(error) or self._closing.is_set():
                    raise
                _log.info("the connection to the store at %s was reset: %s; connecting again", self.name, error)
                # A host that could not be reached before either has had a part of its time.
                patience_s = max(resumption_s() - silence.silent_s, GRACE_S)
                self._connect_again(slot, deadline, error, patience_s)
            size, op, _, number = REQUEST.unpack_from(message)
            left_s = max(deadline.remaining_s() - _GRACE_S, 0.0)
            message = REQUEST.pack(size, op, left_s, number) + message[REQUEST.size :]

    def _connect_first(self, slot: _Slot, deadline: Deadline) -> None:
        """Connect a new slot; raise TimeoutError without errno at the deadline."""
        if self._cut is not None and time.monotonic() < self._cut_until_s:
            raise self._lost(self._cut)
        began_s = time.monotonic()
        patience, pause_s = Deadline(ATTEMPT_S), FIRST_PAUSE_S
        while True:
            try:
                self._dial(slot, deadline, ATTEMPT_S)
                self._unreachable_since_s = None
                return
            except HandshakeUnanswered as error:  # it is a store: this client had a connection before
                raise DistNetworkError(
                    f"lost the store at {self.name}: it does not answer on a new connection; is its process stopped, or"
                    " the network to its host cut?"
                ) from error
            except TimeoutError as error:
                since_s = self._unreachable_since_s = self._unreachable_since_s or began_s
                if error.errno is None and deadline.expired() and time.monotonic() - since_s < ATTEMPT_S:
                    raise
                raise self._lost(error) from error
            except (OSError, HandshakeBroken) as error:
                if patience.expired() or deadline.expired() or not _may_pass(error):
                    raise self._lost(error if isinstance(error, OSError) else OSError(str(error))) from error
            self._closing.wait(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _connect_again(self, slot: _Slot, deadline: Deadline, reset: ConnectionError, patience_s: float) -> None:
        """Connect a slot that was reset; raise TimeoutError without errno at the deadline."""
        slot.close()
        patience, pause_s, handshake_s = Deadline(patience_s), FIRST_PAUSE_S, HANDSHAKE_TIMEOUT_S
        failure: Exception = reset
        while not patience.expired() and not self._closing.is_set():
            if deadline.expired():
                raise TimeoutError
            try:
                self._dial(slot, deadline, min(patience.remaining_s(), _AGAIN_ATTEMPT_S), handshake_s)
                return
            except HandshakeUnanswered as error:  # its host answers: its process is busy, or stopped
                failure, handshake_s = error, 2 * handshake_s
                patience = Deadline(max(patience.remaining_s(), GRACE_S + _AGAIN_ATTEMPT_S))
            except (OSError, HandshakeBroken) as error:
                failure = error
                if isinstance(error, ConnectionRefusedError):
                    raise
            self._closing.wait(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        after = f"its connection was reset, and could not be restored within {patience_s:.1f} s: {failure}"
        raise TimeoutError(errno.ETIMEDOUT, after)

    def _dial(self, slot: _Slot, deadline: Deadline, attempt_s: float, handshake_s: float | None = None) -> None:
        addresses, claim = self._resolver(), slot.claim()
        sock = connect_once(
            self.name, addresses, self._secret, self._encryption, deadline, claim, attempt_s, handshake_s
        )
        with self._lock:
            slot.sock = sock
            is_closed = self._closing.is_set()
        if is_closed:  # just now, by another thread
            raise DistStoreError(f"the store at {self.name} was closed in this process")

    def _lost(self, error: OSError) -> DistNetworkError:
        if self._closing.is_set():
            return DistNetworkError(f"the store at {self.name} was closed in this process during a call")
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return DistNetworkError(f"no file descriptor left to connect to {self.name}: raise `ulimit -n`")
        if error.errno in _CUT or isinstance(error, TimeoutError):
            if error is not self._cut:
                self._cut, self._cut_until_s = error, time.monotonic() + _CUT_FOR_S
            return DistNetworkError(f"lost the store at {self.name}: {error}; is the network to its host cut?")
        return DistNetworkError(f"lost the store at {self.name}: its process ended or closed it: {error}")

    def _take(self) -> _Slot:
        """Return an idle connection, or one to be made."""
        self.follow_fork()
        with self._lock:
            if self._closing.is_set():
                raise DistStoreError(f"the store at {self.name} was closed in this process")
            slot = self._idle.pop() if self._idle else _Slot()
            self._busy.add(slot)
            return slot

    def _put_back(self, slot: _Slot) -> None:
        with self._lock:
            self._busy.discard(slot)
            if not self._closing.is_set() and len(self._idle) < _MOST_IDLE:
                self._idle.append(slot)
                return
        slot.close()

    def _discard(self, slot: _Slot) -> None:
        with self._lock:
            self._busy.discard(slot)
        slot.close()

    def _keep_will(self) -> None:
        """Have a thread make the connection with a last will again if it is reset while idle."""
        if self._will_keeper is None:
            keeper = threading.Thread(target=self._watch_will, name="meshdist-store-will", daemon=True)
            start_thread(keeper)
            self._will_keeper = keeper

    def _watch_will(self) -> None:
        while not self._closing.wait(_LOOK_S):
            with self._will_lock:
                slot = next(reversed(self._idle), None)
                if slot is None or slot.sock is None or not _is_readable(slot.sock):
                    continue
                try:
                    # Not for less: giving up closes the connection, which has the will carried out.
                    self._request(Op.CHECK, [], DEFAULT_STORE_TIMEOUT_S)
                except DistStoreError:  # no answer yet, or closed
                    continue
                except DistNetworkError as error:
                    if not self._closing.is_set():
                        _log.info("the connection that has the last will of this process has ended: %s", error)
                    return

    def follow_fork(self) -> None:
        """In a forked child, start without connections: the inherited ones belong to the parent."""
        if self._pid == os.getpid():
            return
        inherited = [*self._idle, *self._busy]
        self._idle, self._busy = [], set()
        self._begin()
        for slot in inherited:
            slot.close()

    def close(self) -> None:
        """Close all connections; calls that wait on one fail."""
        self.follow_fork()
        with self._lock:
            self._closing.set()
            idle, self._idle = self._idle, []
            for slot in self._busy:  # the thread that uses it wakes up and closes it
                slot.shut()
        for slot in idle:  # shut down, since a forked child may hold a copy
            slot.shut()
            slot.close()
        if self._will_keeper is not None and self._will_keeper is not threading.current_thread():
            self._will_keeper.join(_JOIN_S)


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt to connect may succeed: the last one was reset, or closed before the verdict."""
    return isinstance(error, HandshakeBroken) or is_reset(error)


def _is_readable(sock: socket.socket) -> bool:
    """Return whether an idle connection has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))
