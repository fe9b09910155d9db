"""Kinds of messages: which ones are eager, so that their senders do not wait, and the fast path of small ones.

The common part of all messages with one peer, tag, dtype and shape is prepared once, and those on the fast path need no
requests. A transport gives two functions for a kind:

- Send: write the message, unless an earlier one waits for room, or the peer has left or failed.
- Take: copy the next message into an array, if it is of this kind, no receive is posted and no message is unexpected:
  otherwise it may be for another receive. Return None if nothing has arrived.

Both return False, without effect, if the message needs a request; the caller then posts one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshdist.arrays.host import OBJECT_SIZES, Array
from meshdist.backends.base import FastPath
from meshdist.runtime.waiting import spin_for

EAGER_VARIABLE = "MESHDIST_EAGER_LIMIT"
DEFAULT_EAGER_BYTES = 64 << 10

Take: TypeAlias = "Callable[[Array], bool | None]"


class MessageKind(NamedTuple):
    tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dtype_name: bytes
    num_bytes: int
    is_eager: bool = True  # its sender does not wait
    may_be_announced: bool = False  # its receiver may copy it from the sender's array, which an `isend` leaves alone


def _padded(name: str) -> bytes:
    return name.encode()[:16].ljust(16, b"\0")


# The name of `OBJECT_SIZES` in headers.
OBJECTS = _padded("objects")


class DtypeNames(dict["np.dtype[Any]", bytes]):
    """The dtype names in headers, cached: NumPy takes microseconds to format one."""

    def __missing__(self, dtype: np.dtype[Any]) -> bytes:
        name = self[dtype] = OBJECTS if dtype == OBJECT_SIZES else _padded(str(dtype))
        return name


@cache
def dtype_named(name: bytes) -> np.dtype[Any] | None:
    """Return the dtype of a name in headers; None of a list of objects, and if NumPy does not know the name here."""
    try:
        return np.dtype(text_of(name))
    except TypeError:
        return None


def text_of(name: bytes) -> str:
    return name.rstrip(bytes(1)).decode()


class MessageKinds:
    """Makes the kinds of a group's messages; messages longer than `eager_bytes`, or `most_bytes`, have no fast path."""

    def __init__(self, most_eager_bytes: int, most_bytes: int = 0) -> None:
        self.names = DtypeNames()
        self.eager_bytes = min(eager_bytes(), most_eager_bytes)
        self._most_bytes = max(self.eager_bytes, most_bytes)

    def kind(self, tag: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> MessageKind | None:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._most_bytes or self.eager_bytes < 0:
            return None
        return MessageKind(tag, dtype, shape, self.names[dtype], num_bytes, num_bytes <= self.eager_bytes)


def eager_bytes() -> int:
    """Return up to how many bytes a send is buffered, so that it does not wait for its receive; -1 for none.

    Raises:
        ValueError: `MESHDIST_EAGER_LIMIT` is not a number of bytes.
    """
    text = os.environ.get(EAGER_VARIABLE, str(DEFAULT_EAGER_BYTES))
    if not text.strip().isdecimal():
        raise ValueError(
            f"{EAGER_VARIABLE} must be a number of bytes, got {text!r}; 0 makes every send wait until it is received"
        )
    return int(text) or -1


def fast_recv(take: Take, spin_s: float, spins: int = 0) -> FastPath:
    """Return a fast path that polls `spins` times and then for `spin_s`; after that the caller posts a receive."""
    return lambda array: spin_for(partial(take, array), spin_s, spins)
