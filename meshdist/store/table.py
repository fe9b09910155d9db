"""The operations of a store on the table of keys and values that every store keeps somewhere.

A request is an operation and a list of byte strings, its reply a list of byte strings, wherever the table lives: in
this process, replayed from a file, or on a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Op(IntEnum):
    """An operation of a store; the numbers are part of the wire and file formats.

    Example:
        >>> Op.GET in BLOCKING
        True
    """

    SET = 1
    GET = 2
    WAIT = 3
    CHECK = 4
    ADD = 5
    COMPARE_SET = 6
    APPEND = 7
    DELETE = 8
    NUM_KEYS = 9
    LIST_KEYS = 10
    JOIN = 11
    LEAVE = 12
    BEQUEATH = 13


BLOCKING = frozenset({Op.GET, Op.WAIT})
"""Operations that need all their keys to be there first."""

MAX_VALUE_BYTES = 1 << 30

_MAX_DIGITS = 1000


class Table:
    """Keys and values, and what each operation does to them.

    Example:
        >>> table = Table()
        >>> table.apply(Op.ADD, [b"count", b"2"])
        ([b'2'], (b'count',))
        >>> table.apply(Op.GET, [b"count"])
        ([b'2'], ())
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of `keys` that are not there."""
        return [key for key in keys if key not in self._values]

    def apply(self, op: Op, args: Sequence[bytes]) -> tuple[list[bytes], tuple[bytes, ...]]:
        """Carry out `op`; a blocking one only when none of its keys is missing.

        Returns:
            The reply, and the keys that changed.

        Raises:
            ValueError: The operation does not fit the value, or the arguments the operation. Nothing has changed.
        """
        values = self._values
        if op is Op.SET:
            return self._set(args)
        if op is Op.GET:
            return [values[key] for key in args], ()
        if op is Op.WAIT:
            return [], ()
        if op is Op.CHECK:
            return [b"0" if self.missing(args) else b"1"], ()
        if op is Op.ADD:
            return self._add(*args)
        if op is Op.COMPARE_SET:
            return self._compare_set(*args)
        if op is Op.APPEND:
            return self._append(*args)
        if op is Op.DELETE:
            return self._delete(*args)
        if op is Op.NUM_KEYS:
            return [b"%d" % len(values)], ()
        if op is Op.LIST_KEYS:
            return list(values), ()
        raise ValueError(f"a table has no operation {op!r}")

    def _set(self, args: Sequence[bytes]) -> tuple[list[bytes], tuple[bytes, ...]]:
        changed = tuple(args[0::2])
        self._values.update(zip(changed, args[1::2], strict=True))
        return [], changed

    def _add(self, key: bytes, amount: bytes) -> tuple[list[bytes], tuple[bytes, ...]]:
        current = self._values.get(key, b"0")
        if not current.removeprefix(b"-").isdigit() or len(current) > _MAX_DIGITS:
            raise ValueError(f"add to key {key.decode()!r}: its value must be a decimal number, got {current[:40]!r}")
        total = b"%d" % (int(current) + int(amount))
        self._values[key] = total
        return [total], (key,)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> tuple[list[bytes], tuple[bytes, ...]]:
        current = self._values.get(key)
        if current != expected and not (current is None and expected == b""):
            return [expected if current is None else current], ()
        self._values[key] = desired
        return [desired], (key,)

    def _append(self, key: bytes, value: bytes) -> tuple[list[bytes], tuple[bytes, ...]]:
        current = self._values.get(key, b"")
        if len(current) + len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"append to key {key.decode()!r}: its value would exceed {MAX_VALUE_BYTES} bytes")
        self._values[key] = current + value
        return [], (key,)

    def _delete(self, key: bytes) -> tuple[list[bytes], tuple[bytes, ...]]:
        was_there = self._values.pop(key, None) is not None
        return [b"1" if was_there else b"0"], (key,) if was_there else ()
