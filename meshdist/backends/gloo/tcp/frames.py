"""Frames: a header each and, for some kinds, bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

# EAGER: an eager message. RTS, CTS, DATA: a long message's announcement, the receiver's answer, and its bytes.
# COLLECTIVE: data of a collective. MISMATCH: the call of a rank that has found a mismatch. LEFT: how a rank left a
# group. BYE: it left the world.
EAGER, RTS, CTS, DATA, COLLECTIVE, MISMATCH, LEFT, BYE = range(1, 9)

# Kind; sender's rank in the group; group; tag; bytes; number of a long message or word of a collective; dtype. A word
# has 96 bits, of which the upper ones take the place of the tag.
Header = tuple[int, int, int, int, int, int, bytes]

_MAGIC = b"mf"
_FORM = struct.Struct("<2sBxIQqQQ16s")
_CARRYING = (COLLECTIVE, EAGER, DATA, MISMATCH, LEFT)
_TEXTS = (MISMATCH, LEFT)
_OF_COLLECTIVES = (COLLECTIVE, MISMATCH)
_LOWER = (1 << 64) - 1
_MOST_TEXT_BYTES = 4096
# More than any array can have.
_MOST_BYTES = 1 << 56

HEADER_BYTES = _FORM.size
_pack: Callable[..., bytes] = _FORM.pack


class FrameError(ValueError):
    """Malformed bytes on a connection."""


def pack(
    kind: int, src: int, group: int, tag: int = 0, num_bytes: int = 0, number: int = 0, dtype: bytes = b""
) -> bytes:
    return _pack(_MAGIC, kind, src, group, tag | number >> 64, num_bytes, number & _LOWER, dtype)


def unpack(data: Any, offset: int) -> Header:
    """Return the header at `offset` of `data`, a buffer; raise FrameError if it is malformed."""
    magic, kind, src, group, tag, num_bytes, number, dtype = _FORM.unpack_from(data, offset)
    if magic != _MAGIC or not EAGER <= kind <= BYE:
        raise FrameError(f"a header that begins with {bytes(data[offset : offset + 8])!r}")
    if num_bytes > (_MOST_TEXT_BYTES if kind in _TEXTS else _MOST_BYTES):
        raise FrameError(f"a header that announces {num_bytes} bytes")
    if kind in _OF_COLLECTIVES:
        return kind, src, group, 0, num_bytes, (tag & _LOWER) << 64 | number, dtype
    return kind, src, group, tag, num_bytes, number, dtype


def pack_text(kind: int, src: int, group: int, data: bytes, word: int = 0) -> tuple[bytes, bytes]:
    data = data[:_MOST_TEXT_BYTES]
    return pack(kind, src, group, num_bytes=len(data), number=word), data


def follows(header: Header) -> int:
    return header[4] if header[0] in _CARRYING else 0


def group_token(name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
