"""Run meshrun: start the ranks of this host, watch them, report failures, and restart the ranks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from meshdist.errors import DistError
from meshdist.launch import worker
from meshdist.launch.failures import Failure
from meshdist.launch.interrupts import Interrupts, without_ctrl_c
from meshdist.launch.job_verdict import Nodes, OneNode, Report, Stop, Verdict
from meshdist.launch.launchers_store import JobEndedError, SignalledError
from meshdist.launch.outputs import STDERR, STDOUT, Outputs, Routing
from meshdist.launch.rank_board import RankBoard
from meshdist.launch.supervisor import DEFAULT_GRACE_S, DEFAULT_INTERVAL_S, Supervisor
from meshdist.launch.worker_env import LOOPBACK, Job, worker_environment
from meshdist.launch.worker_set import Member
from meshdist.runtime.rank_text import ranks_text, same_but_for_rank
from meshdist.store.address import endpoint
from meshdist.system.deadline import Deadline
from meshdist.system.processes import INTERRUPT_BASE

if TYPE_CHECKING:
    from meshdist.launch.dashboard import Dashboard
    from meshdist.launch.node_rendezvous import NodeRendezvous
    from meshdist.store import Store


# Who sends SIGTERM, such as Slurm or timeout, will kill the launcher soon.
_REPORT_AT_SIGTERM_S = 1.0


class Settings(NamedTuple):
    """What to launch, and how."""

    kind: str  # what the first word of `command` is: "script", "module" or "program"
    command: list[str]
    num_ranks: int  # number of ranks on this host
    least_ranks: int | None = None  # how many a restart still has if ranks were killed; `num_ranks` if None
    master_addr: str = LOOPBACK  # of the store on a single host
    master_port: int = 0
    grace_s: float = DEFAULT_GRACE_S
    routing: Routing = Routing()
    max_restarts: int = 0
    interval_s: float = DEFAULT_INTERVAL_S  # period of the checks that no descriptor can replace
    rendezvous: NodeRendezvous | None = None  # where the launchers of several hosts meet; None on a single host
    run_id: str | None = None  # name of the job on a single host; random if None
    error_dir: str | None = None  # directory of the ranks' error files; None for none
    dashboard: bool = False  # show the ranks on the terminal, by rich
    passes_local_rank: bool = False  # pass --local-rank to the command, before its arguments


def report(text: str) -> None:
    """Print a message of the launcher; ignore a closed stderr."""
    with contextlib.suppress(OSError):
        print(f"meshrun: {text}", file=sys.stderr, flush=True)


def launch(settings: Settings) -> int:
    """Run a job to its end and return its exit status."""
    with Interrupts() as interrupts, contextlib.ExitStack() as stack:
        nodes: Nodes | None = None
        try:
            nodes = _nodes(settings, interrupts)
            stack.callback(nodes.close)
            dashboard = stack.enter_context(_dashboard()) if settings.dashboard else None
            num_restarts = nodes.first_start
            while True:
                verdict = _run(settings, nodes, interrupts, num_restarts, dashboard)
                if not verdict.is_restart:
                    return verdict.status
                num_restarts += 1
                count = f"restart {nodes.num_failed_starts} of at most {settings.max_restarts}"
                report(f"starting all ranks again, {count if verdict.is_counted else 'as the hosts have changed'}")
        except SignalledError:
            number = interrupts.take()[0]
            if nodes is not None:
                nodes.stop(Stop(nodes.launcher, signal=number))
            report(f"stopped by {number.name}")
            return INTERRUPT_BASE + number
        except JobEndedError as error:
            report(str(error))
            return error.status
        except (DistError, OSError, ValueError) as error:
            if nodes is not None:
                nodes.stop(Stop(nodes.launcher, problem=f"cannot start its ranks: {error}"))
            report(f"cannot start the job: {error}")
            return 1


def _nodes(settings: Settings, interrupts: Interrupts) -> Nodes:
    if settings.rendezvous is None:
        return OneNode(
            settings.num_ranks, settings.master_addr, settings.master_port, settings.max_restarts, settings.run_id
        )
    from meshdist.launch.node_rendezvous import meet
    from meshdist.launch.several_nodes import SeveralNodes

    met = meet(settings.rendezvous, settings.num_ranks, settings.max_restarts, interrupts, report)
    return SeveralNodes(met, interrupts, settings.master_port, settings.grace_s)


def _dashboard() -> Dashboard:
    from meshdist.launch.dashboard import Dashboard  # with all that asks ranks what they do

    return Dashboard()


def _run(
    settings: Settings, nodes: Nodes, interrupts: Interrupts, num_restarts: int, dashboard: Dashboard | None
) -> Verdict:
    """Run the ranks of this host to their end, report how it went, and return what to do next."""
    job = nodes.begin(num_restarts)
    is_elastic = settings.rendezvous is not None and settings.rendezvous.least_nodes is not None
    if is_elastic or len(job.local_ranks) != settings.num_ranks:
        report(_who_starts(job))
    if settings.error_dir is not None and num_restarts == nodes.first_start:
        from meshdist.launch.error_files import ErrorFiles

        ErrorFiles(settings.error_dir).begin(job)
    supervisor = Supervisor(job, interrupts, settings.interval_s)
    screen = dashboard.take if dashboard is not None else None
    with (
        contextlib.closing(supervisor),
        contextlib.ExitStack() as at_the_end,  # of the output, too
        Outputs(settings.routing, num_restarts, screen) as outputs,
    ):
        pids = {}
        for rank in job.local_ranks:
            if interrupts.pending():
                break
            member = _start(settings, job, rank, outputs)
            supervisor.add(member)
            pids[rank] = member.pid
        outputs.start()
        met = settings.rendezvous
        where = endpoint(met.host, met.port) if met is not None else ""
        board = RankBoard(nodes.ranks_store, job, socket.gethostname(), settings.command, where)
        board.start(pids, settings.routing, job.first_rank)
        supervisor.on_exit = board.note_exit
        if dashboard is not None:
            dashboard.begin(nodes.ranks_store, endpoint(job.master_addr, job.master_port))
            at_the_end.callback(dashboard.end)

        def is_over() -> object:
            board.tell_waiting_ranks()
            return nodes.stopped()

        supervisor.watch(Deadline(math.inf), is_over)
        verdict = _conclude(settings, nodes, supervisor, interrupts)
        if verdict.cause is not None and verdict.launcher == nodes.launcher:
            board.note_first_failure(verdict.cause.rank)
        return verdict


def _who_starts(job: Job) -> str:
    """Return the ranks of a start whose number may differ from that of the start before."""
    ranks = f"{job.world_size} rank{'s' if job.world_size > 1 else ''}"
    nodes = f" on {job.num_nodes} nodes; this one, node {job.node}, has {len(job.local_ranks)}"
    return f"start {job.num_restarts} has {ranks}{nodes if job.num_nodes > 1 else ''}"


def _start(settings: Settings, job: Job, rank: int, outputs: Outputs) -> Member:
    """Start `rank` in its own session, so that a Ctrl-C in the terminal reaches the launcher alone."""
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    name, *arguments = settings.command
    if settings.passes_local_rank:
        arguments.insert(0, f"--local-rank={rank - job.first_rank}")
    command = [sys.executable, *flags, worker.__file__, str(os.getpid()), settings.kind, name, *arguments]
    with contextlib.ExitStack() as stack:
        stdout, stderr = (outputs.open(rank, rank - job.first_rank, stream, stack) for stream in (STDOUT, STDERR))
        environment = {**os.environ, **worker_environment(job, rank)}
        with without_ctrl_c():
            process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, start_new_session=True)
    return Member(rank, process.pid, process.poll)


def _conclude(settings: Settings, nodes: Nodes, supervisor: Supervisor, interrupts: Interrupts) -> Verdict:
    """End the ranks that still run after the watch, on all hosts, and agree on what comes next."""
    if not supervisor.failures and not interrupts.pending() and nodes.stopped() is None:
        nodes.wait_for_others()
    signals = interrupts.take()
    if signals:
        if signals[0] in (signal.SIGINT, signal.SIGTERM) and nodes.node == 0:
            _report_hang(nodes.ranks_store, supervisor.job, interrupts, signals[0])
        nodes.stop(Stop(nodes.launcher, signal=signals[0]))
        supervisor.end(signals[0], settings.grace_s)
        report(f"stopped by {signals[0].name}{_how_others_ended(supervisor)}")
        verdict = nodes.conclude(Report(nodes.launcher, signal=signals[0]))
        return verdict._replace(status=INTERRUPT_BASE + signals[0])
    shown: int | None = None
    if supervisor.failures:
        cause = supervisor.failures[0]
        first = nodes.stop(Stop(nodes.launcher, failure=cause))
        # A secondary failure is not shown yet: its cause may still arrive from this or another host.
        if not cause.secondary and (first.failure in (None, cause) or first.failure.secondary):
            _report_cause(settings, nodes, supervisor, cause)
            shown = cause.rank
    supervisor.end(signal.SIGTERM, settings.grace_s)
    num_ranks = _num_ranks_next(settings, supervisor)
    verdict = nodes.conclude(Report(nodes.launcher, supervisor.failures, num_ranks=num_ranks))
    _report_end(settings, nodes, supervisor, verdict, shown)
    return verdict


def _num_ranks_next(settings: Settings, supervisor: Supervisor) -> int:
    """Return how many ranks a restart has here: a rank that a signal has killed is lost, if the user allows fewer."""
    num_ranks = len(supervisor.job.local_ranks)
    if settings.least_ranks is None:
        return num_ranks
    num_killed = sum(failure.status < 0 for failure in supervisor.failures)
    return max(settings.least_ranks, num_ranks - num_killed)


def _report_hang(store: Store, job: Job, interrupts: Interrupts, number: signal.Signals) -> None:
    """Before a job that hangs is ended by a signal, show who waits for whom; a further signal ends that."""
    from meshdist.debug.attach import REPORT_S, hang_of_interrupted  # most jobs do not hang

    address = endpoint(job.master_addr, job.master_port)
    within_s = REPORT_S if number == signal.SIGINT else _REPORT_AT_SIGTERM_S
    for line in hang_of_interrupted(store, address, interrupts.pending, within_s):
        report(line)


def _report_end(settings: Settings, nodes: Nodes, supervisor: Supervisor, verdict: Verdict, shown: int | None) -> None:
    """Report why the ranks have ended, unless that is shown already, and how."""
    cause = verdict.cause
    stop = nodes.stopped()
    if cause is None and verdict.problem:
        report(f"{nodes.describe(verdict.launcher)} {verdict.problem}")
    elif cause is None and stop is not None and stop.newcomers:
        report(f"new host{'s' if len(stop.newcomers) > 1 else ''}: {', '.join(stop.newcomers)}")
    elif cause is not None and verdict.launcher != nodes.launcher:
        report(f"first failure: {nodes.describe(verdict.launcher)}, {cause.headline()}")
    elif cause is not None and shown is None:
        _report_cause(settings, nodes, supervisor, cause)
        shown = cause.rank
    for line in _other_failures(supervisor.failures, shown):
        report(line)
    if supervisor.ended or supervisor.running:
        after = " after the first failure" if cause is not None else ""
        report(f"terminated {ranks_text(sorted(supervisor.ended))}{after}{_how_others_ended(supervisor)}")
    if cause is not None and nodes.launcher in verdict.leaving:
        report("no restart is left: the job goes on without this host")
    if settings.error_dir is not None:
        _write_error_files(settings, nodes, supervisor, verdict)


def _other_failures(failures: Sequence[Failure], shown: int | None) -> list[str]:
    """Return the failures of other ranks than `shown`, whose report has been printed.

    The same failure is told once, and so are those that follow from another rank's.
    """
    reason = next((_reason(failure) for failure in failures if failure.rank == shown), "")
    groups: list[list[Failure]] = []
    for failure in sorted(failures, key=lambda failure: failure.rank != shown):
        alike = (group for group in groups if _belong_together(failure, group[0], reason))
        group = next(alike, None) if failure.kind else None
        groups.append([failure]) if group is None else group.append(failure)
    lines = []
    for first, *others in groups:
        if first.rank != shown:
            lines.append(first.headline())
        if others:
            are_same = all(_is_same(other, first) for other in others)
            same = f"the same as rank {first.rank}" + ("" if are_same else ", or an error that follows from it")
            lines.append(f"{ranks_text(sorted(other.rank for other in others))}: {same}")
    return lines


def _belong_together(one: Failure, other: Failure, reason: str) -> bool:
    """Return whether two failures are told together: they are the same, or both follow from one for `reason`."""
    if not one.kind or not other.kind:
        return False
    for_reason = [bool(reason) and reason in failure.message for failure in (one, other)]
    if any(for_reason):
        return all(for_reason) or _is_same(one, other)
    return (one.secondary and other.secondary) or _is_same(one, other)


def _reason(failure: Failure) -> str:
    """Return the beginning of why a call failed, which errors of other ranks repeat; empty if it says too little."""
    _, _, reason = failure.message.strip().partition("\n")[0].partition(": ")
    return reason[:_TELLING] if len(reason) >= _TELLING else ""


_TELLING = 40


def _is_same(one: Failure, other: Failure) -> bool:
    # Who waits for whom, in further lines, has times that differ from rank to rank; these lines are not shown here.
    mine, theirs = (failure.message.strip().partition("\n")[0] for failure in (one, other))
    is_same_end = (one.status, one.kind) == (other.status, other.kind)
    return is_same_end and same_but_for_rank(mine, one.rank, theirs, other.rank)


def _write_error_files(settings: Settings, nodes: Nodes, supervisor: Supervisor, verdict: Verdict) -> None:
    """Write an error file for each rank that failed or was terminated, and print the path of the most telling one."""
    from meshdist.launch.error_files import ErrorFiles, endings_of, in_short

    endings, num_restarts = endings_of(supervisor, settings.routing), supervisor.job.num_restarts
    is_by_signal = verdict.cause is None and verdict.status >= INTERRUPT_BASE  # sent to a launcher: no rank has failed
    is_planned = verdict.cause is None and not verdict.problem
    if not endings or is_by_signal or is_planned or settings.error_dir is None:
        return
    files = ErrorFiles(settings.error_dir)
    try:
        files.write(supervisor.job, endings, verdict, nodes.node_of(verdict.launcher))
    except OSError as error:
        report(f"cannot write the ranks' error files: {error}")
        return
    ranks = [ending.rank for ending in endings]
    first = verdict.cause.rank if verdict.cause is not None else ranks[0]
    chosen = first if first in ranks else ranks[0]
    others = [rank for rank in ranks if rank != chosen]
    beside = f" ({ranks_text(sorted(others))}: same directory)" if others else ""
    whose = f"error file of rank {chosen}"
    if verdict.cause is None:  # the files of these ranks do not tell why the job ended
        whose = f"{ranks_text(ranks)} ended because {nodes.describe(verdict.launcher)} {in_short(verdict)}; how"
    report(f"{whose}: {files.path(chosen, num_restarts)}{beside}")


def _report_cause(settings: Settings, nodes: Nodes, supervisor: Supervisor, cause: Failure) -> None:
    job = supervisor.job
    where = f"{nodes.describe(nodes.launcher)}, " if nodes.num_nodes > 1 else ""
    log = ""
    if settings.routing.is_in_file(cause.rank - job.first_rank, STDERR):
        log = f"\nIts output is in {settings.routing.path(cause.rank, STDERR, job.num_restarts)}"
    report(f"first failure: {where}" + cause.report().rstrip("\n") + log)


def _how_others_ended(supervisor: Supervisor) -> str:
    killed = f"; {ranks_text(sorted(supervisor.killed))} had to be killed" if supervisor.killed else ""
    stuck = (
        f"; {ranks_text(sorted(supervisor.running))} cannot be killed (waiting in the kernel)"
        if supervisor.running
        else ""
    )
    return killed + stuck
