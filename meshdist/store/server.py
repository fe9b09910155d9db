"""The server of a TCPStore: one thread, any number of clients, no call that blocks."""

from __future__ import annotations

import errno
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
from meshdist.handshake import HANDSHAKE_TIMEOUT_S, busy_notice
from meshdist.store.address import endpoint, tune
from meshdist.store.session import Request, Session
from meshdist.store.table import BLOCKING, Op, Table
from meshdist.store.waiters import Waiter, Waiters
from meshdist.store.wire import Status
from meshdist.systems import CLOSE_ON_EXEC

if TYPE_CHECKING:
    from ssl import SSLContext

_ACCEPTS_AT_ONCE = 64
_MOST_STRANGERS = 512
_LONGEST_SELECT_S = 3600.0
_CLOSE_TIMEOUT_S = 5.0
_MOST_REFUSALS = 16


class StoreServer:
    """Serves one table to every client that knows the job's secret, from one thread.

    Clients that have yet to prove themselves get HANDSHAKE_TIMEOUT_S, and there are never more than a fixed number of
    them. A request that has to wait is parked with its deadline; its client's other connections go on.

    Args:
        listener: The listening socket; the server closes it.
        secret: The job's secret.
        outlives_owner: After `close`, go on until the last client has left.
        more_listeners: Further sockets, such as one for the other IP version; the server closes them as well.
        tls: How clients have to speak TLS; None where they do not.

    Example:
        >>> from meshdist.store.address import listen
        >>> server = StoreServer(listen("127.0.0.1", 0, b""), b"")
        >>> server.start()
        >>> server.close()
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        outlives_owner: bool = False,
        more_listeners: Sequence[socket.socket] = (),
        tls: SSLContext | None = None,
    ) -> None:
        self._tls = tls
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
        self._sessions: dict[Session, None] = {}
        self._strangers: dict[Session, None] = {}  # a dict for its order: the oldest first
        self._timed: dict[Session, float] = {}
        self._next_due_s = float("inf")
        self._table, self._waiters = Table(), Waiters()
        self._lobby, self._lobby_waiters = Table(), Waiters()  # key n is there once n clients have joined
        self._joined = 0
        self._world_size: int | None = None
        self._refusals: deque[str] = deque(maxlen=_MOST_REFUSALS)
        self._closing = False
        self._is_released = False
        self._wake_lock = threading.RLock()  # the garbage collector may close a store within the server's thread
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="meshdist-store", daemon=True)

    def start(self) -> None:
        """Begin to serve.

        Raises:
            DistError: The system allows no more threads.
        """
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._take_wake_up)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._release()
            raise DistError(f"the store's server got no thread: {error}; see `ulimit -u`") from error

    def close(self) -> None:
        """Stop serving and wait for the thread's end; with `outlives_owner`, let it end with its last client."""
        if self._closing or self._pid != os.getpid():
            return  # a forked child has the files, but neither the thread nor a say in the matter
        self._closing = True
        with self._wake_lock:
            if not self._is_released:
                os.write(self._wake_write, b"\0")
        if not self._outlives_owner and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def take_refusals(self) -> list[str]:
        """Return whom the server turned away since the last call, and why: those that speak its language only."""
        taken = []
        while self._refusals:
            taken.append(self._refusals.popleft())
        return taken

    def _run(self) -> None:
        try:
            while not self._is_over():
                timeout_s = min(self._next_due_s - time.monotonic(), _LONGEST_SELECT_S)
                for key, events in self._selector.select(max(timeout_s, 0.0)):
                    if isinstance(key.data, Session):
                        self._serve(key.data, events)
                    else:
                        key.data()
                if time.monotonic() >= self._next_due_s:
                    self._expire()
        finally:
            self._release()

    def _is_over(self) -> bool:
        return self._closing and not (self._outlives_owner and self._sessions)

    def _release(self) -> None:
        for session in list(self._sessions):
            session.last_will = []  # they are cut off from a store that ends, not gone
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
            self._admit(sock, endpoint(str(address[0]), address[1]))

    def _admit(self, sock: socket.socket, name: str) -> None:
        try:
            sock.setblocking(False)
            tune(sock)
        except OSError:  # already gone
            sock.close()
            return
        session = Session(sock, self._secret, name, self._tls)
        self._sessions[session] = None
        self._strangers[session] = None
        self._set_due(session, HANDSHAKE_TIMEOUT_S)
        self._selector.register(sock, selectors.EVENT_READ, session)
        if len(self._strangers) > _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)), "too many clients have yet to prove themselves")

    def _turn_away(self, listener: socket.socket) -> None:
        """Give up the spare file descriptor to tell one client that there are no more."""
        self._close_spare()
        try:
            sock, _ = listener.accept()
            with sock:
                sock.setblocking(False)
                sock.send(busy_notice())
                with suppress(BlockingIOError):  # what is left unread would turn the close into a reset
                    sock.recv(1024)
        except OSError:
            time.sleep(0.001)  # another thread took the descriptor: give it time rather than spin
        with suppress(OSError):  # if there is none for a spare either, the next client gets no notice
            self._spare_fd = os.open(os.devnull, os.O_RDONLY | CLOSE_ON_EXEC)

    def _close_spare(self) -> None:
        fd, self._spare_fd = self._spare_fd, None
        if fd is not None:
            os.close(fd)

    def _set_due(self, session: Session, timeout_s: float) -> None:
        due_s = time.monotonic() + timeout_s
        self._timed[session] = due_s
        self._next_due_s = min(self._next_due_s, due_s)

    def _expire(self) -> None:
        """Answer or drop everyone whose time has come; look for the next."""
        now_s = time.monotonic()
        for session in [session for session, due_s in self._timed.items() if due_s <= now_s]:
            del self._timed[session]
            if session in self._strangers:
                self._drop(session, f"did not prove itself in {HANDSHAKE_TIMEOUT_S:g} s")
            else:
                self._give_up_waiting(session)
        self._next_due_s = min(self._timed.values(), default=float("inf"))

    def _drop(self, session: Session, reason: str) -> None:
        if session not in self._sessions:
            return
        del self._sessions[session]
        was_stranger = session in self._strangers
        self._strangers.pop(session, None)
        self._timed.pop(session, None)
        self._waiters.drop(session)
        self._lobby_waiters.drop(session)
        self._selector.unregister(session.sock)
        session.close()
        self._execute(session.last_will)
        if was_stranger:
            from meshdist.debug.log import RankLog  # only where there is something to log

            if session.is_of_meshdist and session.closing is not None:
                self._refusals.append(f"{session.name}, which {reason}")
                RankLog().warning("the store refused %s, which %s", session.name, reason)
            else:
                RankLog().info("the store dropped %s: %s", session.name, reason)

    # Requests

    def _serve(self, session: Session, events: int) -> None:
        """Read, carry out and answer what `session` has; whatever is wrong with it costs only itself."""
        if session not in self._sessions:
            return  # dropped earlier in this round
        try:
            if events & selectors.EVENT_WRITE:
                session.flush()
            if events & selectors.EVENT_READ:
                session.receive()
            self._answer_all(session)
        except (OSError, ValueError) as error:
            self._drop(session, str(error))

    def _answer_all(self, session: Session) -> None:
        if session in self._strangers and session.is_trusted:
            del self._strangers[session], self._timed[session]
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
        # While replies wait to be taken, more requests are not read: they would only make more replies.
        events = selectors.EVENT_WRITE if session.has_unsent else selectors.EVENT_READ
        if self._selector.get_key(session.sock).events != events:
            self._selector.modify(session.sock, events, session)

    def _is_waiting(self, session: Session) -> bool:
        return self._waiters.of(session) is not None or self._lobby_waiters.of(session) is not None

    def _answer(self, session: Session, request: Request) -> None:
        op, timeout_s, args = request
        if op is Op.JOIN:
            self._join(session, args, timeout_s)
        elif op is Op.BEQUEATH:
            if len(args) % 2:  # now, and not when nobody is left to be told
                raise ValueError(f"not a request: a last will of {len(args)} keys and values")
            session.last_will = args
            session.reply(Status.OK)
        elif op in BLOCKING and (missing := self._table.missing(args)):
            self._waiters.park(Waiter(session, op, args, missing))
            self._set_due(session, timeout_s)
        else:
            self._apply(session, op, args)

    def _apply(self, session: Session, op: Op, args: list[bytes]) -> None:
        try:
            reply, changed = self._table.apply(op, args)
        except (ValueError, TypeError) as error:
            session.reply(Status.INVALID, [str(error).encode()])
            return
        session.reply(Status.OK, reply)
        self._wake(changed)

    def _execute(self, last_will: list[bytes]) -> None:
        """Set what a client that is gone wanted set then, where nobody has set it."""
        pairs = zip(last_will[0::2], last_will[1::2], strict=True)
        missing = [part for pair in pairs if self._table.missing(pair[:1]) for part in pair]
        self._wake(self._table.apply(Op.SET, missing)[1])

    def _wake(self, changed: Sequence[bytes]) -> None:
        for waiter in self._waiters.wake(changed, self._table) if changed else ():
            self._answer_late(waiter, self._table.apply(waiter.op, waiter.keys)[0])

    def _join(self, session: Session, args: list[bytes], timeout_s: float) -> None:
        """Count the client in; answer once as many have joined as it says to await, none if that is not given."""
        world_size, awaited = (int(arg) if arg else None for arg in args)
        if world_size is not None and self._world_size not in (None, world_size):
            self._refusals.append(f"{session.name}: it says world_size={world_size}, not {self._world_size}")
            text = f"this store is for world_size={self._world_size}, not {world_size}; all ranks must say the same"
            session.reply(Status.INVALID, [text.encode()])
            import logging  # only where there is something to log

            logging.getLogger("meshdist").warning("the store refused %s: %s", session.name, text)
            return
        self._world_size = world_size or self._world_size
        self._joined += 1
        _, changed = self._lobby.apply(Op.SET, [b"%d" % self._joined, b""])
        for waiter in self._lobby_waiters.wake(changed, self._lobby):
            self._answer_late(waiter, [])
        if awaited is None or awaited <= self._joined:
            session.reply(Status.OK)
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
        """Answer a request that waited; its client's failure is not the caller's."""
        session = waiter.session
        self._timed.pop(session, None)
        try:
            session.reply(status, reply)
            self._watch(session)
        except OSError as error:
            self._drop(session, str(error))


def _close_listener(listener: socket.socket) -> None:
    with suppress(OSError):  # shut down as well, as a forked child may hold a copy that would keep the port taken
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
