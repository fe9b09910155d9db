"""Doorbells that other processes of the host can ring: Unix datagram sockets.

An empty datagram wakes the thread that owns the address; the thread then checks what it waits for, so a datagram from
a stranger causes one unneeded check. Addresses are in Linux' abstract namespace, which leaves no files; on other
systems they are files with random names, removed when the doorbell is closed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import sys
import time
from collections import Counter

from meshdist.core import begin_sleep
from meshdist.runtime.waiting import Doorbell, Doorbells
from meshdist.system.platform import check_processes

_LONGEST_DIRECTORY = 60
_MILLISECOND_S = 1e-3


class SocketDoorbell(Doorbell):
    def __init__(self, base: str, number: int, ringer: socket.socket) -> None:
        self.number = number
        self._ringer = ringer
        self._address = address(base, number)
        self._socket = _unix_socket()
        self._socket.bind(self._address)
        # Further descriptors that end the sleep when they become readable, with a use count.
        self._watched: Counter[int] = Counter()

    def wait(self, timeout_s: float) -> bool:
        begin_sleep()
        if self._watched:
            return self._wait_for_any(timeout_s)
        if timeout_s < _MILLISECOND_S:
            # Socket timeouts are rounded up to milliseconds.
            time.sleep(timeout_s)
            timeout_s = 0.0
        self._socket.settimeout(timeout_s)
        try:
            self._socket.recv(1)
        except (TimeoutError, BlockingIOError):
            return False
        return True

    def watch(self, fd: int) -> None:
        """End the sleep also when `fd` becomes readable."""
        self._watched[fd] += 1

    def unwatch(self, fd: int) -> None:
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
            raise AssertionError("`check_processes` is called first")
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
        directory: Of addresses that are files; if None, abstract addresses are used on Linux.

    Raises:
        DistError: Ranks cannot be processes on this system.
    """

    def __init__(self, directory: str | None = None) -> None:
        super().__init__()
        check_processes("init_process_group")
        if directory is None and sys.platform != "linux":
            directory = _short_directory()
        name = f"meshdist-{os.urandom(12).hex()}"
        # The prefix of the addresses; peers find it on the rank's card.
        self.base = name if directory is None else os.path.join(os.path.abspath(directory), name)
        self._ringer = _unix_socket()
        self._ringer.setblocking(False)

    def make(self, number: int) -> Doorbell:
        return SocketDoorbell(self.base, number, self._ringer)

    def ring(self, base: str, number: int) -> None:
        ring(self._ringer, address(base, number))

    def close(self) -> None:
        super().close()
        self._ringer.close()


def address(base: str, number: int) -> str:
    """Return the address of a doorbell: a file if `base` is a path, else an abstract address."""
    return f"{base}-{number}" if os.path.isabs(base) else f"\0{base}-{number}"


def _short_directory() -> str:
    # macOS limits addresses to 103 bytes, and its directory for temporary files has a long name.
    import tempfile  # not needed on Linux, nor to import meshdist

    found = tempfile.gettempdir()
    return found if len(os.fsencode(found)) <= _LONGEST_DIRECTORY else "/tmp"


def _unix_socket() -> socket.socket:
    if sys.platform == "win32":
        raise AssertionError("`check_processes` is called first")
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def ring(ringer: socket.socket, to: str) -> None:
    """Ring without blocking: a full queue has rung already, and behind a missing address no thread sleeps."""
    with contextlib.suppress(BlockingIOError, ConnectionRefusedError, FileNotFoundError):
        ringer.sendto(b"", to)
