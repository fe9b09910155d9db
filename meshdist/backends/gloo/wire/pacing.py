"""Pacing: how much of what is sent may be on its way at once."""

from __future__ import annotations

import socket
import struct
import sys

# Where a packet comes back within this time, few bytes on the way keep the line busy. Measured between namespaces of a
# machine: with more, what one side has copied has left the cache before the other copies it on, which takes up to twice
# the time of the processor.
NEAR_US = 100
NEAR_BYTES = 256 << 10

# Where tcp_info of Linux has the shortest round trip that was seen, in microseconds.
_MIN_RTT = 148


def pace(sock: socket.socket) -> None:
    """Let little be on the way to a peer that is near; to others, as much as the system finds out to be good."""
    round_trip_us = _round_trip_us(sock)
    if round_trip_us is not None and round_trip_us < NEAR_US:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NEAR_BYTES)


def _round_trip_us(sock: socket.socket) -> int | None:
    if sys.platform != "linux":
        return None
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
    except OSError:
        return None
    if len(found) < _MIN_RTT + 4:
        return None
    round_trip_us: int = struct.unpack_from("=I", found, _MIN_RTT)[0]
    return round_trip_us
