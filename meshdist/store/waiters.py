"""Requests parked on the server until keys are set."""

from __future__ import annotations

from collections.abc import Iterable

from meshdist.store.session import Session
from meshdist.store.table import Op, Table


class Waiter:
    """A parked request: its keys, and those missing when they were last checked."""

    __slots__ = ("keys", "missing", "op", "session")

    def __init__(self, session: Session, op: Op, keys: list[bytes], missing: list[bytes]) -> None:
        self.session = session
        self.op = op
        self.keys = keys
        self.missing = set(missing)


class Waiters:
    """The parked requests, at most one a session, indexed by the keys that they miss."""

    def __init__(self) -> None:
        self._by_session: dict[Session, Waiter] = {}
        self._by_key: dict[bytes, dict[Waiter, None]] = {}  # in order: first come, first served

    def park(self, waiter: Waiter) -> None:
        """Keep `waiter` until its keys exist, its deadline passes, or its client is gone."""
        self._by_session[waiter.session] = waiter
        for key in waiter.missing:
            self._by_key.setdefault(key, {})[waiter] = None

    def wake(self, changed: Iterable[bytes], table: Table) -> list[Waiter]:
        """Remove and return the requests whose keys all exist now that `changed` has changed."""
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
        return self._by_session.get(session)

    def drop(self, session: Session) -> Waiter | None:
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
