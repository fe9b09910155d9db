"""What every store can do."""

from __future__ import annotations

import time
from abc import ABCMeta, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from meshdist.errors import DistStoreError
from meshdist.system.deadline import Deadline, Timeout, seconds
from meshdist.system.name_hints import NamesExplained, missing_attribute
from meshdist.system.plurals import counted

Value = str | bytes | bytearray | memoryview

DEFAULT_STORE_TIMEOUT_S = 300.0
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05
_NAMED_KEYS = 10
_NO_VALUE = b"\0no value"

_S = TypeVar("_S", bound="Store")


class _Stores(NamesExplained, ABCMeta):
    """The type of stores: a class with abstract methods, whose missing names are explained."""


class Store(metaclass=_Stores):
    """Keys and values that the ranks of a job share.

    A subclass must define `set`, `get`, `add` and `check`; `wait`, `multi_get` and `multi_set` use these.
    `compare_set`, `append`, `delete_key`, `num_keys` and `list_keys` raise an error unless the subclass defines them.

    Example:
        >>> from meshdist.store import HashStore
        >>> with HashStore() as store:
        ...     store.set("color", "blue")
        ...     store.get("color")
        b'blue'
    """

    _timeout_s = DEFAULT_STORE_TIMEOUT_S

    @property
    def is_master(self) -> bool:
        """Whether this process hosts the store for the others, which lose it when it is closed here."""
        return False

    if not TYPE_CHECKING:  # for type checkers, a name that is not there is an error

        def __getattr__(self, name: str) -> object:
            raise missing_attribute(self, name)

    @abstractmethod
    def set(self, key: str, value: Value) -> None:
        """Store `value` (text is encoded as UTF-8) under `key`, replacing any earlier value."""

    @abstractmethod
    def get(self, key: str) -> bytes:
        """Return the value of `key`, as soon as it exists.

        Raises:
            DistStoreError: It did not exist within the store's timeout; the message names the key.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number that `key` holds as decimal text, 0 if it is missing, and return the sum.

        Raises:
            ValueError: The value is not a number.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all `keys` exist now; does not wait."""

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` exist.

        Args:
            keys: The keys.
            timeout: A timedelta or seconds; the store's timeout if None.

        Raises:
            DistStoreError: Some did not exist at the deadline; the message names them.
        """
        names = check_keys(keys)
        deadline = Deadline(timeout, self.timeout.total_seconds())
        pause_s = _FIRST_PAUSE_S
        while not self.check(names):
            if deadline.expired():
                missing = [key for key in names if not self.check([key])]
                raise missing_error(type(self).__name__, missing, deadline.timeout_s)
            time.sleep(deadline.slice_s(pause_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Store `desired_value` if `key` holds `expected_value`, or is missing and `expected_value` is empty.

        Returns:
            The value of `key` afterwards, or `expected_value` if the key is still missing.
        """
        raise self._lacks("compare_set")

    def append(self, key: str, value: Value) -> None:
        """Append `value` to the value of `key`, which need not exist."""
        raise self._lacks("append")

    def delete_key(self, key: str) -> bool:
        """Remove `key`; return True if it existed."""
        raise self._lacks("delete_key")

    def num_keys(self) -> int:
        """Return the number of keys."""
        raise self._lacks("num_keys")

    def list_keys(self) -> list[str]:
        """Return all keys, in no particular order."""
        raise self._lacks("list_keys")

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of `keys`, as soon as all exist.

        Raises:
            DistStoreError: Some keys did not exist within the store's timeout; the message names them.
        """
        names = check_keys(keys)
        self.wait(names)
        return [self.get(key) for key in names]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Store each of `values` under the key at the same position in `keys`.

        Raises:
            ValueError: The numbers of keys and values differ.
        """
        for key, value in zip(*check_pairs(keys, values), strict=True):
            self.set(key, value)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long calls wait by default: a timedelta or seconds."""
        self._timeout_s = seconds(timeout)

    @property
    def timeout(self) -> timedelta:
        """How long calls wait by default."""
        return timedelta(seconds=min(self._timeout_s, timedelta.max.total_seconds() - 1))

    def has_extended_api(self) -> bool:
        """Return True if append, multi_get and multi_set are atomic."""
        return False

    def close(self) -> None:
        """Release the resources of the store, such as connections; may be called more than once."""
        return

    def withdraw(self) -> None:
        """Close the store as if it had never been used, for a rank that was rejected; often the same as `close`."""
        self.close()

    def __enter__(self: _S) -> _S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} has no {method}(): define it or use a store of meshdist")


def value_now(store: Store, key: str) -> bytes | None:
    """Return the value of a key that may be deleted at any moment, None if it is not there; does not wait.

    `get` would wait for a key that was deleted after `check` has found it.
    """
    value = store.compare_set(key, _NO_VALUE, _NO_VALUE)
    return None if value == _NO_VALUE else value


def encode_key(key: str) -> bytes:
    """Return `key` as the bytes under which it is kept.

    Raises:
        TypeError: It is not text.
    """
    if not isinstance(key, str):
        raise TypeError(f"a store's key must be a str, got {type(key).__name__}")
    return key.encode()


def encode_value(value: Value) -> bytes:
    """Return `value`, text or bytes, as bytes.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise TypeError(f"a store's value must be str or bytes, got {type(value).__name__}")


def check_keys(keys: Sequence[str]) -> list[str]:
    """Return `keys` as a list.

    Raises:
        TypeError: It is one key, not a list of them.
    """
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"keys must be a list of str, got the {type(keys).__name__} {keys!r}; write [{keys!r}]")
    return list(keys)


def check_pairs(keys: Sequence[str], values: Sequence[Value]) -> tuple[list[str], list[Value]]:
    """Return `keys` and `values` as lists of one length.

    Raises:
        TypeError: `keys` is one key, not a list of them.
        ValueError: They differ in length.
    """
    names, contents = check_keys(keys), list(values)
    if len(names) != len(contents):
        raise ValueError(
            f"multi_set needs a value for each key, got {counted(len(names), 'key')} and"
            f" {counted(len(contents), 'value')}"
        )
    return names, contents


def missing_error(where: str, missing: Sequence[str], timeout_s: float) -> DistStoreError:
    """Return the error of a wait at whose end the keys `missing` were not there."""
    names = ", ".join(repr(key) for key in missing[:_NAMED_KEYS])
    if len(missing) > _NAMED_KEYS:
        names += f" and {len(missing) - _NAMED_KEYS} more"
    noun, was = ("key", "was") if len(missing) == 1 else ("keys", "were")
    return DistStoreError(
        f"{where}: {noun} {names} {was} not set within {timeout_s:g} s; "
        "the process that sets it has not reached that point; if it is merely slow, use a longer timeout (set_timeout)"
    )
