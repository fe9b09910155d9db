"""spawn: start the ranks of a job from Python; each is a process that runs one function."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from meshdist.bootstrap.spawned import spawn_variables
from meshdist.debug.user_traceback import ending_at_the_call
from meshdist.launch import worker
from meshdist.launch.interrupts import without_ctrl_c
from meshdist.launch.rank_functions import check_arguments
from meshdist.launch.spawn_context import (
    UNGUARDED_STATUS,
    ProcessException,
    ProcessExitedException,
    ProcessRaisedException,
    SpawnContext,
)
from meshdist.launch.worker_env import LOOPBACK, job_secret, new_job, worker_environment
from meshdist.security.credentials import secret_from_environment
from meshdist.system.platform import check_num_processes, check_processes

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

__all__ = ["ProcessException", "ProcessExitedException", "ProcessRaisedException", "SpawnContext", "spawn"]


@ending_at_the_call
def spawn(
    fn: Callable[..., object],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | None:
    """Run `fn(rank, *args)` in `nprocs` processes on this host.

    Each process has the environment that meshrun sets, so that `init_process_group()` needs no arguments; a rank, world
    size or init_method that `fn` passes takes precedence. If a rank fails, the others are terminated, normally within a
    second (one that ignores SIGTERM is killed after 10 s). No rank outlives this process.

    Several calls, also on several hosts, can start the ranks of one world: `fn` passes its rank and a world size larger
    than `nprocs`, and the callers have set MASTER_ADDR and MASTER_PORT, where the world's rank 0 hosts the store, and
    the same MESHDIST_SECRET.

    Args:
        fn: The function that each rank runs; with the start methods "spawn" and "forkserver" it must be importable by
            name.
        args: Its arguments after the rank.
        nprocs: The number of ranks.
        join: Wait for the ranks to end.
        daemon: Make the processes daemonic: ended when this process exits, and without children of their own.
        start_method: "spawn", "fork" or "forkserver", as in `multiprocessing`.

    Returns:
        None, or with `join=False` the SpawnContext to join.

    Raises:
        ProcessRaisedException: A rank raised. It is the first failure that does not follow from another rank's.
        ProcessExitedException: A rank exited with a nonzero status, or was killed.
        TypeError: `fn` is not callable, or cannot be called with a rank and `args`, `args` is not a tuple or list,
            `nprocs` is not an integer, or `fn` or `args` cannot be pickled.
        ValueError: `nprocs` is not positive, or more than this host has memory for, or `start_method` is unknown.
        DistError: This system cannot start processes.
    """
    import multiprocessing

    __tracebackhide__ = True
    if not callable(fn):
        raise TypeError(f"spawn: fn must be callable, got {type(fn).__name__}")
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        raise TypeError(f"spawn: args must be a tuple, such as ({args!r},), got {type(args).__name__}")
    if not isinstance(nprocs, int) or isinstance(nprocs, bool):
        raise TypeError(f"spawn: nprocs must be an integer, got {type(nprocs).__name__}")
    if nprocs < 1:
        raise ValueError(f"spawn: nprocs must be at least 1, got {nprocs}")
    check_num_processes(nprocs, "spawn: ")
    known = multiprocessing.get_all_start_methods()
    if start_method not in known:
        raise ValueError(f"spawn: start_method must be one of {', '.join(known)}, got {start_method!r}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.exit(UNGUARDED_STATUS)  # a rank that imports the script which is starting it
    check_processes("spawn")
    args = tuple(args)
    check_arguments("spawn", fn, args, (0, *args), args, "; spawn, unlike run, passes the rank as the first argument")
    with contextlib.ExitStack() as deferral:
        signals = deferral.enter_context(_ctrl_c_deferred())
        context = _start_all(_Call(fn, args), nprocs, daemon, start_method)
        # At no point in between would a Ctrl-C leave the ranks running.
        with context.passing_on_ctrl_c():
            deferral.close()
            if signals:
                signal.raise_signal(signal.SIGINT)
            if join:
                context.join()
    return None if join else context


@contextlib.contextmanager
def _ctrl_c_deferred() -> Iterator[list[int]]:
    """Yield a list that records Ctrl-C instead of raising: an exception inside of fork() would be lost."""
    signals: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield signals
        return
    signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        yield signals
    finally:
        signal.signal(signal.SIGINT, handler)


def _start_all(call: _Call, num_ranks: int, daemon: bool, start_method: str) -> SpawnContext:
    from meshdist.launch.supervisor import Supervisor
    from meshdist.launch.worker_set import Member
    from meshdist.store import TCPStore

    secret = job_secret()
    variables = spawn_variables(num_ranks, "" if secret_from_environment() else secret, os.environ)
    with contextlib.ExitStack() as on_failure:
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, secret=secret.encode())
        on_failure.callback(store.close)
        job = new_job(num_ranks, secret, LOOPBACK, store.port)
        supervisor = Supervisor(job)
        on_failure.callback(supervisor.close)
        processes = []
        for rank in range(num_ranks):
            environment = {**worker_environment(job, rank), **variables}
            process = _start(call, rank, environment, daemon, start_method, supervisor.reaper.fileno())
            assert process.pid is not None
            sentinel = process.sentinel if start_method == "forkserver" else None  # not a child of this process
            supervisor.add(Member(rank, process.pid, partial(getattr, process, "exitcode"), sentinel))
            processes.append(process)
        on_failure.pop_all()
    return SpawnContext(processes, supervisor, store)


def _start(
    call: _Call, rank: int, environment: dict[str, str], daemon: bool, start_method: str, reaper_fd: int
) -> BaseProcess:
    import multiprocessing

    # The kernel watches the thread that starts a process; only the main thread lives as long as this process.
    is_watched = start_method != "forkserver" and threading.current_thread() is threading.main_thread()
    parent_pid = os.getpid() if is_watched else None
    inherited_fd = reaper_fd if start_method == "fork" else None
    context: Any = multiprocessing.get_context(start_method)
    process: BaseProcess = context.Process(
        target=_run_rank, args=(rank, call, environment, parent_pid, inherited_fd), daemon=daemon
    )
    with _started_quietly(environment, start_method):
        process.start()
    return process


@contextlib.contextmanager
def _started_quietly(environment: dict[str, str], start_method: str) -> Iterator[None]:
    """Block Ctrl-C in the new process until it runs our code, and set variables that must be set before that."""
    if start_method == "forkserver":
        yield  # the process inherits from the fork server, neither signals nor variables from here
        return
    from multiprocessing import resource_tracker

    if start_method == "spawn":
        resource_tracker.ensure_running()  # its start would unblock the signal below
    # NumPy's libraries read this when they are loaded, before any code of ours runs.
    early = {"OMP_NUM_THREADS"} & environment.keys() if start_method == "spawn" else set()
    try:
        os.environ.update({name: environment[name] for name in early})
        with without_ctrl_c():
            yield
    finally:
        for name in early:
            del os.environ[name]


def _run_rank(
    rank: int, call: _Call, environment: dict[str, str], parent_pid: int | None, reaper_fd: int | None
) -> None:
    if reaper_fd is not None:
        os.close(reaper_fd)
    if sys.platform != "win32":
        os.setsid()
    if parent_pid is not None:
        worker.die_with_parent(parent_pid)
    os.environ.update(environment)
    worker.write_whole_lines()
    if callable(signal.getsignal(signal.SIGINT)):  # a fork has the parent's handler, which defers
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker.guarded(lambda: call(rank))


class _Call:
    """A function and its arguments, unpickled only where the worker reports exceptions."""

    def __init__(self, fn: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._fn = fn
        self._args = args

    def __call__(self, rank: int) -> None:
        self._fn(rank, *self._args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[bytes]]:
        return _PickledCall, (_pickled(self._fn, self._args),)


def _pickled(fn: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    name = f"fn, {getattr(fn, '__qualname__', type(fn).__name__)},"
    try:
        ForkingPickler.dumps(fn)
        name = "args"
        return bytes(ForkingPickler.dumps((fn, args)))
    except Exception as error:  # whatever an object's own code raises
        raise TypeError(
            f"spawn: {name} cannot be pickled for the new processes: {error}; pass data, and a function that is defined"
            " at the top level of a module, or start_method='fork'"
        ) from error


class _PickledCall:
    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __call__(self, rank: int) -> None:
        import pickle

        fn, args = pickle.loads(self._pickled)
        fn(rank, *args)
