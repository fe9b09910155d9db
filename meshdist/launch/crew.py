"""The running processes of a job: wait for whichever ends next, signal them, leave nothing of them behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from meshdist.deadline import Deadline
from meshdist.launch.guard import Guard
from meshdist.systems import KILL

_POLL_S = 0.02
"""How often to look at processes that cannot be waited for with others (no pidfd)."""

_LEFTOVERS_S = 1.0
"""How long what a rank left in its process group may take to end by itself."""


class Member(NamedTuple):
    """One process.

    Attributes:
        poll: Returns its exit status, minus a signal's number if that killed it, and None as long as it runs.
        sentinel: A descriptor that becomes readable when it ends, where the process is not our own child.

    Example:
        >>> Member(rank=0, pid=4711, poll=lambda: None).rank
        0
    """

    rank: int
    pid: int
    poll: Callable[[], int | None]
    sentinel: int | None = None


class Exit(NamedTuple):
    """How and when a process ended.

    Example:
        >>> Exit(rank=0, pid=4711, status=-9, time_s=0.0).status
        -9
    """

    rank: int
    pid: int
    status: int
    time_s: float


class Crew:
    """The processes of a job, each the leader of its own process group.

    Example:
        >>> import subprocess, sys
        >>> crew = Crew(Guard(error_directory="/nonexistent"))
        >>> process = subprocess.Popen([sys.executable, "-c", "exit(3)"], start_new_session=True)
        >>> crew.add(Member(0, process.pid, process.poll))
        >>> [exit.status for exit in crew.wait(10.0)]
        [3]
        >>> crew.close()
    """

    def __init__(self, guard: Guard, wake_fd: int | None = None) -> None:
        self._guard = guard
        self._running: dict[int, Member] = {}
        self._leftover_groups: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._pidfds: dict[int, int] = {}
        self._num_polled = 0
        self._wake_fd = wake_fd
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)

    @property
    def running(self) -> dict[int, Member]:
        """The members that have not ended, by rank."""
        return self._running

    def add(self, member: Member) -> None:
        """Take in a process that was just started."""
        self._guard.watch(member.pid)
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
        """Wait for an end, or the wake descriptor, at most `timeout_s`; return the processes that ended."""
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
                exits.append(Exit(member.rank, member.pid, status, time.time()))
        self._forget_empty_groups()
        return exits

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every running process and what it started."""
        for member in self._running.values():
            if not _signal_group(member.pid, number):
                # A process that is only just starting has no group of its own yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(member.pid, number)

    def kill(self) -> None:
        """Kill every running process; what it started is asked to end when its own end is noticed.

        Among that may be a process that cleans up after it, such as the resource tracker of multiprocessing.
        """
        for member in self._running.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(member.pid, KILL)

    def close(self) -> None:
        """Kill what is left, and give back everything."""
        if self._wake_fd is not None:
            self._selector.unregister(self._wake_fd)
        self.kill()
        deadline = Deadline(_LEFTOVERS_S)
        while self._running and not deadline.expired():
            self.wait(deadline.slice_s(_POLL_S))
        while any(map(_is_alive, self._leftover_groups)) and not deadline.expired():
            self._selector.select(_POLL_S)
        for group in self._leftover_groups:
            _signal_group(group, KILL)
        for fd in self._pidfds.values():
            os.close(fd)
        self._pidfds.clear()
        self._selector.close()
        self._guard.close()

    def _remove(self, member: Member) -> None:
        """Take out a process that has ended, and ask what it left in its group to end as well."""
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
            self._leftover_groups.add(member.pid)
        else:
            self._guard.forget(member.pid)

    def _forget_empty_groups(self) -> None:
        for group in [group for group in self._leftover_groups if not _signal_group(group, None)]:
            self._leftover_groups.discard(group)
            self._guard.forget(group)


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended; None where there is none, or none to spare."""
    if sys.platform != "linux":
        return None
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _is_alive(group: int) -> bool:
    """Return True if a process of the group runs; a zombie, whose new parent may never reap it, does not count."""
    if not _signal_group(group, None):
        return False
    if not os.path.isdir("/proc/self"):
        return True
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            state, _, its_group, *_ = file.read().rpartition(b")")[2].split()
            if int(its_group) == group and state not in b"ZX":
                return True
    return False


def _signal_group(group: int, number: signal.Signals | None) -> bool:
    """Signal a process group (None only asks whether it is there); return False if there is none."""
    if sys.platform == "win32":
        return False
    try:
        os.killpg(group, number or 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
