"""Frames: what goes over a connection, a header each and, behind those of some kinds, bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

# A whole message; the announcement of a long one, the answer that somebody takes it, and its bytes; a part of a
# collective, and the call of a rank that is at odds with another; what a rank says that gave a group up, or closed it;
# and that it has left the world.
WHOLE, LONG, GO, DATA, PART, CALLED, FAILED, LEFT, BYE = range(1, 10)

# Kind; the sender in the group; which group; tag; bytes; number of a long message, or word of a collective; dtype.
Header = tuple[int, int, int, int, int, int, bytes]

_MAGIC = b"mf"
_FORM = struct.Struct("<2sBxIQqQQ16s")
_CARRYING = (PART, WHOLE, DATA, CALLED, FAILED, LEFT)
_TEXTS = (CALLED, FAILED, LEFT)
_MOST_TEXT_BYTES = 4096
# More than any array has.
_MOST_BYTES = 1 << 56

HEADER_BYTES = _FORM.size
_pack: Callable[..., bytes] = _FORM.pack


class FrameError(ValueError):
    """What came is no frame.

    Example:
        >>> issubclass(FrameError, ValueError)
        True
    """


def pack(
    kind: int, src: int, group: int, tag: int = 0, num_bytes: int = 0, number: int = 0, dtype: bytes = b""
) -> bytes:
    """Return a header.

    Example:
        >>> header = pack(WHOLE, src=1, group=7, tag=5, num_bytes=8, dtype=b"float64")
        >>> len(header) == HEADER_BYTES, unpack(header, 0)[:5]
        (True, (1, 1, 7, 5, 8))
    """
    return _pack(_MAGIC, kind, src, group, tag, num_bytes, number, dtype)


def unpack(data: Any, offset: int) -> Header:
    """Return the header at `offset` of `data`, an object with the buffer protocol.

    Raises:
        FrameError: It is none.
    """
    magic, kind, src, group, tag, num_bytes, number, dtype = _FORM.unpack_from(data, offset)
    if magic != _MAGIC or not WHOLE <= kind <= BYE:
        raise FrameError(f"a header that begins with {bytes(data[offset : offset + 8])!r}")
    if num_bytes > (_MOST_TEXT_BYTES if kind in _TEXTS else _MOST_BYTES):
        raise FrameError(f"a header that announces {num_bytes} bytes")
    return kind, src, group, tag, num_bytes, number, dtype


def pack_text(kind: int, src: int, group: int, text: str, word: int = 0) -> tuple[bytes, bytes]:
    """Return the header and the bytes of a frame that says something."""
    data = text.encode()[:_MOST_TEXT_BYTES]
    return pack(kind, src, group, num_bytes=len(data), number=word), data


def follows(header: Header) -> int:
    """Return how many bytes come behind a header."""
    return header[4] if header[0] in _CARRYING else 0


def group_token(name: str) -> int:
    """Return the number that stands for a group in headers, the same on all its ranks."""
    import hashlib

    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
