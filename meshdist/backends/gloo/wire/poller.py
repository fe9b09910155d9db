"""Poller: which sockets have something, or take something; and a bell that others ring."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from typing import Protocol

from meshdist.errors import DistBackendError


class Poller(Protocol):
    """Looks after the sockets of one wire, for one thread at a time; anybody may ring.

    Attributes:
        fd: A descriptor that can be read when a socket has something, or takes something, or somebody has rung.
    """

    fd: int

    def look(self) -> Iterator[tuple[int, bool, bool]]:
        """Give each descriptor that is watched and ready, whether it can be read, and whether it can be written."""

    def ring(self) -> None:
        """End the sleep of who sleeps on `fd`."""

    def watch(self, fd: int, reads: bool, writes: bool) -> None:
        """Look after a descriptor from now on; one that is not to be read tells of its end alone."""

    def forget(self, fd: int) -> None:
        """Look after a descriptor no more; it is still open."""

    def close(self) -> None:
        """Give back the descriptors."""


if sys.platform == "linux":

    class EpollPoller:
        """A Poller that asks Linux."""

        def __init__(self) -> None:
            self._epoll = select.epoll()
            self.fd = self._epoll.fileno()
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._bell, select.EPOLLIN)
            self._masks: dict[int, int] = {}

        def look(self) -> Iterator[tuple[int, bool, bool]]:
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
    """Return a Poller.

    Raises:
        DistBackendError: This system has nothing of the kind.
    """
    if sys.platform == "linux":
        return EpollPoller()
    raise DistBackendError(
        f"connections between hosts need Linux (epoll), and this system is {sys.platform}: run all ranks on one host,"
        " or the job on hosts with Linux"
    )
