"""The users of a file store with a fixed number of users, to detect a file left over from an earlier run."""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

from meshdist.security.credentials import secret_from_environment
from meshdist.security.handshake import job_id


class Member(NamedTuple):
    """One user of a file store, and its process."""

    token: bytes
    job: bytes
    host: bytes
    pid: int
    started: bytes

    @classmethod
    def here(cls) -> Member:
        pid = os.getpid()
        job = job_id(secret_from_environment()).hex().encode()
        return cls(os.urandom(8).hex().encode(), job, _host_identity(), pid, _start_time(pid))

    def pack(self) -> list[bytes]:
        return [self.token, self.job, self.host, b"%d" % self.pid, self.started]

    @classmethod
    def parse(cls, fields: list[bytes]) -> Member:
        token, job, host, pid, started = fields
        if not 0 < int(pid) < 1 << 31:
            raise ValueError(f"{pid!r} is not a process")
        return cls(token, job, host, int(pid), started)

    def is_dead(self) -> bool:
        """Return True if its process has ended; False if that is unknown, as on another host."""
        if self.host != _host_identity():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # it is alive, of another user
        # A different start time means that the pid was reused. A zombie has none: only its exit status remains.
        return _start_time(self.pid) != self.started


class Members:
    """The users that have joined, and which of them have left."""

    def __init__(self) -> None:
        self._all: dict[bytes, Member] = {}
        self._left: set[bytes] = set()

    def joined(self, member: Member) -> None:
        self._all[member.token] = member

    def left(self, token: bytes, *, withdrawn: bool = False) -> None:
        """Record that a user has left; one that has withdrawn makes room for another."""
        if withdrawn:
            self._all.pop(token, None)
        else:
            self._left.add(token)

    def is_empty(self) -> bool:
        return not self._all

    def have_all_left(self, world_size: int) -> bool:
        """Return True if `world_size` users have joined and all have left: the file is no longer needed."""
        return len(self._all) >= world_size and self._left >= self._all.keys()

    def are_leaving(self, world_size: int) -> bool:
        """Return True if all users have joined and some have left: the file is about to be deleted."""
        return len(self._all) >= world_size and bool(self._left)

    def are_of_another_job(self, member: Member) -> bool:
        """Return True if the users have a different secret than `member`."""
        return any(other.job != member.job for other in self._all.values())

    def refusal(self, member: Member, world_size: int) -> str | None:
        """Return why `member` cannot join, or None; a member that is leaving may be dead."""
        for other in self._all.values():
            if other.token not in self._left and other.is_dead():
                return (
                    f"it was left over by an earlier run, whose process {other.pid} is gone; delete it or choose "
                    "another path"
                )
        if len(self._all) >= world_size and not self._left:
            return f"it already has the {world_size} users it is for"
        return None


def _host_identity() -> bytes:
    """Return an identifier of this host, its boot and its pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip() + b" " + os.fsencode(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return platform.node().encode()  # no /proc on this system


def _start_time(pid: int) -> bytes:
    """Return the start time of process `pid`, empty if it is unknown or the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may contain spaces; the start time is the 20th field after it.
            fields = file.read().rpartition(b")")[2].split()
        return b"" if fields[0] in (b"Z", b"X") else fields[19]
    except (OSError, IndexError):
        return b""
