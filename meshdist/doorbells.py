"""Doorbells that other processes of the host can ring: Unix datagram sockets.

A datagram carries nothing: it ends the sleep of the thread that the address belongs to, which then looks for itself.
So a stranger who rings causes one look too many. Addresses are in Linux' abstract namespace, which leaves no file;
on other systems they are files of a random name, removed when their thread's doorbell is closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import socket
import sys
import time
from collections import Counter

from meshdist.systems import check_processes
from meshdist.waiting import Doorbell, Doorbells

_LONGEST_DIRECTORY = 60
_MILLISECOND_S = 1e-3


class SocketDoorbell(Doorbell):
    """A doorbell with an address."""

    def __init__(self, base: str, number: int, ringer: socket.socket) -> None:
        self.number = number
        self._ringer = ringer
        self._address = address(base, number)
        self._socket = _unix_socket()
        self._socket.bind(self._address)
        # Descriptors that end the sleep as well, and how often each was asked for.
        self._watched: Counter[int] = Counter()

    def wait(self, timeout_s: float) -> bool:
        if self._watched:
            return self._wait_for_any(timeout_s)
        if timeout_s < _MILLISECOND_S:
            # Sockets round up to milliseconds. Who sleeps for less looks again soon, whether it rings or not.
            time.sleep(timeout_s)
            timeout_s = 0.0
        self._socket.settimeout(timeout_s)
        try:
            self._socket.recv(1)
        except (TimeoutError, BlockingIOError):
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
        if os.path.isabs(self._address):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)

    def _wait_for_any(self, timeout_s: float) -> bool:
        if sys.platform == "win32":
            raise AssertionError("`check_processes` comes before")
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

    Args:
        directory: Where addresses are files. None has addresses that are no files, where there are such: on Linux.

    Attributes:
        base: What the addresses begin with; peers find it on the rank's card.

    Raises:
        DistError: On this system ranks cannot be processes.
    """

    def __init__(self, directory: str | None = None) -> None:
        super().__init__()
        check_processes("init_process_group")
        if directory is None and sys.platform != "linux":
            directory = _short_directory()
        name = f"meshdist-{secrets.token_hex(12)}"
        self.base = name if directory is None else os.path.join(os.path.abspath(directory), name)
        self._ringer = _unix_socket()
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
    """Return the address of a doorbell: that of a file where `base` is a path, else an abstract one."""
    return f"{base}-{number}" if os.path.isabs(base) else f"\0{base}-{number}"


def _short_directory() -> str:
    # An address has room for 103 bytes where it has least, on macOS, whose directory for temporary files is long.
    import tempfile  # not needed on Linux, nor to import meshdist

    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) <= _LONGEST_DIRECTORY else "/tmp"


def _unix_socket() -> socket.socket:
    if sys.platform == "win32":
        raise AssertionError("`check_processes` comes before")
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def ring(ringer: socket.socket, to: str) -> None:
    """Ring by a non-blocking socket: a full queue means that it has rung, a missing one that nobody sleeps there."""
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
        ringer.sendto(b"", to)
