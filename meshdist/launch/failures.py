"""How a rank failed, which failure came first, and how to say so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from meshdist.exit_status import describe_status


class Failure(NamedTuple):
    """How one rank failed.

    Attributes:
        status: Its exit status, or minus the number of the signal that killed it.
        time_s: When it failed, in seconds since the epoch; where it could not say, when that was noticed.
        secondary: True if it failed only because another rank had.
        kind: The exception's type, empty where there was none.
        traceback: As Python prints it, without frames of the launcher.

    Example:
        >>> oom = Failure(rank=2, pid=77, host="node", status=-9, time_s=0.0)
        >>> oom.headline()
        'rank 2 (pid 77 on node) was killed by SIGKILL'
    """

    rank: int
    pid: int
    host: str
    status: int
    time_s: float
    secondary: bool = False
    kind: str = ""
    message: str = ""
    traceback: str = ""

    def headline(self) -> str:
        """Return who failed, and how, in one line."""
        who = f"rank {self.rank} (pid {self.pid} on {self.host})"
        if not self.traceback:
            return f"{who} {describe_status(self.status)}"
        first_line = self.message.strip().split("\n", 1)[0]
        return f"{who} {describe_status(self.status)}: {self.kind}{': ' if first_line else ''}{first_line}"

    def report(self) -> str:
        """Return who failed, and how, with the traceback if there is one."""
        if not self.traceback:
            return f"{self.headline()}\n"
        return f"rank {self.rank} (pid {self.pid} on {self.host}) {describe_status(self.status)}:\n{self.traceback}"


def first_cause(failures: Iterable[Failure]) -> Failure:
    """Return the earliest failure that does not follow from another one; the earliest where all do."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time_s))


def read_error_file(path: str, rank: int) -> Failure | None:
    """Return what `rank` wrote about its failure in `path`; None where it wrote nothing that can be read."""
    import json

    try:
        with open(path, encoding="utf-8") as file:
            said: Any = json.load(file)
        return Failure(
            rank=rank,
            pid=int(said["pid"]),
            host=str(said["host"]),
            status=int(said["status"]),
            time_s=float(said["time_s"]),
            secondary=bool(said["secondary"]),
            kind=str(said["type"]),
            message=str(said["message"]),
            traceback=str(said["traceback"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # its exit status still tells that it failed
