"""meshrun's work: host the store, start the ranks, watch over them, say what went wrong."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import IO, NamedTuple

from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.launch import worker
from meshdist.launch.crew import Member
from meshdist.launch.env import LOOPBACK, Job, job_secret, new_job, worker_environment
from meshdist.launch.failures import INTERRUPT_BASE, Failure, shell_status
from meshdist.launch.interrupts import Interrupts, without_ctrl_c
from meshdist.launch.supervisor import DEFAULT_GRACE_S, Supervisor
from meshdist.store import TCPStore


class Settings(NamedTuple):
    """What to launch, and how.

    Attributes:
        kind: What the first word of `command` is: "script", "module" or "program".
        master_port: Where the store listens; 0 picks a free port.
        log_directory: Where to write each rank's output instead of passing it through.

    Example:
        >>> Settings(kind="script", command=["train.py", "--steps", "100"], num_ranks=4).master_addr
        '127.0.0.1'
    """

    kind: str
    command: list[str]
    num_ranks: int
    master_addr: str = LOOPBACK
    master_port: int = 0
    grace_s: float = DEFAULT_GRACE_S
    log_directory: str | None = None


def say(text: str) -> None:
    """Print one message of the launcher; it may be that nobody listens any more."""
    with contextlib.suppress(OSError):
        print(f"meshrun: {text}", file=sys.stderr, flush=True)


def launch(settings: Settings) -> int:
    """Run a job to its end and return the exit status that tells how it went."""
    secret = job_secret()
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        try:
            store = TCPStore(
                settings.master_addr,
                settings.master_port,
                is_master=True,
                wait_for_workers=False,
                secret=secret.encode(),
            )
            stack.callback(store.close)
            if settings.log_directory is not None:
                os.makedirs(settings.log_directory, exist_ok=True)
            job = new_job(settings.num_ranks, secret, settings.master_addr, store.port)
            supervisor = Supervisor(job, interrupts)
            stack.callback(supervisor.close)
            for rank in range(settings.num_ranks):
                supervisor.add(_start(settings, job, rank))
        except (DistError, OSError) as error:
            say(f"cannot start the job: {error}")
            return 1
        supervisor.watch(Deadline(math.inf))
        return _conclude(settings, supervisor, interrupts)


def _start(settings: Settings, job: Job, rank: int) -> Member:
    """Start `rank` in a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, worker.__file__, str(os.getpid()), settings.kind, *settings.command]
    with contextlib.ExitStack() as stack:
        stdout, stderr = (_log_file(settings, rank, stream, stack) for stream in ("stdout", "stderr"))
        environment = {**os.environ, **worker_environment(job, rank)}
        with without_ctrl_c():
            process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    return Member(rank, process.pid, process.poll)


def _log_path(directory: str, rank: int, stream: str) -> str:
    return os.path.join(directory, f"rank{rank}.{stream}.log")


def _log_file(settings: Settings, rank: int, stream: str, stack: contextlib.ExitStack) -> IO[bytes] | None:
    if settings.log_directory is None:
        return None
    return stack.enter_context(open(_log_path(settings.log_directory, rank, stream), "wb"))


def _conclude(settings: Settings, supervisor: Supervisor, interrupts: Interrupts) -> int:
    """End what still runs after the watch, and return the launcher's exit status."""
    signals = interrupts.take()
    if signals:
        supervisor.end(signals[0], settings.grace_s)
        say(f"ended by {signals[0].name}{_how_others_ended(settings, supervisor)}")
        return INTERRUPT_BASE + signals[0]
    failures = supervisor.failures
    if not failures:
        return 0
    cause = failures[0]
    if not cause.secondary:  # otherwise its cause may still come to light
        _say_cause(settings, cause)
    supervisor.end(signal.SIGTERM, settings.grace_s)
    if cause.secondary:
        cause = supervisor.failures[0]
        _say_cause(settings, cause)
    for failure in supervisor.failures:
        if failure.rank != cause.rank:
            say(failure.headline())
    if supervisor.ended or supervisor.running:
        say(f"ended {_ranks(supervisor.ended)} after it{_how_others_ended(settings, supervisor)}")
    return shell_status(cause.status)


def _say_cause(settings: Settings, cause: Failure) -> None:
    where = ""
    if settings.log_directory is not None:
        where = f"\nIts output is in {_log_path(settings.log_directory, cause.rank, 'stderr')}"
    say("first failure: " + cause.report().rstrip("\n") + where)


def _how_others_ended(settings: Settings, supervisor: Supervisor) -> str:
    killed = f"; {_ranks(supervisor.killed)} had to be killed" if supervisor.killed else ""
    stuck = f"; {_ranks(supervisor.running)} cannot be killed (waiting in the kernel)" if supervisor.running else ""
    return killed + stuck


def _ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 3"."""
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
