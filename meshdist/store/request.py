"""Stores whose every call is one request to a table: their base, HashStore, and the stand-in of a dry run."""

from __future__ import annotations

import operator
import threading
from abc import abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar

from meshdist.errors import DistStoreError
from meshdist.store.interface import Store, Value, check_keys, check_pairs, encode_key, encode_value, missing_error
from meshdist.store.table import BLOCKING, MAX_VALUE_BYTES, Op, Status, Table
from meshdist.system.deadline import Deadline, Timeout, seconds


class RequestStore(Store):
    """A store with all calls implemented by one method, `_request`; each is one atomic step."""

    @abstractmethod
    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> list[bytes]:
        """Carry out `op` atomically and return its reply; a blocking one once none of its keys is missing."""

    def set(self, key: str, value: Value) -> None:
        self._request(Op.SET, [encode_key(key), _checked(value)], self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._request(Op.GET, [encode_key(key)], self._timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number in `key`, 0 where it is missing, and return the sum; ValueError on text."""
        try:
            number = operator.index(amount)
        except TypeError:
            raise TypeError(f"add to key {key!r}: amount must be an integer, got {amount!r}") from None
        return int(self._request(Op.ADD, [encode_key(key), b"%d" % number], self._timeout_s)[0])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        args = [encode_key(key), _checked(expected_value), _checked(desired_value)]
        return self._request(Op.COMPARE_SET, args, self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = [encode_key(key) for key in check_keys(keys)]
        self._request(Op.WAIT, names, seconds(timeout, self._timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        names = [encode_key(key) for key in check_keys(keys)]
        return self._request(Op.CHECK, names, self._timeout_s) == [b"1"]

    def append(self, key: str, value: Value) -> None:
        self._request(Op.APPEND, [encode_key(key), _checked(value)], self._timeout_s)

    def delete_key(self, key: str) -> bool:
        return self._request(Op.DELETE, [encode_key(key)], self._timeout_s) == [b"1"]

    def num_keys(self) -> int:
        return int(self._request(Op.NUM_KEYS, [], self._timeout_s)[0])

    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._request(Op.LIST_KEYS, [], self._timeout_s)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys` at one moment, as soon as all are there; DistStoreError at the timeout."""
        return self._request(Op.GET, [encode_key(key) for key in check_keys(keys)], self._timeout_s)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each of `values` under its one of `keys`, all at one moment."""
        pairs = zip(*check_pairs(keys, values), strict=True)
        args = [part for key, value in pairs for part in (encode_key(key), _checked(value))]
        self._request(Op.SET, args, self._timeout_s)

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are each one atomic step."""
        return True


def _checked(value: Value) -> bytes:
    encoded = encode_value(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise ValueError(f"a store's value must have at most {MAX_VALUE_BYTES} bytes, got {len(encoded)}")
    return encoded


_SLICE_S = 0.1  # signals that another thread received, such as Ctrl-C, are handled between two slices


class HashStore(RequestStore):
    """A store between the threads of one process, such as ranks that are threads.

    Example:
        >>> from meshdist import HashStore
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


class DryStore:
    """The store of a given name in a dry run; a TCPStore uses it as its client."""

    def __init__(self, name: str, table: Table) -> None:
        self.name = name
        self._table = table

    def connect(self, deadline: Deadline) -> None:
        """Do nothing."""

    def request(self, op: Op, args: list[bytes], timeout_s: float) -> tuple[Status, list[bytes]]:
        return Status.OK, [] if op in (Op.JOIN, Op.SET_LAST_WILL) else self.reply(op, args)

    def reply(self, op: Op, args: list[bytes]) -> list[bytes]:
        """Carry out `op` and return its reply; raise DistStoreError if it waits for keys that no rank will set."""
        if op in BLOCKING and (missing := self._table.missing(args)):
            keys = ", ".join(repr(key.decode()) for key in missing)
            raise DistStoreError(
                f"{self.name}: {keys} will not be set, since no other rank runs in a dry run; set them before they are"
                " asked for"
            )
        return self._table.apply(op, args)[0]

    def close(self) -> None:
        """Do nothing: the keys stay until the dry run ends."""


# The tables of this context's dry run by the store's name; None outside of one.
_tables: ContextVar[dict[str, Table] | None] = ContextVar("meshdist_dry_tables", default=None)


def use_tables(tables: dict[str, Table] | None) -> dict[str, Table] | None:
    """Make the stores created in this context use these tables, real ones if None; return the previous tables."""
    before = _tables.get()
    _tables.set(tables)
    return before


def dry_store(name: str) -> DryStore | None:
    """Return the stand-in for the store of this name in a dry run; None outside of one."""
    tables = _tables.get()
    return None if tables is None else DryStore(name, tables.setdefault(name, Table()))
