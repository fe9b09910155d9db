"""Retention: what a connection has written and the peer's kernel may not have acknowledged.

A reset discards what is between the two kernels. What the peer's kernel has acknowledged the peer can still read. So a
connection that is made again is sent the rest once more. Short frames are kept as they were sent. Long ones stay with
their sender until it needs their memory: then the part that is not acknowledged by then is copied, often nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from meshdist.system.deferring_lock import Lock

# What was acknowledged is dropped each time that so many bytes have been written.
_SLACK_BYTES = 256 << 10
# TLS: of a record that has not arrived whole, nothing can be read, though the kernel may have acknowledged its first
# bytes.
RECORD_BYTES = 17 << 10


class LongFrame(Protocol):
    """A frame that has been written, in the memory of its sender."""

    size: int
    end: int  # the number of the byte behind it

    def last_bytes(self, count: int) -> bytes: ...

    def release(self) -> None:
        """Note that the memory is no longer needed here."""


class Retention:
    """The last frames of one direction, whose bytes are numbered from the first one's on.

    It holds at most what the peer's kernel has not acknowledged, which the socket's send buffer limits, and 256 KiB.

    Args:
        lock: Is held during all calls.
        num_unacknowledged: Returns how many bytes are with the kernel, and not acknowledged.
    """

    def __init__(self, lock: Lock, num_unacknowledged: Callable[[], int]) -> None:
        self.lock = lock
        self.end = 0  # how many bytes all completed frames had
        self._begin = 0  # of the first byte that is kept
        self._released = 0  # what comes before may have been changed by its sender
        self._limit = _SLACK_BYTES
        self._pieces: deque[bytes | LongFrame] = deque()
        self._num_unacknowledged = num_unacknowledged

    def keep(self, frame: bytes) -> None:
        """Keep a frame that has just been written."""
        self.end += len(frame)
        self._pieces.append(frame)
        if self.end > self._limit:
            self._drop_acknowledged()

    def keep_long(self, frame: LongFrame) -> None:
        """Keep a frame that has just been written, which its sender will `settle` before it changes it."""
        self.end += frame.size
        frame.end = self.end
        self._pieces.append(frame)
        if self.end > self._limit:
            self._drop_acknowledged()

    def settle(self, frame: LongFrame) -> None:
        """Release a frame: copy the part of it that is not acknowledged."""
        begin = max(self.end - self._num_unacknowledged(), frame.end - frame.size, self._begin)
        if begin < frame.end:
            pieces = self._pieces
            index = len(pieces) - 1
            while pieces[index] is not frame:
                index -= 1
            pieces[index] = frame.last_bytes(frame.end - begin)
            if begin > frame.end - frame.size:  # what was before it is acknowledged
                while index:
                    index -= 1
                    _release(pieces.popleft())
                self._begin = begin
        else:
            self._released = max(self._released, frame.end)
        frame.release()

    def since(self, offset: int) -> bytes | None:
        """Return the bytes from an offset on; None if they are no longer kept."""
        if not max(self._begin, self._released) <= offset <= self.end:
            return None
        pieces = [piece if isinstance(piece, bytes) else piece.last_bytes(piece.size) for piece in self._pieces]
        return b"".join(pieces)[offset - self._begin :]

    def _drop_acknowledged(self) -> None:
        acknowledged, pieces = self.end - self._num_unacknowledged(), self._pieces
        while pieces:
            piece = pieces[0]
            end = self._begin + (len(piece) if isinstance(piece, bytes) else piece.size)
            if end > acknowledged:
                break
            self._begin = end
            _release(pieces.popleft())
        self._limit = self.end + _SLACK_BYTES


def _release(piece: bytes | LongFrame) -> None:
    if not isinstance(piece, bytes):
        piece.release()
