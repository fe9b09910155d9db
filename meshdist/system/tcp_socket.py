"""What the kernel tells of a TCP connection."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable

_TIOCOUTQ = 0x5411  # SIOCOUTQ


def counter_of_unacknowledged(sock: socket.socket) -> Callable[[], int]:
    """Return a function that returns how many sent bytes of a socket the peer's kernel has not acknowledged."""
    if sys.platform == "win32":
        return lambda: 0
    import fcntl

    fd, count = sock.fileno(), memoryview(bytearray(4)).cast("i")

    def num_unacknowledged() -> int:
        fcntl.ioctl(fd, _TIOCOUTQ, count)
        return count[0]

    return num_unacknowledged


def tcp_info(sock: socket.socket, offset: int) -> int | None:
    """Return the 32 bits at `offset` of Linux' tcp_info of a socket; None if they are not there."""
    if sys.platform != "linux":
        return None
    try:
        found = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, offset + 4)
    except OSError:
        return None
    if len(found) < offset + 4:
        return None
    value: int = struct.unpack_from("=I", found, offset)[0]
    return value
