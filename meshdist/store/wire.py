"""The bytes of requests and replies: a length, an operation or status, and a list of byte strings."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from meshdist.store.table import MAX_VALUE_BYTES

REQUEST = struct.Struct("!QBd")
"""Bytes of the body, operation, seconds to wait."""

REPLY = struct.Struct("!QB")
"""Bytes of the body, status."""

MAX_REQUEST_BYTES = MAX_VALUE_BYTES + (1 << 20)
"""A value of the largest size and its key fit; a longer request closes the connection."""

_LENGTH = struct.Struct("!I")


class Status(IntEnum):
    """How a request ended.

    Example:
        >>> Status.OK.name
        'OK'
    """

    OK = 0
    MISSING = 1  # the deadline passed; the reply holds the missing keys
    INVALID = 2  # the reply holds the message of a ValueError


def pack_fields(fields: Sequence[bytes]) -> bytes:
    """Return `fields` as one byte string."""
    parts = []
    for field in fields:
        parts.append(_LENGTH.pack(len(field)))
        parts.append(field)
    return b"".join(parts)


def fields_size(fields: Sequence[bytes]) -> int:
    """Return how many bytes `pack_fields` makes of `fields`."""
    return _LENGTH.size * len(fields) + sum(map(len, fields))


def unpack_fields(body: bytes | bytearray | memoryview) -> list[bytes]:
    """Return the fields of `body`.

    Raises:
        ValueError: The body ends within a field.
    """
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
