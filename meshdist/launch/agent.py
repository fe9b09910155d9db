"""meshrun's work: start the ranks of this host, watch over them, say what went wrong, start them again."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import NamedTuple

from meshdist.deadline import Deadline
from meshdist.errors import DistError
from meshdist.exit_status import INTERRUPT_BASE
from meshdist.launch import worker
from meshdist.launch.crew import Member
from meshdist.launch.env import LOOPBACK, Job, worker_environment
from meshdist.launch.error_files import ErrorFiles, endings_of
from meshdist.launch.failures import Failure
from meshdist.launch.interrupts import Interrupts, without_ctrl_c
from meshdist.launch.meeting import Meeting, SignalledError, meet
from meshdist.launch.nodes import Nodes, OneNode, Report, Stop, Verdict
from meshdist.launch.outputs import STDERR, STDOUT, Outputs, Routing
from meshdist.launch.several_nodes import SeveralNodes
from meshdist.launch.supervisor import DEFAULT_GRACE_S, DEFAULT_INTERVAL_S, Supervisor


class Settings(NamedTuple):
    """What to launch, and how.

    Attributes:
        kind: What the first word of `command` is: "script", "module" or "program".
        num_ranks: How many ranks to start on this host.
        master_addr: Where the store listens, where there is one host.
        master_port: The port of the store; 0 picks a free port.
        routing: Where the ranks' output goes.
        max_restarts: How often the ranks are started again after one has failed.
        interval_s: How often to look at what is not told by itself.
        meeting: Where the launchers of several hosts meet; None where there is one.
        run_id: Names the job, where there is one host; made up where None.
        error_dir: Where the ranks' error files are to be; None for none.

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
    routing: Routing = Routing()
    max_restarts: int = 0
    interval_s: float = DEFAULT_INTERVAL_S
    meeting: Meeting | None = None
    run_id: str | None = None
    error_dir: str | None = None


def say(text: str) -> None:
    """Print one message of the launcher; it may be that nobody listens any more."""
    with contextlib.suppress(OSError):
        print(f"meshrun: {text}", file=sys.stderr, flush=True)


def launch(settings: Settings) -> int:
    """Run a job to its end and return the exit status that tells how it went."""
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        nodes: Nodes | None = None
        try:
            nodes = _nodes(settings, interrupts)
            stack.callback(nodes.close)
            num_restarts = 0
            while True:
                verdict = _run(settings, nodes, interrupts, num_restarts)
                if not verdict.is_restart:
                    return verdict.status
                num_restarts += 1
                say(f"starting all ranks again, restart {num_restarts} of at most {settings.max_restarts}")
        except SignalledError:
            number = interrupts.take()[0]
            if nodes is not None:
                nodes.stop(Stop(nodes.node, signal=number))
            say(f"ended by {number.name}")
            return INTERRUPT_BASE + number
        except (DistError, OSError, ValueError) as error:
            if nodes is not None:
                nodes.stop(Stop(nodes.node, problem=f"cannot start its ranks: {error}"))
            say(f"cannot start the job: {error}")
            return 1


def _nodes(settings: Settings, interrupts: Interrupts) -> Nodes:
    if settings.meeting is None:
        return OneNode(
            settings.num_ranks, settings.master_addr, settings.master_port, settings.max_restarts, settings.run_id
        )
    met = meet(settings.meeting, settings.num_ranks, settings.max_restarts, interrupts)
    return SeveralNodes(met, interrupts, settings.master_port, settings.grace_s)


def _run(settings: Settings, nodes: Nodes, interrupts: Interrupts, num_restarts: int) -> Verdict:
    """Run the ranks of this host to their end, say how it went, and return what to do next."""
    job = nodes.begin(num_restarts)
    if settings.error_dir is not None and num_restarts == 0:
        ErrorFiles(settings.error_dir).begin(job)
    supervisor = Supervisor(job, interrupts, settings.interval_s)
    with contextlib.closing(supervisor), Outputs(settings.routing, num_restarts) as outputs:
        for rank in job.local_ranks:
            supervisor.add(_start(settings, job, rank, outputs))
        outputs.start()
        supervisor.watch(Deadline(math.inf), nodes.stopped)
        return _conclude(settings, nodes, supervisor, interrupts)


