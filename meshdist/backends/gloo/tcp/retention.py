"""Retention: what a connection has written and the peer's kernel may not have acknowledged.

A reset discards what is between the two kernels. What the peer's kernel has acknowledged the peer can still read. So a
connection that is made again is sent the rest once more: of frames that are complete a copy of the last bytes is kept,
those that are not are still with their sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

# Copies are kept for as long as this is not reached; then those of bytes that were acknowledged are dropped.
_SLACK_BYTES = 64 << 10
# TLS: of a record that has not arrived whole, nothing can be read, though the kernel may have acknowledged its first
# bytes.
RECORD_BYTES = 17 << 10


class Retention:
    """The last bytes of the frames of one direction, numbered from the first byte of the first frame.

    It holds at most what the peer's kernel has not acknowledged, which the socket's send buffer limits, and 64 KiB.

    Args:
        num_unacknowledged: Returns how many bytes are with the kernel, and not acknowledged.
    """

    def __init__(self, num_unacknowledged: Callable[[], int]) -> None:
        self.end = 0  # how many bytes all completed frames had
        self._begin = 0  # of the first byte that is kept
        self._limit = _SLACK_BYTES
        self._pieces: deque[bytes] = deque()
        self._num_unacknowledged = num_unacknowledged

    def keep(self, frame: bytes) -> None:
        """Keep a frame that has just been written."""
        self.end += len(frame)
        self._pieces.append(frame)
        if self.end > self._limit:
            self._drop_acknowledged()

    def keep_copy(self, header: bytes, data: memoryview) -> None:
        """Keep a copy of the end of a frame that has just been written, as far as it is not acknowledged."""
        size = len(header) + len(data)
        self.end += size
        lost = min(self._num_unacknowledged(), self.end)
        if lost < size:
            self._pieces.clear()
            self._begin = self.end - lost
            self._limit = self.end + _SLACK_BYTES
        rest = lost - len(data)
        if rest > 0:
            self._pieces.append(header[max(len(header) - rest, 0) :])
        if lost:
            self._pieces.append(bytes(data[-lost:]))
        if self.end > self._limit:
            self._drop_acknowledged()

    def since(self, offset: int) -> bytes | None:
        """Return the bytes from an offset on; None if they are no longer kept."""
        if not self._begin <= offset <= self.end:
            return None
        return b"".join(self._pieces)[offset - self._begin :]

    def _drop_acknowledged(self) -> None:
        acknowledged, pieces = self.end - self._num_unacknowledged(), self._pieces
        while pieces and self._begin + len(pieces[0]) <= acknowledged:
            self._begin += len(pieces.popleft())
        self._limit = self.end + _SLACK_BYTES
