"""The requests that wait on the server for keys to be set."""

from __future__ import annotations

from collections.abc import Iterable

from meshdist.store.session import Session
from meshdist.store.table import Op, Table


class Waiter:
    """A request whose reply waits for keys.

    Attributes:
        session: Who asked.
        op: GET or WAIT.
        keys: All keys it asked for.
        missing: Those that were missing when it was last looked at.
    """

    __slots__ = ("keys", "missing", "op", "session")

    def __init__(self, session: Session, op: Op, keys: list[bytes], missing: list[bytes]) -> None:
        self.session = session
        self.op = op
        self.keys = keys
        self.missing = set(missing)


class Waiters:
    """The waiting requests, at most one a session, found by any key that they miss.

    Example:
        >>> import socket
        >>> mine, theirs = socket.socketpair()
        >>> waiters, table = Waiters(), Table()
        >>> waiters.park(Waiter(Session(mine, b"", "a client"), Op.GET, [b"key"], [b"key"]))
        >>> _, changed = table.apply(Op.SET, [b"key", b"value"])
        >>> [waiter.keys for waiter in waiters.wake(changed, table)]
        [[b'key']]
        >>> mine.close(), theirs.close()
        (None, None)
    """

    def __init__(self) -> None:
        self._by_session: dict[Session, Waiter] = {}
        self._by_key: dict[bytes, dict[Waiter, None]] = {}  # a dict for its order: first come, first served

    def park(self, waiter: Waiter) -> None:
        """Keep `waiter` until its keys are there, its deadline has passed, or its client has gone."""
        self._by_session[waiter.session] = waiter
        for key in waiter.missing:
            self._by_key.setdefault(key, {})[waiter] = None

    def wake(self, changed: Iterable[bytes], table: Table) -> list[Waiter]:
        """Return, and keep no longer, those whose keys are all there now that `changed` has changed."""
        ready = []
        for key in changed:
            for waiter in list(self._by_key.get(key, ())):
                if table.missing([key]):
                    break
                self._forget_key(waiter, key)
                waiter.missing.discard(key)
                if waiter.missing:
                    continue
                waiter.missing.update(table.missing(waiter.keys))  # some may have been deleted meanwhile
                if waiter.missing:
                    self.park(waiter)
                else:
                    del self._by_session[waiter.session]
                    ready.append(waiter)
        return ready

    def of(self, session: Session) -> Waiter | None:
        """Return the waiter of `session`."""
        return self._by_session.get(session)

    def drop(self, session: Session) -> Waiter | None:
        """Return the waiter of `session` and keep it no longer."""
        waiter = self._by_session.pop(session, None)
        if waiter is not None:
            for key in waiter.missing:
                self._forget_key(waiter, key)
        return waiter

    def _forget_key(self, waiter: Waiter, key: bytes) -> None:
        waiting = self._by_key[key]
        del waiting[waiter]
        if not waiting:
            del self._by_key[key]
