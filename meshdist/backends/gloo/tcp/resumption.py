"""Resumption: a connection that was reset is made again, and goes on where it was.

Both sides dial, each in a thread, as either may be the only one that has noticed, or that can reach the other. The
claim of the side that dials names the connection, counts its attempts, and says how many bytes it has received; the
answer says the same of the other side. Both numbers are final, as neither side has a socket to read from by then.

So that the two do not take different sockets, the side that made the connection at first prevails: it refuses the other
as long as a claim of its own is unanswered, while the other drops its attempt for that claim. A claim is refused unless
its attempt is later than all that came before; the answer says which attempts of the other side are void.

A peer whose process has ended has no listener: its host refuses, and the connection has ended. A host that says nothing
has `NOTICED_S` since something came from it.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from meshdist.backends.gloo.tcp.acceptor import Claim
from meshdist.backends.gloo.tcp.connection import Connection
from meshdist.backends.gloo.tcp.connector import ListenerRecord, first_interface
from meshdist.backends.gloo.tcp.dialling import Dialler
from meshdist.errors import DistError, DistNetworkError
from meshdist.runtime.departure import Departure, PeerExit
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, HandshakeBroken, HandshakeUnanswered
from meshdist.store import keepalive
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline
from meshdist.system.deferring_lock import Lock
from meshdist.system.platform import start_thread

# How long a new connection is tried for beyond the silence that a host may keep, and at least.
_GRACE_S = 1.0
# Packets are lost while the network is cut: try anew, before the kernel does.
_CONNECT_S = 1.0
_LONGEST_HANDSHAKE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25

# Whether the connection goes on; the last attempt of either side; how many bytes the answering side has received.
_ANSWER = struct.Struct("<BxxxIQ")
RESUMED, ENDED, NOT_KEPT = range(3)

TOO_OLD = "its connection was reset, and what it asks for again is no longer kept"


@dataclass(eq=False)
class Identity:
    """What both ends know a connection by."""

    name: bytes
    is_ours: bool  # this side made it at first
    num_attempts: int = 0  # the last attempt that this side made, or either side that has succeeded
    num_taken: int = 0  # the last that has succeeded


class Owner(Protocol):
    """The transport, as resumptions use it."""

    lock: Lock
    own_rank: int
    own_host: str

    def listener(self, rank: int) -> ListenerRecord | None: ...

    def dialler(self) -> Dialler: ...

    def take_socket(self, connection: Connection, sock: socket.socket, num_received: int) -> None: ...

    def ring(self) -> None: ...


class Resumption:
    """Makes one connection again, which is broken; the thread ends when it has a socket or has ended.

    All methods but `join` need the lock.
    """

    def __init__(
        self,
        owner: Owner,
        rank: int,
        connection: Connection,
        identity: Identity,
        how: Departure,
        on_done: Callable[[], None],
    ) -> None:
        self.has_claimed = False  # an attempt of this side is being answered
        self._owner = owner
        self._rank = rank
        self._connection = connection
        self._identity = identity
        self._how = how
        self._on_done = on_done
        self._is_over = threading.Event()
        self._since_s = time.monotonic()
        patience_s = keepalive.KEEP_ALIVE.silence_s + _GRACE_S - connection.silent_s(how)
        self._due_s = self._since_s + max(patience_s, _GRACE_S)
        self._dialler = owner.dialler()
        self._thread = threading.Thread(target=self._run, name=f"meshdist-resumption-{rank}", daemon=True)

    def start(self) -> None:
        """Begin; raise DistError if there is no thread to be had."""
        start_thread(self._thread)

    def describe(self) -> str:
        how = "was silent" if self._how.exit is PeerExit.SILENT else "was reset"
        return f"the connection {how} {time.monotonic() - self._since_s:.1f} s ago; connecting again"

    def stop(self) -> None:
        """Have the thread end: the connection goes on, or has ended."""
        self._is_over.set()
        self._dialler.close()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the thread, without the lock."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            departure = self._dial()
        except DistError as error:
            departure = Departure(PeerExit.LOST, detail=str(error))
        if departure is not None:
            with self._owner.lock:
                if not self._is_over.is_set():
                    self._connection.end(departure)
            self._owner.ring()

    def _dial(self) -> Departure | None:
        """Return how the peer has ended; None once the connection goes on, or this is over for another reason."""
        listener = self._owner.listener(self._rank)
        if listener is None:
            self._is_over.wait(max(self._due_s - time.monotonic(), 0))
            return self._how
        ends, refusals = listener.endpoints, set[int]()
        turn = first_interface(self._owner.own_rank, self._rank) + (self._how.exit is PeerExit.SILENT)
        pause_s, handshake_s, last = _FIRST_PAUSE_S, HANDSHAKE_TIMEOUT_S, ""
        while not self._is_over.is_set():
            left_s = self._due_s - time.monotonic()
            if left_s <= 0:
                return self._given_up(", ".join(endpoint(*each) for each in ends), last)
            turn = turn % len(ends)
            host, port = ends[turn]
            try:
                self._dialler.dial(
                    host,
                    port,
                    lambda: self._claim(listener.token),
                    handshake_s,
                    min(left_s, _CONNECT_S),
                    self._take_answer,
                )
                return None
            except HandshakeUnanswered as error:  # its kernel answers: its process is busy, or stopped
                last, handshake_s = str(error), min(2 * handshake_s, _LONGEST_HANDSHAKE_S)
                self._due_s = max(self._due_s, time.monotonic() + _GRACE_S + _CONNECT_S)
            except _Refused as refused:
                return refused.departure
            except (OSError, HandshakeBroken) as error:
                last = str(error)
                if isinstance(error, ConnectionRefusedError):
                    refusals.add(turn)
                    if len(refusals) == len(ends):
                        return Departure(PeerExit.RESET)
            finally:
                with self._owner.lock:
                    self.has_claimed = False
            self._is_over.wait(pause_s)
            turn, pause_s = turn + 1, min(2 * pause_s, _LONGEST_PAUSE_S)
        return None

    def _claim(self, token: bytes) -> bytes:
        with self._owner.lock:
            if self._is_over.is_set():
                raise HandshakeBroken("no longer needed")
            identity = self._identity
            identity.num_attempts += 1
            self.has_claimed = True
            return Claim(
                token, self._owner.own_rank, identity.num_attempts, self._connection.num_received, identity.name
            ).pack()

    def _take_answer(self, sock: socket.socket, deadline: Deadline) -> None:
        answer = b""
        while len(answer) < _ANSWER.size:
            try:
                sock.settimeout(max(deadline.remaining_s(), 1e-3))
                data = sock.recv(_ANSWER.size - len(answer))
            except TimeoutError as error:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)) from error
            if not data:
                raise HandshakeBroken("it is not ready to go on")
            answer += data
        status, attempt, num_received = _ANSWER.unpack(answer)
        with self._owner.lock:
            if self._is_over.is_set():
                raise HandshakeBroken("no longer needed")
            if status == ENDED:
                raise _Refused(Departure(PeerExit.RESET))
            if status != RESUMED or not self._connection.can_resume_at(num_received):
                raise _Refused(Departure(PeerExit.LOST, detail=TOO_OLD))
            self._is_over.set()
            sock.setblocking(False)
            self._identity.num_attempts = self._identity.num_taken = max(attempt, self._identity.num_attempts)
            self._on_done()
            self._owner.take_socket(self._connection, sock, num_received)
        self._owner.ring()

    def _given_up(self, ends: str, last: str) -> Departure:
        if self._how.exit is PeerExit.SILENT:
            return self._how
        after_s = time.monotonic() - self._since_s
        return Departure(
            PeerExit.LOST,
            detail=f"its connection with {self._owner.own_host} was reset {after_s:.1f} s ago, and no new one could be"
            f" made to {ends} since then: {last}",
        )


class _Refused(DistNetworkError):
    """Report that the peer does not go on with the connection."""

    def __init__(self, departure: Departure) -> None:
        super().__init__(departure.detail)
        self.departure = departure


class Resumptions:
    """The connections with one peer that can be made again. All methods but `join` need the lock."""

    def __init__(self, owner: Owner, rank: int) -> None:
        self._owner = owner
        self._rank = rank
        self._identities: dict[Connection, Identity] = {}
        self._under_way: dict[Connection, Resumption] = {}
        self._started: list[Resumption] = []

    def add(self, connection: Connection, identity: Identity) -> None:
        self._identities[connection] = identity

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._stop(connection)
        self._identities.pop(connection, None)

    def begin(self, connection: Connection, how: Departure) -> None:
        """Have a connection made again that has broken."""
        identity, on_done = self._identities[connection], partial(self._forget, connection)
        resumption = Resumption(self._owner, self._rank, connection, identity, how, on_done)
        self._under_way[connection] = resumption
        self._started = [each for each in self._started if each.is_running()]
        self._started.append(resumption)
        try:
            resumption.start()
        except DistError as error:
            connection.end(Departure(PeerExit.LOST, detail=str(error)))

    def describe(self) -> str:
        return "; ".join(resumption.describe() for resumption in list(self._under_way.values()))

    def take(self, claim: Claim, sock: socket.socket) -> bool:
        """Answer the peer's claim, which came over `sock`, and go on over that; return False if it is refused."""
        connection, identity = self._find(claim.name)
        if connection is None or identity is None:
            self._answer(sock, ENDED, 0, 0)
            return False
        resumption = self._under_way.get(connection)
        prevails = identity.is_ours and resumption is not None and resumption.has_claimed
        if claim.attempt <= identity.num_taken or prevails:
            return False
        connection.give_up_socket()
        if connection.ended is not None:
            self._answer(sock, ENDED, 0, 0)
            return False
        if not connection.can_resume_at(claim.num_received):
            self._answer(sock, NOT_KEPT, 0, 0)
            connection.end(Departure(PeerExit.LOST, detail=TOO_OLD))
            return False
        identity.num_attempts = identity.num_taken = max(claim.attempt, identity.num_attempts)
        if not self._answer(sock, RESUMED, identity.num_taken, connection.num_received):
            if connection not in self._under_way:
                self.begin(connection, Departure(PeerExit.RESET))
            return False
        self._stop(connection)
        self._owner.take_socket(connection, sock, claim.num_received)
        return True

    def stop(self) -> list[Resumption]:
        """Have all threads end; return those to join."""
        for connection in list(self._under_way):
            self._stop(connection)
        return self._started

    def _stop(self, connection: Connection) -> None:
        resumption = self._under_way.pop(connection, None)
        if resumption is not None:
            resumption.stop()

    def _forget(self, connection: Connection) -> None:
        self._under_way.pop(connection, None)

    def _find(self, name: bytes) -> tuple[Connection | None, Identity | None]:
        for connection, identity in self._identities.items():
            if identity.name == name:
                return connection, identity
        return None, None

    def _answer(self, sock: socket.socket, status: int, attempt: int, num_received: int) -> bool:
        try:
            sock.send(_ANSWER.pack(status, attempt, num_received))  # for which a new socket has room
        except OSError:  # it has broken as well
            return False
        return True
