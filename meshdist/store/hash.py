"""A store between the threads of one process."""

from __future__ import annotations

import threading

from meshdist.deadline import Deadline
from meshdist.store.base import missing_error
from meshdist.store.request import RequestStore
from meshdist.store.table import BLOCKING, Op, Table

_SLICE_S = 0.1  # a signal that another thread got, such as Ctrl-C, is looked at between two slices


class HashStore(RequestStore):
    """A store between the threads of one process, such as ranks that are threads.

    Example:
        >>> store = HashStore()
        >>> store.add("joined", 1), store.add("joined", 1)
        (1, 2)
        >>> store.get("joined")
        b'2'
    """

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition(threading.Lock())

    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> list[bytes]:
        with self._changed:
            if op in BLOCKING and self._table.missing(args):
                self._await(args, Deadline(timeout_s))
            reply, changed = self._table.apply(op, args)
            if changed:
                self._changed.notify_all()
            return reply

    def _await(self, keys: list[bytes], deadline: Deadline) -> None:
        while missing := self._table.missing(keys):
            if deadline.expired():
                raise missing_error("HashStore", [key.decode() for key in missing], deadline.timeout_s)
            self._changed.wait(deadline.slice_s(_SLICE_S))

    def __repr__(self) -> str:
        return f"HashStore({self.num_keys()} keys)"