def _start(settings: Settings, job: Job, rank: int, outputs: Outputs) -> Member:
    """Start `rank` in a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, worker.__file__, str(os.getpid()), settings.kind, *settings.command]
    with contextlib.ExitStack() as stack:
        stdout, stderr = (outputs.open(rank, rank - job.first_rank, stream, stack) for stream in (STDOUT, STDERR))
        environment = {**os.environ, **worker_environment(job, rank)}
        with without_ctrl_c():
            process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    return Member(rank, process.pid, process.poll)


def _conclude(settings: Settings, nodes: Nodes, supervisor: Supervisor, interrupts: Interrupts) -> Verdict:
    """End what still runs after the watch, on all hosts, and agree on what comes next."""
    if not supervisor.failures and not interrupts.pending() and nodes.stopped() is None:
        nodes.wait_for_others()
    signals = interrupts.take()
    if signals:
        nodes.stop(Stop(nodes.node, signal=signals[0]))
        supervisor.end(signals[0], settings.grace_s)
        say(f"ended by {signals[0].name}{_how_others_ended(supervisor)}")
        return nodes.conclude(Report(nodes.node, signal=signals[0]))
    shown: int | None = None
    if supervisor.failures:
        cause = supervisor.failures[0]
        first = nodes.stop(Stop(nodes.node, failure=cause))
        # Otherwise its cause may still come to light, here or elsewhere.
        if not cause.secondary and (first.failure in (None, cause) or first.failure.secondary):
            _say_cause(settings, nodes, supervisor, cause)
            shown = cause.rank
    supervisor.end(signal.SIGTERM, settings.grace_s)
    verdict = nodes.conclude(Report(nodes.node, supervisor.failures))
    _say_end(settings, nodes, supervisor, verdict, shown)
    return verdict


def _say_end(settings: Settings, nodes: Nodes, supervisor: Supervisor, verdict: Verdict, shown: int | None) -> None:
    """Say why the ranks have ended, unless that is shown already, and how."""
    cause = verdict.cause
    if cause is None and verdict.problem:
        say(f"{nodes.describe(verdict.node)} {verdict.problem}")
    elif cause is not None and verdict.node != nodes.node:
        say(f"first failure: {nodes.describe(verdict.node)}, {cause.headline()}")
    elif cause is not None and shown is None:
        _say_cause(settings, nodes, supervisor, cause)
        shown = cause.rank
    for failure in supervisor.failures:
        if failure.rank != shown:
            say(failure.headline())
    if supervisor.ended or supervisor.running:
        say(f"ended {_ranks(supervisor.ended)} after it{_how_others_ended(supervisor)}")
    if settings.error_dir is not None:
        _write_error_files(settings, supervisor, verdict)


def _write_error_files(settings: Settings, supervisor: Supervisor, verdict: Verdict) -> None:
    """Write a file for each rank that did not end well, and say where; the last words of a start that failed."""
    endings, num_restarts = endings_of(supervisor, settings.routing), supervisor.job.num_restarts
    is_by_signal = verdict.cause is None and verdict.status >= INTERRUPT_BASE  # to a launcher: no rank has failed
    if not endings or is_by_signal or settings.error_dir is None:
        return
    files = ErrorFiles(settings.error_dir)
    try:
        files.write(supervisor.job, endings, verdict)
    except OSError as error:
        say(f"cannot write the ranks' error files: {error}")
        return
    ranks = [ending.rank for ending in endings]
    first = verdict.cause.rank if verdict.cause is not None else ranks[0]
    chosen = first if first in ranks else ranks[0]
    others = [rank for rank in ranks if rank != chosen]
    beside = f", and of {_ranks(others)} beside it" if others else ""
    say(f"error file of rank {chosen}: {files.path(chosen, num_restarts)}{beside}")


def _say_cause(settings: Settings, nodes: Nodes, supervisor: Supervisor, cause: Failure) -> None:
    job = supervisor.job
    where = f"{nodes.describe(nodes.node)}, " if nodes.num_nodes > 1 else ""
    log = ""
    if settings.routing.is_in_file(cause.rank - job.first_rank, STDERR):
        log = f"\nIts output is in {settings.routing.path(cause.rank, STDERR, job.num_restarts)}"
    say(f"first failure: {where}" + cause.report().rstrip("\n") + log)


def _how_others_ended(supervisor: Supervisor) -> str:
    killed = f"; {_ranks(supervisor.killed)} had to be killed" if supervisor.killed else ""
    stuck = f"; {_ranks(supervisor.running)} cannot be killed (waiting in the kernel)" if supervisor.running else ""
    return killed + stuck


def _ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 3"."""
    numbers = sorted(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
