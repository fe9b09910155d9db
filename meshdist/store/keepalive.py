"""Keep-alive: whether the host of a peer answers, whatever the process of the peer does.

A host that has vanished sends no reset. The kernel notices that on an idle connection: it sends probes, and the peer's
kernel answers them even if its process computes or is stopped. While bytes are unacknowledged the kernel retransmits
them instead, for a quarter of an hour. TCP_USER_TIMEOUT shortens that, but also ends the connection with a peer that
answers and does not read: the probes of its closed window count as unacknowledged bytes. A connection whose peer may be
slow to read is therefore watched by the waiting thread, with a `SilenceMonitor`.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from contextlib import suppress
from typing import NamedTuple

from meshdist.system.tcp_socket import tcp_info


class KeepAlive(NamedTuple):
    """When an idle connection is probed, and when its peer's host counts as vanished."""

    idle_s: int
    interval_s: int
    num_probes: int

    @property
    def silence_s(self) -> int:
        """How long the host of a peer may be silent."""
        return self.idle_s + self.num_probes * self.interval_s


# A cut network is an error within ten seconds. A cut of 5 s is none: at most five of the probes are lost in it.
KEEP_ALIVE = KeepAlive(idle_s=2, interval_s=1, num_probes=6)

# Fractions of `silence_s`: between two looks; and the longest pause between looks in which the process still counts as
# reading.
_LOOK, _LONGEST_PAUSE = 1 / 32, 1 / 4
# Share of `silence_s` after which another way to the peer is tried, where there is one.
_BRIEF = 3 / 8
# Offsets in Linux' tcp_info: how often the oldest bytes were sent again, in a byte of the first word; bytes that were
# acknowledged; segments received.
STATE, NUM_ACKNOWLEDGED, NUM_SEGMENTS = 0, 120, 140
_TCP_RTO_MAX_MS = 44  # Linux 6.15; the socket module does not have it
_LONGEST_RETRANSMISSION_MS = 1000


def tune(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and have the kernel end an idle connection if the peer's host does not answer.

    Bytes are sent again at least once in a second, so that they arrive soon after a short cut of the network.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEP_ALIVE.idle_s),
        ("TCP_KEEPINTVL", KEEP_ALIVE.interval_s),
        ("TCP_KEEPCNT", KEEP_ALIVE.num_probes),
    ):
        _set(sock, option, value)
    if sys.platform == "linux":
        with suppress(OSError):  # of an earlier kernel, which waits for twice as long each time
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _LONGEST_RETRANSMISSION_MS)


def probe_often(sock: socket.socket) -> None:
    """Have the kernel probe an idle connection each second, so that a short silence says something."""
    _set(sock, "TCP_KEEPIDLE", 1)
    _set(sock, "TCP_KEEPINTVL", 1)
    _set(sock, "TCP_KEEPCNT", KEEP_ALIVE.silence_s - 1)


def limit_unacknowledged(sock: socket.socket) -> None:
    """Also end the connection if sent bytes stay unacknowledged; only if the peer has room for all it is sent."""
    _set(sock, "TCP_USER_TIMEOUT", 1000 * KEEP_ALIVE.silence_s)


def _set(sock: socket.socket, option: str, value: int) -> None:
    number = getattr(socket, option, None)  # not every platform has them all
    if number is not None:
        sock.setsockopt(socket.IPPROTO_TCP, number, value)


def silence() -> str:
    """Return the silence after which a host counts as vanished, for messages."""
    return f"{KEEP_ALIVE.silence_s} s"


class SilenceMonitor:
    """Notices that the host of a peer has been silent for too long, on a connection that this process reads.

    The peer's kernel acknowledges what it is sent, and probes the connection itself when it has heard nothing for
    `idle_s`. So segments keep arriving from a host that runs, whether or not its process reads. This does not hold
    while this process leaves its own window closed: then the peer's kernel has bytes to send, and probes the window
    ever more rarely. So only time in which this process reads counts.

    Where only the way to the peer is cut, segments still arrive. So the host is silent as well if it acknowledges
    nothing while the kernel sends the same bytes again, which it does not do for a window that is closed.

    With `is_brief` it does not take as long: there is another way to the peer, which `probe_often` prepares.

    Without Linux' count of segments no silence is noticed, and the kernel's own limits apply.
    """

    def __init__(self, sock: socket.socket, *, is_brief: bool = False) -> None:
        self._sock = sock
        self._is_brief = is_brief
        self._num_segments: int | None = None
        self._num_acknowledged: int | None = None
        self._since_s = self._next_s = 0.0

    @property
    def silent_s(self) -> float:
        """How long nothing has come, as of the last look."""
        return max(self._next_s - _LOOK * self._patience_s() - self._since_s, 0.0) if self._next_s else 0.0

    def restart(self) -> None:
        """Count from now on, since this process did not read."""
        self._num_segments = None

    def is_silent(self) -> bool:
        """Return True if nothing has come for `silence_s`; to be asked again and again while reading."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        silence_s = self._patience_s()
        has_paused = now_s - self._next_s > _LONGEST_PAUSE * silence_s
        num_segments = tcp_info(self._sock, NUM_SEGMENTS)
        has_come = num_segments is None or num_segments != self._num_segments
        if has_paused or (has_come and not self._is_unacknowledged()):
            self._num_segments, self._since_s = num_segments, now_s
        self._next_s = now_s + _LOOK * silence_s
        return now_s - self._since_s >= silence_s

    def _patience_s(self) -> float:
        return KEEP_ALIVE.silence_s * (_BRIEF if self._is_brief else 1.0)

    def _is_unacknowledged(self) -> bool:
        """Return True if bytes are being sent again and again, and none was acknowledged since the last look."""
        num_acknowledged, before = tcp_info(self._sock, NUM_ACKNOWLEDGED), self._num_acknowledged
        self._num_acknowledged = num_acknowledged
        num_repeats = (tcp_info(self._sock, STATE) or 0) >> 16 & 0xFF
        return num_repeats > 0 and num_acknowledged == before

    def check(self) -> None:
        """Raise TimeoutError, with the errno ETIMEDOUT, if the peer's host is silent."""
        if self.is_silent():
            raise TimeoutError(errno.ETIMEDOUT, f"nothing has come from its host for {silence()}")
