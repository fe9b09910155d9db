"""Who uses a file store of a fixed number of users, so that one left over from an earlier run is told apart."""

from __future__ import annotations

import os
import platform
from typing import NamedTuple

from meshdist.handshake import job_id, secret_from_environment


class Member(NamedTuple):
    """One user of a file store, and the process it lives in.

    Example:
        >>> Member.here().is_dead()
        False
        >>> Member.parse(Member.here().pack()).pid == os.getpid()
        True
    """

    token: bytes
    job: bytes
    host: bytes
    pid: int
    started: bytes

    @classmethod
    def here(cls) -> Member:
        """Return a new user in this process."""
        pid = os.getpid()
        job = job_id(secret_from_environment()).hex().encode()
        return cls(os.urandom(8).hex().encode(), job, _host_identity(), pid, _start_time(pid))

    def pack(self) -> list[bytes]:
        """Return the fields as byte strings."""
        return [self.token, self.job, self.host, b"%d" % self.pid, self.started]

    @classmethod
    def parse(cls, fields: list[bytes]) -> Member:
        """Return the user that `pack` described."""
        token, job, host, pid, started = fields
        return cls(token, job, host, int(pid), started)

    def is_dead(self) -> bool:
        """Return True if its process is known to be gone; of another host's nothing is known."""
        if self.host != _host_identity():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False  # it lives, as another user
        # Another start: the number went to another process. A zombie has none: only its exit status is to be asked for.
        return _start_time(self.pid) != self.started


class Members:
    """The users that have joined, and which of them have left.

    Example:
        >>> members, me = Members(), Member.here()
        >>> members.joined(me)
        >>> members.refusal(Member.here(), world_size=1)
        'it already has the 1 users it is for'
    """

    def __init__(self) -> None:
        self._all: dict[bytes, Member] = {}
        self._left: set[bytes] = set()

    def joined(self, member: Member) -> None:
        """Note a new user."""
        self._all[member.token] = member

    def left(self, token: bytes, *, withdrawn: bool = False) -> None:
        """Note that a user has left; one that has withdrawn makes room for another."""
        if withdrawn:
            self._all.pop(token, None)
        else:
            self._left.add(token)

    def is_empty(self) -> bool:
        """Return True if nobody has joined who has not withdrawn."""
        return not self._all

    def have_all_left(self, world_size: int) -> bool:
        """Return True if `world_size` users have come and all have left: nobody needs the file any more."""
        return len(self._all) >= world_size and self._left >= self._all.keys()

    def are_leaving(self, world_size: int) -> bool:
        """Return True if all users have come and some have left; soon the file is gone and a new one may begin."""
        return len(self._all) >= world_size and bool(self._left)

    def refusal(self, member: Member, world_size: int) -> str | None:
        """Return why `member` cannot join, or None; the members who are leaving are not counted."""
        for other in self._all.values():
            if other.job != member.job:
                return "it belongs to another job, or was left over by one; delete it or choose another path"
            if other.token not in self._left and other.is_dead():
                return (
                    f"it was left over by an earlier run, whose process {other.pid} is gone; delete it or choose "
                    "another path"
                )
        if len(self._all) >= world_size and not self._left:
            return f"it already has the {world_size} users it is for"
        return None


def _host_identity() -> bytes:
    """Return what tells this host, its boot and its process numbers from any others."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip() + b" " + os.fsencode(os.readlink("/proc/self/ns/pid"))
    except OSError:
        return platform.node().encode()  # no /proc on this system


def _start_time(pid: int) -> bytes:
    """Return when process `pid` started, empty where that is not known or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces; the start time is the 20th field after it.
            fields = file.read().rpartition(b")")[2].split()
        return b"" if fields[0] in (b"Z", b"X") else fields[19]
    except (OSError, IndexError):
        return b""
