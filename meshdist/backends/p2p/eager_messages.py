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

from meshdist.arrays.host import OBJECTS_PREFIX, Array, element_dtype, is_of_objects, label_in
from meshdist.backends.base import FastPath
from meshdist.runtime.waiting import spin_for

EAGER_VARIABLE = "MESHDIST_EAGER_LIMIT"
DEFAULT_EAGER_BYTES = 64 << 10
MOST_EAGER_BYTES = 256 << 10
"""The greatest limit that the variable may set; a backend may buffer less."""

Take: TypeAlias = "Callable[[Array], bool | None]"


class MessageKind(NamedTuple):
    tag: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    dtype_name: bytes
    num_bytes: int
    eager_bytes: int  # the limit of the group, and that of the fast path
    most_bytes: int
    is_async: bool = False  # sent by an `isend`, which leaves the array alone

    @property
    def is_eager(self) -> bool:
        """Whether its sender does not wait."""
        return self.is_async or self.num_bytes <= self.eager_bytes


# The bytes of a dtype's name in headers, and what separates a label from it; see `arrays.host.labelled_dtype`.
_NAME_BYTES, _LABEL = 16, "~"


def _padded(name: str) -> bytes:
    return name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")


# How the names of lists of objects begin, which also have the number of objects; alone, in a receive of any number.
OBJECTS = OBJECTS_PREFIX.encode()
ANY_OBJECTS = _padded(OBJECTS_PREFIX)


class DtypeNames(dict["np.dtype[Any]", bytes]):
    """The dtype names in headers, cached: NumPy takes microseconds to format one."""

    def __missing__(self, dtype: np.dtype[Any]) -> bytes:
        if is_of_objects(dtype) and dtype.names is not None:  # not kept: there is one for each length of a list
            return _padded(dtype.names[0])
        if label := label_in(dtype):  # nor are these
            name = self[element_dtype(dtype)].rstrip(bytes(1)) + f"{_LABEL}{label}".encode()
            return name.ljust(_NAME_BYTES, bytes(1)) if len(name) <= _NAME_BYTES else self[element_dtype(dtype)]
        name = self[dtype] = _padded(str(dtype))
        return name


def number_of_objects(name: bytes) -> int | None:
    """Return how many objects a message has, by the name of its dtype; None if it is not a list of objects."""
    return int(text_of(name)[len(OBJECTS) :], 16) if name.startswith(OBJECTS) else None


@cache
def dtype_named(name: bytes) -> np.dtype[Any] | None:
    """Return the dtype of a name in headers; None if NumPy does not know the name here."""
    try:
        return np.dtype(text_of(name))
    except TypeError:
        return None


def text_of(name: bytes) -> str:
    """Return the dtype's name, without a label."""
    return name.rstrip(bytes(1)).decode().partition(_LABEL)[0]


def label_of_name(name: bytes) -> str:
    """Return the label in the name of a dtype; an empty string if it has none."""
    return name.rstrip(bytes(1)).decode().partition(_LABEL)[2]


def fits(sent: bytes, wanted: bytes) -> bool:
    """Return whether a receive of the dtype `wanted` takes a message of the dtype `sent`: a label fits no other one."""
    return sent == wanted or (text_of(sent) == text_of(wanted) and not (has_label(sent) and has_label(wanted)))


def has_label(name: bytes) -> bool:
    return _LABEL.encode() in name


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
        name, limits = self.names[dtype], (self.eager_bytes, self._most_bytes)
        return MessageKind(tag, element_dtype(dtype), shape, name, num_bytes, *limits)


def eager_bytes() -> int:
    """Return up to how many bytes a send is buffered, so that it does not wait for its receive; -1 for none.

    Raises:
        ValueError: `MESHDIST_EAGER_LIMIT` is not a number of bytes, or is more than 256 KiB.
    """
    text = os.environ.get(EAGER_VARIABLE, str(DEFAULT_EAGER_BYTES))
    if not text.strip().isdecimal():
        raise ValueError(
            f"{EAGER_VARIABLE} must be a number of bytes, got {text!r}; 0 makes every send wait until it is received"
        )
    if int(text) > MOST_EAGER_BYTES:
        raise ValueError(f"{EAGER_VARIABLE} must be at most {MOST_EAGER_BYTES} bytes (256 KiB), got {text!r}")
    return int(text) or -1


def fast_recv(take: Take, spin_s: float, spins: int = 0) -> FastPath:
    """Return a fast path that polls `spins` times and then for `spin_s`; after that the caller posts a receive."""
    return lambda array: spin_for(partial(take, array), spin_s, spins)
