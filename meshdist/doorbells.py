"""Doorbells that other processes of the host can ring: Unix datagram sockets.

A datagram carries nothing: it ends the sleep of the thread that the address belongs to, which then looks for itself.
So a stranger who rings causes one look too many. Addresses are in Linux' abstract namespace, which leaves no file.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import select
import socket
import sys
from collections import Counter

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
        # Descriptors that end the sleep as well, and how often each was asked for.
        self._watched: Counter[int] = Counter()

    def wait(self, timeout_s: float) -> bool:
        if self._watched:
            return self._wait_for_any(timeout_s)
        self._socket.settimeout(max(timeout_s, 1e-4))
        try:
            self._socket.recv(1)
        except TimeoutError:
            return False
        return True

    def watch(self, fd: int) -> None:
        """Have the sleep end as well when `fd` can be read."""
        self._watched[fd] += 1

    def unwatch(self, fd: int) -> None:
        """Take back `watch`."""
        self._watched[fd] -= 1
        if not self._watched[fd]:
            del self._watched[fd]

    def ring(self) -> None:
        ring(self._ringer, self._address)

    def close(self) -> None:
        self._socket.close()

    def _wait_for_any(self, timeout_s: float) -> bool:
        poll = select.poll()
        for fd in (self._socket.fileno(), *self._watched):
            poll.register(fd, select.POLLIN)
        ready = poll.poll(max(1, math.ceil(timeout_s * 1e3)))
        if (self._socket.fileno(), select.POLLIN) in ready:
            self._socket.settimeout(0.0)
            with contextlib.suppress(BlockingIOError):
                self._socket.recv(1)
        return bool(ready)


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
