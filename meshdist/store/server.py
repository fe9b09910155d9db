"""The server of a TCPStore: one thread, any number of clients, no blocking calls."""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from meshdist.errors import DistError
from meshdist.security.credentials import TlsError
from meshdist.security.handshake import HANDSHAKE_TIMEOUT_S, busy_notice
from meshdist.store.address import endpoint
from meshdist.store.keepalive import limit_unacknowledged, tune
from meshdist.store.repeated_requests import Slot, Slots, is_reset, resumption_s
from meshdist.store.session import Request, Session
from meshdist.store.table import BLOCKING, Op, Status, Table
from meshdist.store.waiters import Waiter, Waiters
from meshdist.system.platform import CLOSE_ON_EXEC

if TYPE_CHECKING:
    from meshdist.security.encryption import Encryption

_ACCEPTS_AT_ONCE = 64
_MOST_STRANGERS = 512
_STRANGERS_AT_ONCE = 16
_LONGEST_SELECT_S = 3600.0
_CLOSE_TIMEOUT_S = 5.0
_MOST_REFUSALS = 16

_log = logging.getLogger("meshdist")


class StoreServer:
    """Serves one table, from one thread, to every client that proves to know the job's secret.

    Clients that have not proven themselves are limited in number and get HANDSHAKE_TIMEOUT_S. A request that has to
    wait is parked with its deadline; other connections of its client are served.

    The server closes its listeners: `more_listeners` are further ones, such as for the other IP version. With
    `outlives_owner`, it serves after `close` until the last client has left. Connections that `encryption` covers
    must use TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        outlives_owner: bool = False,
        more_listeners: Sequence[socket.socket] = (),
        encryption: Encryption | None = None,
    ) -> None:
        self._encryption = encryption
        self._listeners = [listener, *more_listeners]
        self._secret = secret
        self._outlives_owner = outlives_owner
        with ExitStack() as resources:
            for each in self._listeners:
                resources.callback(_close_listener, each)
            self._selector = resources.enter_context(selectors.DefaultSelector())
            self._wake_read, self._wake_write = os.pipe()
            resources.callback(os.close, self._wake_read)
            resources.callback(os.close, self._wake_write)
            self._spare_fd: int | None = os.open(os.devnull, os.O_RDONLY | CLOSE_ON_EXEC)
            resources.callback(self._close_spare)
            self._resources = resources.pop_all()
        self._sessions: dict[Session, Slot | None] = {}  # a slot for those that have proven themselves
        self._strangers: dict[Session, None] = {}  # unproven clients, oldest first
        self._timed: dict[Session | Slot, float] = {}
        self._next_due_s = float("inf")
        self._slots = Slots()
        self._table, self._waiters = Table(), Waiters()
        self._lobby, self._lobby_waiters = Table(), Waiters()  # has key n once n clients have joined
        self._joined = 0
        self._world_size: int | None = None
        self._refusals: deque[str] = deque(maxlen=_MOST_REFUSALS)
        self._closing = False
        self._is_released = False
        self._wake_lock = threading.RLock()  # the garbage collector may close a store in the server's thread
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="meshdist-store", daemon=True)

    def start(self) -> None:
        """Start to serve; raise DistError if the system allows no more threads."""
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._take_wake_up)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._release()
            raise DistError(f"cannot start the thread of the store's server: {error}; see `ulimit -u`") from error

    def close(self) -> None:
        """Stop serving and wait for the thread; with `outlives_owner`, the thread ends with its last client."""
        if self._closing or self._pid != os.getpid():
            return  # a forked child has copies of the descriptors, but not the thread
        self._closing = True
        with self._wake_lock:
            if not self._is_released:
                os.write(self._wake_write, b"\0")
        if not self._outlives_owner and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def take_refusals(self) -> list[str]:
        """Return the processes of meshdist that the server refused since the last call, and why."""
        taken = []
        while self._refusals:
            taken.append(self._refusals.popleft())
        return taken

    def _run(self) -> None:
        try:
            while not self._is_over():
                timeout_s = min(self._next_due_s - time.monotonic(), _LONGEST_SELECT_S)
                self._serve_all(self._selector.select(max(timeout_s, 0.0)))
                if time.monotonic() >= self._next_due_s:
                    self._expire()
        finally:
            self._release()

    def _serve_all(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        strangers = []
        for key, events in ready:
            if not isinstance(key.data, Session):
                key.data()
            elif key.data in self._strangers:
                strangers.append((key.data, events))
            else:
                self._serve(key.data, events)
        # A message of an unproven client may cost a TLS signature: serve proven clients in between.
        for session, events in strangers[:_STRANGERS_AT_ONCE]:
            self._serve(session, events)

    def _is_over(self) -> bool:
        return self._closing and not (self._outlives_owner and (self._sessions or self._slots.has_waiting()))

    def _release(self) -> None:
        self._slots.revoke_wills()  # the store ends, not these clients
        for session in list(self._sessions):
            self._drop(session, "the store was closed")
        with self._wake_lock:
            self._is_released = True
            self._resources.close()

    def _take_wake_up(self) -> None:
        os.read(self._wake_read, 64)

    # Connections

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away(listener)
                return
            self._admit(sock, str(address[0]), address[1])

    def _admit(self, sock: socket.socket, host: str, port: int) -> None:
        try:
            sock.setblocking(False)
            tune(sock)
        except OSError:  # already gone
            sock.close()
            return
        tls = self._encryption.server if self._encryption is not None and self._encryption.covers(host) else None
        session = Session(sock, self._secret, endpoint(host, port), tls)
        self._sessions[session] = None
        self._strangers[session] = None
        self._set_due(session, HANDSHAKE_TIMEOUT_S)
        self._selector.register(sock, selectors.EVENT_READ, session)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many clients have yet to prove themselves")

    def _turn_away(self, listener: socket.socket) -> None:
        """Use the spare file descriptor to tell one client that there are no more."""
        self._close_spare()
        try:
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                sock.send(busy_notice())
                with suppress(BlockingIOError):  # unread data would turn the close into a reset
                    sock.recv(1024)
        except OSError:
            time.sleep(0.001)  # another thread took the descriptor: do not spin
        with suppress(OSError):  # without a spare, the next client gets no notice
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | CLOSE_ON_EXEC)

    def _close_spare(self) -> None:
        fd, self._spare_fd = self._spare_fd, None
        if fd is not None:
            os.close(fd)

    def _set_due(self, waiting: Session | Slot, timeout_s: float) -> None:
        due_s = time.monotonic() + timeout_s
        self._timed[waiting] = due_s
        self._next_due_s = min(self._next_due_s, due_s)

    def _expire(self) -> None:
        """Answer or drop every session whose time has come, and forget such slots; find the next due time."""
        now_s = time.monotonic()
        for waiting in [waiting for waiting, due_s in self._timed.items() if due_s <= now_s]:
            if self._timed.pop(waiting, None) is None:
                continue  # with another one of this round
            if isinstance(waiting, Slot):
                self._execute(self._slots.forget(waiting))
            elif waiting in self._strangers:
                self._drop(waiting, f"did not prove itself in {HANDSHAKE_TIMEOUT_S:g} s")
            else:
                self._give_up_waiting(waiting)
        self._next_due_s = min(self._timed.values(), default=float("inf"))

    def _lose(self, session: Session, error: Exception) -> None:
        """Drop a session after an error; if its connection was reset, its client may make it again."""
        slot = self._sessions.get(session)
        if isinstance(error, TlsError) and session.is_trusted:
            _log.warning("the store hung up on %s: %s", session.name, error)
        if is_reset(error) and slot is not None and slot.session is session and self._slots.can_resume(slot):
            slot.session = None
            self._set_due(slot, resumption_s())
        self._drop(session, str(error))

    def _drop(self, session: Session, reason: str) -> None:
        if session not in self._sessions:
            return
        slot = self._sessions.pop(session)
        was_stranger = session in self._strangers
        self._strangers.pop(session, None)
        self._timed.pop(session, None)
        self._waiters.drop(session)
        self._lobby_waiters.drop(session)
        self._selector.unregister(session.sock)
        session.close()
        if slot is not None and slot.session is session:
            self._execute(self._slots.forget(slot))
        if was_stranger:
            if session.is_of_meshdist and session.closing is not None:
                self._refusals.append(f"{session.name}, which {reason}")
                _log.warning("the store refused %s, which %s", session.name, reason)
            else:
                _log.info("the store dropped %s: %s", session.name, reason)

    # Requests

    def _serve(self, session: Session, events: int) -> None:
        """Read, carry out and answer the requests of `session`; an error drops that session only."""
        if session not in self._sessions:
            return  # dropped earlier in this round
        try:
            if events & selectors.EVENT_WRITE:
                session.flush()
            if events & selectors.EVENT_READ:
                session.receive()
            self._answer_all(session)
        except (OSError, ValueError) as error:
            self._lose(session, error)

    def _enter(self, session: Session) -> None:
        """Take a client that has proven itself, which may come again after a reset."""
        del self._strangers[session], self._timed[session]
        slot, before = self._slots.enter(session, session.claim)
        self._sessions[session] = slot
        if slot is not None:
            self._timed.pop(slot, None)
            if slot.last_will:
                limit_unacknowledged(session.sock)
        if before is not None:
            self._drop(before, "its client has made the connection again")

    def _answer_all(self, session: Session) -> None:
        if session in self._strangers and session.is_trusted:
            self._enter(session)
        if session.is_trusted and not self._is_waiting(session):
            for request in session.requests():
                self._answer(session, request)
                if self._is_waiting(session):
                    break
        if session.closing is not None and not session.has_unsent:
            self._drop(session, session.closing)
        else:
            self._watch(session)

    def _watch(self, session: Session) -> None:
        # Read no more requests while replies are unsent: they would add more replies.
        events = selectors.EVENT_WRITE if session.has_unsent else selectors.EVENT_READ
        if self._selector.get_key(session.sock).events != events:
            self._selector.modify(session.sock, events, session)

    def _is_waiting(self, session: Session) -> bool:
        return self._waiters.of(session) is not None or self._lobby_waiters.of(session) is not None

    def _answer(self, session: Session, request: Request) -> None:
        number, op, timeout_s, args = request
        slot = self._sessions[session]
        if slot is None:
            session.reply(Status.FORGOTTEN, [self._slots.server_id])
        elif (kept := slot.reply_to(number)) is not None:
            session.reply(*kept)
        elif op is Op.JOIN:
            self._join(session, slot, number, args, timeout_s)
        elif op is Op.SET_LAST_WILL:
            if len(args) % 2:  # reject it now, while the client can be told
                raise ValueError(f"not a request: a last will of {len(args)} keys and values")
            # Its replies are few bytes, which a client that is stopped also has room for.
            limit_unacknowledged(session.sock)
            slot.last_will = args
            self._reply(session, Status.OK)
        elif op in BLOCKING and (missing := self._table.missing(args)):
            self._waiters.park(Waiter(session, op, args, missing))
            self._set_due(session, timeout_s)
        else:
            self._apply(session, op, args)

    def _apply(self, session: Session, op: Op, args: list[bytes]) -> None:
        try:
            reply, changed = self._table.apply(op, args)
        except (ValueError, TypeError) as error:
            self._reply(session, Status.INVALID, [str(error).encode()])
            return
        try:
            self._reply(session, Status.OK, reply)
        finally:
            self._wake(changed)

    def _reply(self, session: Session, status: Status, reply: Sequence[bytes] = ()) -> None:
        """Answer a request that has been carried out, once and for all; raise OSError if the connection broke."""
        slot = self._sessions[session]
        assert slot is not None
        slot.keep(status, list(reply))
        session.reply(status, reply)

    def _execute(self, last_will: list[bytes]) -> None:
        """Set the last will of a client that is gone, except keys that exist."""
        pairs = zip(last_will[0::2], last_will[1::2], strict=True)
        missing = [part for pair in pairs if self._table.missing(pair[:1]) for part in pair]
        self._wake(self._table.apply(Op.SET, missing)[1])

    def _wake(self, changed: Sequence[bytes]) -> None:
        for waiter in self._waiters.wake(changed, self._table) if changed else ():
            self._answer_late(waiter, self._table.apply(waiter.op, waiter.keys)[0])

    def _join(self, session: Session, slot: Slot, number: int, args: list[bytes], timeout_s: float) -> None:
        """Count the client in; answer at once, or when as many have joined as it awaits."""
        world_size, awaited = (int(arg) if arg else None for arg in args)
        if world_size is not None and self._world_size not in (None, world_size):
            self._refusals.append(f"{session.name}: it passed world_size={world_size}, not {self._world_size}")
            text = f"this store is for world_size={self._world_size}, not {world_size}; all ranks must pass the same"
            self._reply(session, Status.INVALID, [text.encode()])
            _log.warning("the store refused %s: %s", session.name, text)
            return
        self._world_size = world_size or self._world_size
        if slot.num_begun < number:
            slot.num_begun = number
            self._joined += 1
            _, changed = self._lobby.apply(Op.SET, [b"%d" % self._joined, b""])
            for waiter in self._lobby_waiters.wake(changed, self._lobby):
                self._answer_late(waiter, [self._slots.server_id])
        if awaited is None or awaited <= self._joined:
            self._reply(session, Status.OK, [self._slots.server_id])
        else:
            goal = [b"%d" % awaited]
            self._lobby_waiters.park(Waiter(session, Op.WAIT, goal, goal))
            self._set_due(session, timeout_s)

    def _give_up_waiting(self, session: Session) -> None:
        waiter = self._waiters.drop(session)
        if waiter is not None:
            self._answer_late(waiter, sorted(waiter.missing), Status.MISSING)
            return
        waiter = self._lobby_waiters.drop(session)
        if waiter is not None:
            self._answer_late(waiter, [b"%d" % self._joined], Status.MISSING)

    def _answer_late(self, waiter: Waiter, reply: list[bytes], status: Status = Status.OK) -> None:
        """Answer a parked request; an error drops its client only."""
        session = waiter.session
        self._timed.pop(session, None)
        try:
            self._reply(session, status, reply)
            self._watch(session)
        except OSError as error:
            self._lose(session, error)


def _close_listener(listener: socket.socket) -> None:
    with suppress(OSError):  # shut down too: a forked child may hold a copy, which would keep the port taken
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
