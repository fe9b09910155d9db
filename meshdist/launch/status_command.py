"""`meshrun status`: list the ranks of running jobs, where they are and what they do."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from meshdist.debug.attach import NONE_HERE, JobHere, jobs_here
from meshdist.errors import DistError
from meshdist.launch.job_status import JobStatus, status_of
from meshdist.launch.launchers_store import arrived, has_left, ranks_secret
from meshdist.launch.node_numbering import NodeCard, Plan
from meshdist.launch.options import as_argument, seconds
from meshdist.security.credentials import SECRET_FILE_VARIABLE, SECRET_VARIABLE, secret_from_environment
from meshdist.security.handshake import OtherJobError
from meshdist.store import Store, TCPStore
from meshdist.system.option_parser import OptionParser
from meshdist.system.plurals import counted
from meshdist.system.terminal import fold, terminal_width

_CONNECT_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    parser = OptionParser(
        prog="meshrun status",
        description="List the ranks of a running job: where they are, what they are doing, and for how long.",
        epilog="Other users' jobs, and jobs of which no rank is on this host, need the job's secret in MESHDIST_SECRET "
        "or MESHDIST_SECRET_FILE. A script of the name `status` is run by `meshrun ./status`.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="where its launchers meet (--rdzv-endpoint), its name (--rdzv-id, or as shown here), or the address of "
        "the ranks' store; default: all of your jobs on this host",
    )
    parser.add_argument("--watch", action="store_true", help="refresh the table until Ctrl-C or the end of the job")
    parser.add_argument(
        "--interval",
        type=as_argument(seconds),
        default=2.0,
        metavar="SECONDS",
        help="seconds between refreshes (default: %(default)g)",
    )
    given = parser.parse_args(arguments)
    try:
        return _watch(given.job, given.interval) if given.watch else _show(given.job)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise  # whoever read the output has gone: `until_closed` ends quietly
    except (DistError, ValueError, OSError) as error:
        print(f"meshrun status: {error}", file=sys.stderr)
        return 1


def _show(job: str | None) -> int:
    blocks = text_of(job, terminal_width())
    print("\n\n".join(blocks) if blocks else NONE_HERE)
    return 0


def _watch(job: str | None, interval_s: float) -> int:
    """Show the state again and again: in place on a terminal, one below the other elsewhere."""
    begin, end = (_CLEAR, "") if sys.stdout.isatty() else ("", "\n")
    blocks = text_of(job, terminal_width())
    while blocks:
        print(begin + "\n\n".join(blocks) + end, flush=True)
        threading.Event().wait(interval_s)
        try:
            blocks = text_of(job, terminal_width())
        except DistError:
            break  # it was there before: it has ended
    print(NONE_HERE if job is None else f"{job} has ended")
    return 0


def text_of(job: str | None, width: int = 0) -> list[str]:
    """Return a job as text, or all jobs of this user on this host if `job` is None.

    Lines that are wider than `width` characters are folded; 0 folds none.

    Raises:
        DistError: There is no such job, or it has a different secret.
    """
    jobs = jobs_here()
    if job is None:
        return ["\n".join(status.lines(width)) for each in jobs if (status := _status_here(each)) is not None]
    named = [each for each in jobs if job in (each.address, each.run_id)]
    for each in named or jobs:
        status = _status_here(each)
        if status is not None and job in status.names():
            return ["\n".join(status.lines(width))]
    host, _, port = job.rpartition(":")
    if host and port.isdecimal():
        return ["\n".join(_lines_at(job, host.strip("[]"), int(port), width))]
    known = ", ".join(each.run_id or each.address for each in jobs)
    raise DistError(
        f"there is no job {job!r}; your jobs on this host are {known}; pass HOST:PORT for a job elsewhere"
        if known
        else f"there is no job {job!r}: {NONE_HERE}; pass HOST:PORT for a job elsewhere"
    )


def _status_here(job: JobHere) -> JobStatus | None:
    """Return the state of a job with ranks on this host; None if it has ended, or no rank has been at its store."""
    host, _, port = job.address.rpartition(":")
    if not job.has_store():
        return None
    with (
        _environment(job.access),
        suppress(DistError),
        TCPStore(host.strip("[]"), int(port), wait_for_workers=False, timeout=_CONNECT_S) as store,
    ):
        return status_of(store, job.address)
    return None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the environment, which give access to a job."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _lines_at(address: str, host: str, port: int, width: int) -> list[str]:
    """Return the job whose launchers meet at an address, or whose ranks have their store there."""
    try:
        store = TCPStore(host, port, wait_for_workers=False, timeout=_CONNECT_S)
    except OtherJobError:
        raise DistError(
            f"the store at {address} requires the job's secret: set {SECRET_VARIABLE} or {SECRET_FILE_VARIABLE} as its "
            "launchers have it, or ask as the user who started it, on a host with a rank"
        ) from None
    with store:
        if not store.check(["num_launchers"]):
            return status_of(store, address).lines(width)
        started, waiting = _last_start(store), _hosts_there(store)
        if started is None:
            verb = "is" if len(waiting) == 1 else "are"
            there = f"there {verb} {counted(len(waiting), 'host')}: {', '.join(waiting)}"
            return [fold(f"job at {address}: waiting for hosts; {there}", width)]
        start, plan, ranks_port = started
        secret = ranks_secret(secret_from_environment(), plan.nonce, start)
        with TCPStore(host, ranks_port, wait_for_workers=False, timeout=_CONNECT_S, secret=secret.encode()) as ranks:
            return status_of(ranks, address).lines(width)


def _last_start(store: Store) -> tuple[int, Plan, int] | None:
    """Return the latest start of the ranks, its plan, and the port of its store, from the launchers' store."""
    starts = [int(key.partition("/")[2]) for key in store.list_keys() if key.startswith("port/")]
    if not starts:
        return None
    start = max(starts)
    port, problem = json.loads(store.get(f"port/{start}"))
    return None if problem else (start, Plan.decode(store.get(f"plan/{start}")), port)


def _hosts_there(store: Store) -> list[str]:
    """Return the hosts of the launchers that are there."""
    there = [number for number in arrived(store) if not has_left(store, number)]
    return [NodeCard.decode(store.get(f"card/{number}")).host for number in there]
