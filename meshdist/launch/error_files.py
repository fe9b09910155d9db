"""Write a JSON file for every rank that failed or was terminated: how it ended, and the first failure."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from meshdist.launch.failures import Failure
from meshdist.launch.job_verdict import Verdict
from meshdist.launch.outputs import STDERR, Routing
from meshdist.launch.supervisor import Supervisor
from meshdist.launch.worker_env import Job
from meshdist.launch.worker_set import Exit
from meshdist.system.processes import describe_status, signal_name

_NAME = re.compile(r"rank(\d+)(\.restart\d+)?\.error\.json")


class Ending(NamedTuple):
    """How a rank ended that failed or was terminated."""

    rank: int
    failure: Failure | None = None  # its failure; None if it was terminated because of another rank or host
    exit: Exit | None = None  # the exit of its process, None while it runs
    was_killed: bool = False  # it did not end within the grace period after it was asked to
    log: str | None = None  # the file of its stderr, None where stderr is shown

    def how(self, why_terminated: str) -> str:
        if self.failure is not None:
            return describe_status(self.failure.status)
        if self.exit is None:
            return "runs on: it cannot be killed"
        if self.was_killed:
            return f"was killed {why_terminated}, as it did not end when asked to"
        return f"was terminated {why_terminated}"


def endings_of(supervisor: Supervisor, routing: Routing) -> list[Ending]:
    """Return how the ranks of this host ended that failed or were terminated, in rank order."""
    job = supervisor.job
    failures = {failure.rank: failure for failure in supervisor.failures}
    ranks = sorted({*failures, *supervisor.ended, *supervisor.running})
    endings = []
    for rank in ranks:
        is_in_file = routing.is_in_file(rank - job.first_rank, STDERR)
        log = routing.path(rank, STDERR, job.num_restarts) if is_in_file else None
        was_killed = rank in supervisor.killed
        endings.append(Ending(rank, failures.get(rank), supervisor.exits.get(rank), was_killed, log))
    return endings


class ErrorFiles:
    """The error files of the ranks of this host, in `directory`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def path(self, rank: int, num_restarts: int) -> str:
        """Return the file of one rank; each restart has its own files."""
        restart = f".restart{num_restarts}" if num_restarts else ""
        return os.path.join(self.directory, f"rank{rank}{restart}.error.json")

    def begin(self, job: Job) -> None:
        """Make the directory before the ranks start, and remove the files of an earlier job.

        With several hosts, only files of the ranks of this host are removed.

        Raises:
            OSError: The directory cannot be made, or the files cannot be removed.
        """
        os.makedirs(self.directory, exist_ok=True)
        for name in os.listdir(self.directory):
            found = _NAME.fullmatch(name)
            if found and (job.num_nodes == 1 or int(found[1]) in job.local_ranks):
                os.unlink(os.path.join(self.directory, name))

    def write(self, job: Job, endings: Iterable[Ending], verdict: Verdict, node: int | None) -> None:
        """Write the file of each rank, readable by its owner alone: messages may quote secrets.

        `node` is the number of the host of the cause; None if it has none.

        Raises:
            OSError: A file cannot be written.
        """
        for ending in endings:
            path = self.path(ending.rank, job.num_restarts)
            with open(path + ".part", "w", encoding="utf-8", opener=_private) as file:
                json.dump(_describe(job, ending, verdict, node), file, indent=1)
                file.write("\n")
            os.replace(path + ".part", path)  # readers never see a partial file


def _describe(job: Job, ending: Ending, verdict: Verdict, node: int | None) -> dict[str, object]:
    failure, exit, cause = ending.failure, ending.exit, verdict.cause
    known = failure or exit
    status = known.status if known else None
    time_s = known.time_s if known else time.time()
    why_terminated = "after the first failure" if cause is not None else f"because node {node} {in_short(verdict)}"
    is_first = failure is not None and cause is not None and failure.rank == cause.rank
    return {
        "rank": ending.rank,
        "local_rank": ending.rank - job.first_rank,
        "node": job.node,
        "host": platform.node(),
        "pid": known.pid if known else None,
        "run_id": job.run_id,
        "restart": job.num_restarts,
        "how": ending.how(why_terminated),
        "failed": failure is not None,
        "is_first": is_first,
        "follows_from_peer": failure is not None and failure.secondary,
        "exit_status": None if status is None or status < 0 else status,
        "signal": None if status is None or status >= 0 else signal_name(-status),
        "time_s": time_s,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s)),
        "type": (failure.kind or None) if failure else None,
        "message": (failure.message or None) if failure else None,
        "traceback": (failure.traceback or None) if failure else None,
        "stderr": ending.log,
        "first_failure": None if is_first else _first(verdict, node),
    }


def in_short(verdict: Verdict) -> str:
    """Return the problem of a host in a few words, without its details."""
    return verdict.problem.partition(":")[0]


def _first(verdict: Verdict, node: int | None) -> dict[str, object]:
    """Describe another rank's failure, or the other reason why the job ended."""
    cause = verdict.cause
    if cause is None:
        return {"node": node, "rank": None, "host": None, "how": verdict.problem, "time_s": None}
    return {
        "node": node,
        "rank": cause.rank,
        "host": cause.host,
        "how": cause.headline(),
        "time_s": cause.time_s,
    }


def _private(path: str, flags: int) -> int:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # it may belong to another user, with another mode
    return os.open(path, flags | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
