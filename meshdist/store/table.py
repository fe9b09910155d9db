"""The table of keys and values, the operations on it, and their wire format, in every kind of store.

A request is an operation and a list of byte strings, its reply a list of byte strings. The table is in this process,
replayed from a file, or on a server.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum


class Op(IntEnum):
    """An operation of a store; the numbers are part of the wire and file formats."""

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
    SET_LAST_WILL = 13


BLOCKING = frozenset({Op.GET, Op.WAIT})
"""Operations that wait until all their keys exist."""

MAX_VALUE_BYTES = 1 << 30

_MAX_DIGITS = 1000


class Table:
    """Keys and values, and the effect of each operation."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key not in self._values]

    def apply(self, op: Op, args: Sequence[bytes]) -> tuple[list[bytes], tuple[bytes, ...]]:
        """Carry out `op` and return the reply and the changed keys; a blocking one needs all its keys.

        Raises:
            ValueError: The operation does not fit the value, or the arguments the operation; nothing has changed.
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


REQUEST = struct.Struct("!QBdQ")
"""Bytes of the body, operation, seconds to wait, number among the requests of the slot, from 1 on."""

REPLY = struct.Struct("!QB")
"""Bytes of the body, status."""

MAX_REQUEST_BYTES = MAX_VALUE_BYTES + (1 << 20)
"""Room for a value of the largest size and its key; a longer request closes the connection."""

_LENGTH = struct.Struct("!I")


class Status(IntEnum):
    """The outcome of a request."""

    OK = 0
    MISSING = 1  # the deadline passed; the reply holds the missing keys
    INVALID = 2  # the reply holds the message of a ValueError
    FORGOTTEN = 3  # the connection was made again too late, or to another store; the reply holds the id of the server


def pack_fields(fields: Sequence[bytes]) -> bytes:
    parts = []
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def fields_size(fields: Sequence[bytes]) -> int:
    """Return how many bytes `pack_fields` makes of `fields`."""
    return _LENGTH.size * len(fields) + sum(map(len, fields))


def unpack_fields(body: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the fields of `body`; raise ValueError if it ends within a field."""
    fields = []
    at = 0
    size = len(body)
    while at < size:
        start = at + _LENGTH.size
        if start > size:
            raise ValueError("a field's length is cut off")
        at = start + _LENGTH.unpack_from(body, start - _LENGTH.size)[0]
        if at > size:
            raise ValueError(f"a field of {at - start} bytes is cut off after {size - start}")
        fields.append(bytes(body[start:at]))
    return fields
