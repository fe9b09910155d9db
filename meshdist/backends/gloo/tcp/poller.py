"""Poller: which sockets are ready; and a bell that other threads ring."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from typing import Protocol

from meshdist.errors import DistBackendError


class Poller(Protocol):
    """Polls sockets for one thread at a time. `fd` is readable when one is ready or any thread has called `ring`."""

    fd: int

    def poll(self) -> Iterator[tuple[int, bool, bool]]:
        """Yield (fd, can be read, can be written) of each ready socket."""

    def ring(self) -> None: ...

    def watch(self, fd: int, reads: bool, writes: bool) -> None:
        """Poll `fd` from now on; without `reads`, it is reported as readable only when the peer has closed it."""

    def forget(self, fd: int) -> None:
        """Stop polling `fd`, which is still open."""

    def close(self) -> None: ...


if sys.platform == "linux":

    class EpollPoller:
        def __init__(self) -> None:
            self._epoll = select.epoll()
            self.fd = self._epoll.fileno()
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._masks: dict[int, int] = {}

        def poll(self) -> Iterator[tuple[int, bool, bool]]:
            for fd, events in self._epoll.poll(0):
                if fd == self._bell:
                    os.eventfd_read(fd)
                else:
                    yield fd, bool(events & ~select.EPOLLOUT), bool(events & select.EPOLLOUT)

        def ring(self) -> None:
            os.eventfd_write(self._bell, 1)

        def watch(self, fd: int, reads: bool, writes: bool) -> None:
            mask = (select.EPOLLIN if reads else select.EPOLLRDHUP) | (select.EPOLLOUT if writes else 0)
            before = self._masks.get(fd)
            if mask != before:
                self._masks[fd] = mask
                if before is None:
                    self._epoll.register(fd, mask)
                else:
                    self._epoll.modify(fd, mask)

        def forget(self, fd: int) -> None:
            if self._masks.pop(fd, None) is not None:
                self._epoll.unregister(fd)

        def close(self) -> None:
            self._epoll.close()
            os.close(self._bell)


def new_poller() -> Poller:
    if sys.platform == "linux":
        return EpollPoller()
    raise DistBackendError(
        f"connections between hosts need Linux (epoll), and this system is {sys.platform}: run all ranks on one host,"
        " or the job on hosts with Linux"
    )
