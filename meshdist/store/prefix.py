"""A view of a store: all keys with one prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from meshdist.store.interface import Store, Value, check_keys
from meshdist.system.deadline import Timeout


class PrefixStore(Store):
    """A view of another store: key `k` is the other's key `prefix/k`.

    The timeout is the other store's, and closing this one leaves the other open.

    Args:
        prefix: What comes before the slash.
        store: The other store, of any kind.

    Example:
        >>> from meshdist import PrefixStore
        >>> from meshdist.store import HashStore
        >>> store = HashStore()
        >>> part = PrefixStore("epoch1", store)
        >>> part.set("loss", "0.5")
        >>> store.get("epoch1/loss"), part.list_keys()
        (b'0.5', ['loss'])
    """

    def __init__(self, prefix: str, store: Store) -> None:
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, got {type(prefix).__name__}")
        if not isinstance(store, Store):
            raise TypeError(f"store must be a Store, got {type(store).__name__}")
        self._prefix = prefix
        self._store = store

    @property
    def prefix(self) -> str:
        """What comes before the slash."""
        return self._prefix

    @property
    def underlying_store(self) -> Store:
        """The store that this one is a part of."""
        return self._store

    def set(self, key: str, value: Value) -> None:
        """Store `value` under `prefix/key`."""
        self._store.set(self._full(key), value)

    def get(self, key: str) -> bytes:
        """Return the value of `prefix/key`, as soon as it exists."""
        return self._store.get(self._full(key))

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number in `prefix/key` and return the sum."""
        return self._store.add(self._full(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._all_full(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` exist; the error names them in full, `prefix/key`."""
        self._store.wait(self._all_full(keys), timeout)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store `desired_value` if `prefix/key` holds `expected_value`; return its value afterwards."""
        return self._store.compare_set(self._full(key), expected_value, desired_value)

    def append(self, key: str, value: Value) -> None:
        """Append `value` to the value of `prefix/key`."""
        self._store.append(self._full(key), value)

    def delete_key(self, key: str) -> bool:
        """Remove `prefix/key`; return True if it existed."""
        return self._store.delete_key(self._full(key))

    def num_keys(self) -> int:
        """Return the number of keys of the underlying store, including those outside this prefix."""
        return self._store.num_keys()

    def list_keys(self) -> list[str]:
        """Return the keys under the prefix, without the prefix."""
        start = self._full("")
        return [key[len(start) :] for key in self._store.list_keys() if key.startswith(start)]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._all_full(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        self._store.multi_set(self._all_full(keys), values)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of the underlying store."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        return self._store.timeout

    def has_extended_api(self) -> bool:
        """Return the underlying store's answer."""
        return self._store.has_extended_api()

    def _full(self, key: str) -> str:
        if not isinstance(key, str):
            raise TypeError(f"a store's key must be a str, got {type(key).__name__}")
        return f"{self._prefix}/{key}"

    def _all_full(self, keys: Sequence[str]) -> list[str]:
        return [self._full(key) for key in check_keys(keys)]

    def __repr__(self) -> str:
        return f"PrefixStore({self._prefix!r}, {self._store!r})"
