"""Doorbells that other processes of the host can ring: Unix datagram sockets.

A datagram carries nothing: it ends the sleep of the thread that the address belongs to, which then looks for itself.
So a stranger who rings causes one look too many. Addresses are in Linux' abstract namespace, which leaves no file.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys

from meshdist.errors import DistError
from meshdist.waiting import Doorbell, Doorbells


class SocketDoorbell(Doorbell):
    """A doorbell with an address."""

    def __init__(self, base: str, number: int, ringer: socket.socket) -> None:
        self.number = number
        self._ringer = ringer
        self._address = address(base, number)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)

    def wait(self, timeout_s: float) -> bool:
        self._socket.settimeout(max(timeout_s, 1e-4))
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True

    def ring(self) -> None:
        ring(self._ringer, self._address)

    def close(self) -> None:
        self._socket.close()


class SocketDoorbells(Doorbells):
    """The doorbells of a rank that is a process.

    Attributes:
        base: What the addresses begin with; peers find it on the rank's card.
    """

    def __init__(self) -> None:
        super().__init__()
        if sys.platform != "linux":
            raise DistError(
                "backend 'gloo' runs on Linux only so far; here, ranks can be threads: meshdist.run(fn, world_size)"
            )
        self.base = f"meshdist-{secrets.token_hex(12)}"
        self._ringer = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ringer.setblocking(False)

    def make(self, number: int) -> Doorbell:
        """Return a new doorbell."""
        return SocketDoorbell(self.base, number, self._ringer)

    def ring(self, base: str, number: int) -> None:
        """Ring doorbell `number` of the rank whose card says `base`."""
        ring(self._ringer, address(base, number))

    def close(self) -> None:
        """Close all."""
        super().close()
        self._ringer.close()


def address(base: str, number: int) -> str:
    """Return the abstract address of a doorbell."""
    return f"\0{base}-{number}"


def ring(ringer: socket.socket, to: str) -> None:
    """Ring by a non-blocking socket: a full queue means that it has rung, a missing one that nobody sleeps there."""
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
        ringer.sendto(b"", to)
