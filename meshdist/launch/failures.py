"""Failure: how a rank failed, as its error file or its exit tells; and which of several failures caused the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from meshdist.errors import DistError
from meshdist.system.processes import describe_status, hint_about


class Failure(NamedTuple):
    """How one rank failed."""

    rank: int
    pid: int
    host: str
    status: int  # its exit status, or minus the number of the signal that killed it
    time_s: float  # when it failed, in seconds since the epoch; without an error file, when the launcher noticed
    monotonic_s: float  # the same by the monotonic clock of its host, which does not jump; for comparison on that host
    secondary: bool = False  # True if it failed only because another rank had
    kind: str = ""  # the exception's type, empty where there was none
    message: str = ""
    traceback: str = ""  # as Python prints it, without frames of the launcher
    handled: bool = False  # True if it came while the program handled an exception, as in a `finally` block
    shared: bool = False  # True if a call of meshdist raised it, which may fail on other ranks as well

    @property
    def is_explained(self) -> bool:
        """Whether no failure of another rank can be its cause."""
        return not self.secondary and (self.handled or not self.shared)

    def headline(self) -> str:
        """Return the rank and the failure in one line."""
        who = f"rank {self.rank} (pid {self.pid} on {self.host})"
        if not self.traceback:
            return f"{who} {describe_status(self.status)}"
        first_line = self.message.strip().split("\n", 1)[0]
        return f"{who} {describe_status(self.status)}: {self.kind}{': ' if first_line else ''}{first_line}"

    def report(self) -> str:
        """Return the rank and the failure, with the traceback if there is one; of a killed rank, with a hint."""
        if not self.traceback:
            hint = hint_about(self.status)
            return f"{self.headline()}\n" + (f"  {hint}\n" if hint else "")
        return f"rank {self.rank} (pid {self.pid} on {self.host}) {describe_status(self.status)}:\n{self.traceback}"


def follows_from_peer(error: BaseException) -> bool:
    """Return True if `error`, or an exception in its chain, reports a failed peer (`peer_failed`)."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, DistError) and link.peer_failed:
            return True
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False


def came_while_handling(error: BaseException) -> bool:
    """Return True if `error` is one of meshdist that was raised while an exception of the program was handled."""
    first, seen = error, {id(error)}
    while not first.__suppress_context__ and first.__context__ is not None and id(first.__context__) not in seen:
        first = first.__context__
        seen.add(id(first))
    return isinstance(error, DistError) and not isinstance(first, DistError)


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure on a host that is not secondary; the earliest of all where all are secondary.

    A rank that makes a call while it handles an exception may fail with all others, and later than they: its exception
    is the cause.
    """
    return min(failures, key=lambda failure: (failure.secondary, not failure.handled, failure.monotonic_s))


def read_error_file(path: str, rank: int) -> Failure | None:
    """Return the failure that `rank` described in `path`; None without a readable description."""
    import json

    try:
        with open(path, encoding="utf-8") as file:
            record: Any = json.load(file)
        return Failure(
            rank=rank,
            pid=int(record["pid"]),
            host=str(record["host"]),
            status=int(record["status"]),
            time_s=float(record["time_s"]),
            monotonic_s=float(record["monotonic_s"]),
            secondary=bool(record["secondary"]),
            kind=str(record["type"]),
            message=str(record["message"]),
            traceback=str(record["traceback"]),
            handled=bool(record.get("handled")),
            shared=bool(record.get("shared")),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None  # the exit status still shows the failure
