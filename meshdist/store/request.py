"""The stores of meshdist: every call is one request on a table that lives elsewhere."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Sequence

from meshdist.deadline import Timeout, seconds
from meshdist.store.base import Store, Value, check_keys, check_pairs, encode_key, encode_value
from meshdist.store.table import MAX_VALUE_BYTES, Op


class RequestStore(Store):
    """A store that defines one method, `_request`, and has all of a store's calls by it.

    Example:
        >>> from meshdist.store import HashStore
        >>> isinstance(HashStore(), RequestStore)
        True
    """

    @abstractmethod
    def _request(self, op: Op, args: list[bytes], timeout_s: float) -> list[bytes]:
        """Carry out `op` atomically and return its reply; a blocking one as soon as none of its keys is missing."""

    def set(self, key: str, value: Value) -> None:
        """Store `value` (text is encoded as UTF-8) under `key`, in place of what was there."""
        self._request(Op.SET, [encode_key(key), _checked(value)], self._timeout_s)

    def get(self, key: str) -> bytes:
        """Return the value of `key`, as soon as there is one; DistStoreError at the store's timeout."""
        return self._request(Op.GET, [encode_key(key)], self._timeout_s)[0]

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number in `key`, 0 where it is missing, and return the sum; ValueError on text."""
        try:
            number = operator.index(amount)
        except TypeError:
            raise TypeError(f"add to key {key!r}: amount must be an integer, got {amount!r}") from None
        return int(self._request(Op.ADD, [encode_key(key), b"%d" % number], self._timeout_s)[0])

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store `desired_value` if `key` holds `expected_value`; return what it holds (see Store.compare_set)."""
        args = [encode_key(key), _checked(expected_value), _checked(desired_value)]
        return self._request(Op.COMPARE_SET, args, self._timeout_s)[0]

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` are there; DistStoreError naming the missing ones at the deadline."""
        names = [encode_key(key) for key in check_keys(keys)]
        self._request(Op.WAIT, names, seconds(timeout, self._timeout_s))

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all `keys` are there now; does not wait."""
        names = [encode_key(key) for key in check_keys(keys)]
        return self._request(Op.CHECK, names, self._timeout_s) == [b"1"]

    def append(self, key: str, value: Value) -> None:
        """Add `value` to the end of the value of `key`, which need not be there."""
        self._request(Op.APPEND, [encode_key(key), _checked(value)], self._timeout_s)

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return True if it was there."""
        return self._request(Op.DELETE, [encode_key(key)], self._timeout_s) == [b"1"]

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return int(self._request(Op.NUM_KEYS, [], self._timeout_s)[0])

    def list_keys(self) -> list[str]:
        """Return all keys, in no particular order."""
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
