"""The running processes of a job: wait for the next exit, signal them, leave none behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from meshdist.launch.reaper import Reaper
from meshdist.system.deadline import Deadline
from meshdist.system.platform import KILL

_POLL_S = 0.02
"""Period of polling for processes without a pidfd."""

_GROUP_END_S = 1.0
"""How long the children of an ended rank may take to end after SIGTERM."""


class Member(NamedTuple):
    """One process."""

    rank: int
    pid: int
    # Returns its exit status, minus the number of the signal that killed it, None while it runs.
    poll: Callable[[], int | None]
    # A descriptor that becomes readable when it ends; needed where the process is not our own child.
    sentinel: int | None = None


class Exit(NamedTuple):
    """How and when a process ended."""

    rank: int
    pid: int
    status: int
    time_s: float  # in seconds since the epoch
    monotonic_s: float  # by the monotonic clock of this host


class WorkerSet:
    """The processes of a job, each the leader of its own process group."""

    def __init__(self, reaper: Reaper, wake_fd: int | None = None) -> None:
        self._reaper = reaper
        self._running: dict[int, Member] = {}
        self._orphan_groups: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._num_polled = 0
        self._wake_fd = wake_fd
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)

    @property
    def running(self) -> dict[int, Member]:
        """The processes that have not ended, by rank."""
        return self._running

    def add(self, member: Member) -> None:
        self._reaper.watch(member.pid)
        self._running[member.rank] = member
        if member.sentinel is not None:
            self._selector.register(member.sentinel, selectors.EVENT_READ)
            return
        pidfd = _pidfd(member.pid)
        if pidfd is None:
            self._num_polled += 1
        else:
            self._pidfds[member.rank] = pidfd
            self._selector.register(pidfd, selectors.EVENT_READ)

    def wait(self, timeout_s: float) -> list[Exit]:
        """Wait at most `timeout_s` for an exit or the wake descriptor; return the processes that ended."""
        deadline = Deadline(timeout_s)
        while True:
            is_woken = bool(self._selector.select(deadline.slice_s(_POLL_S if self._num_polled else timeout_s)))
            exits = self._collect()
            if exits or is_woken or deadline.expired():
                return exits

    def _collect(self) -> list[Exit]:
        exits = []
        for member in list(self._running.values()):
            status = member.poll()
            if status is not None:
                self._remove(member)
                exits.append(Exit(member.rank, member.pid, status, time.time(), time.monotonic()))
        self._forget_empty_groups()
        return exits

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every running process and its children."""
        for member in self._running.values():
            if not _signal_group(member.pid, number):
                # A process that is just starting has no group of its own yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.pid, number)

    def kill(self) -> None:
        """Kill every running process. Its children get SIGTERM when its exit is noticed.

        The children may include a process that cleans up, such as the resource tracker of multiprocessing.
        """
        for member in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, KILL)

    def close(self) -> None:
        """Kill the remaining processes, and release everything."""
        if self._wake_fd is not None:
            self._selector.unregister(self._wake_fd)
        self.kill()
        deadline = Deadline(_GROUP_END_S)
        while self._running and not deadline.expired():
            self.wait(deadline.slice_s(_POLL_S))
        while any(map(_is_alive, self._orphan_groups)) and not deadline.expired():
            self._selector.select(_POLL_S)
        for group in self._orphan_groups:
            _signal_group(group, KILL)
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        self._selector.close()
        self._reaper.close()

    def _remove(self, member: Member) -> None:
        """Remove an ended process, and ask its remaining process group to end."""
        del self._running[member.rank]
        fd = self._pidfds.pop(member.rank, None)
        if fd is not None:
            self._selector.unregister(fd)
            os.close(fd)
        elif member.sentinel is not None:
            self._selector.unregister(member.sentinel)
        else:
            self._num_polled -= 1
        if _signal_group(member.pid, signal.SIGTERM):
            self._orphan_groups.add(member.pid)
        else:
            self._reaper.forget(member.pid)

    def _forget_empty_groups(self) -> None:
        for group in [group for group in self._orphan_groups if not _signal_group(group, None)]:
            self._orphan_groups.discard(group)
            self._reaper.forget(group)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None where not supported or none is free."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _is_alive(group: int) -> bool:
    """Return True if a process of the group runs; zombies do not count, as their new parent may never reap them."""
    if not _signal_group(group, None):
        return False
    if not os.path.isdir("/proc/self"):
        return True
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, _, group_of_pid, *_ = file.read().rpartition(b")")[2].split()
            if int(group_of_pid) == group and state not in b"ZX":
                return True
    return False


def _signal_group(group: int, number: signal.Signals | None) -> bool:
    """Signal a process group (None only tests whether it exists); return False if there is none."""
    if sys.platform == "win32":
        return False
    try:
        os.killpg(group, number or 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
