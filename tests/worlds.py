"""Worlds to test in: ranks that are threads, and ranks that are processes.

Tests hand over functions of modules, which run on every rank. Processes are forked by a nursery, a process that has
imported everything and done nothing, so a world of them costs some ten milliseconds. `Worlds` keeps the worlds of
the session; one that hung, crashed or failed is replaced. `WorkerSet` is one world of processes, to do anything to.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

import meshdist
from meshdist.launch.worker import die_with_parent

PRELOADED = ("numpy", "ml_dtypes", "pytest", "meshdist.functional", "meshdist.lifecycle", "meshdist.device_mesh")
PRELOADED += ("meshdist.debug.dump", "meshdist.backends.gloo.backend", "encodings.idna", "hmac")
PRELOADED += ("meshdist.bootstrap.join", "meshdist.bootstrap.launched", "meshdist.bootstrap.url")
PRELOADED += ("meshdist.debug.signals", "meshdist.debug.hang_watchdog", "meshdist.debug.instrumentation")
PRELOADED += ("meshdist.backends.mpi.shared_report",)
# How long a program may take, and how long the others may go on once one rank has failed.
PROGRAM_S = 60.0
FOLLOW_S = 1.0
CALL_TIMEOUT_S = 30.0

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
# The MPI backends have worker sets of their own: see mpi_worlds.py.
BACKENDS = ("threads", "gloo", "gloo-slots", "gloo-tcp", "gloo-hosts")
# In worlds of which sizes some run, to save time; the others run in all.
SIZES_OF = {"gloo-tcp": (3,), "gloo-hosts": (4,)}
MPI_BACKENDS = ("mpi-openmpi", "mpi-mpich")
VARIABLES = {
    "gloo": {},
    "gloo-slots": {"MESHDIST_SINGLE_COPY": "0"},
    "gloo-tcp": {"MESHDIST_DISABLE_SHM": "1"},
    # Ranks of even number share memory, and those of odd number.
    "gloo-hosts": {"TEST_HOSTS": "2"},
    "gloo-hosts-slots": {"TEST_HOSTS": "2", "MESHDIST_SINGLE_COPY": "0"},
}


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback. Or it ended, or did not answer."""


class Worlds:
    """The worlds of the session, made when they are first asked for."""

    def __init__(self) -> None:
        self._nursery: Nursery | None = None
        self._worker_sets: dict[tuple[str, int], WorkerSet] = {}

    @property
    def nursery(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery()
        return self._nursery

    def world(self, backend: str, size: int) -> World:
        """Return a world of `size` ranks."""
        return World(self, backend, size)

    def workers(self, backend: str, size: int) -> WorkerSet:
        """Return the processes that are kept for these worlds."""
        workers = self._worker_sets.get((backend, size))
        if workers is None:
            workers = self._new_workers(backend, size)
            self._worker_sets[backend, size] = workers
            workers.join()
        return workers

    def _new_workers(self, backend: str, size: int) -> WorkerSet:
        if backend not in MPI_BACKENDS:
            return WorkerSet(self.nursery, size, VARIABLES[backend])
        from mpi_worlds import MpiWorkerSet

        return MpiWorkerSet(backend.removeprefix("mpi-"), size)

    def drop(self, backend: str, size: int) -> None:
        """End the processes, if there are any; the next who asks gets new ones."""
        workers = self._worker_sets.pop((backend, size), None)
        if workers is not None:
            workers.close()

    def close(self) -> None:
        for workers in self._worker_sets.values():
            workers.close()
        if self._nursery is not None:
            self._nursery.close()


class World:
    """Ranks with an initialised default group."""

    def __init__(self, worlds: Worlds, backend: str, size: int) -> None:
        self.backend = backend
        self.size = size
        self._worlds = worlds

    def __repr__(self) -> str:
        return f"{self.size} ranks, backend {self.backend}"

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `program` on all ranks, and a barrier: the default group must stay usable. Return what each returned."""
        if self.backend == "threads":
            return meshdist.run(_with_barrier, self.size, (program, args), timeout=CALL_TIMEOUT_S)
        try:
            workers = self._worlds.workers(self.backend, self.size)
            workers.start(_with_barrier, program, args)
            return workers.gather()
        except BaseException:
            self._worlds.drop(self.backend, self.size)
            raise


def _with_barrier(program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = program(*args)
    meshdist.barrier()
    return result


class WorkerSet:
    """Processes that can make up a world; they end with `close`, or with the process that made them.

    Args:
        nursery: Forks them.
        size: How many.
        variables: Added to their environment.
        timeout_s: The timeout of the world that `join` makes.
    """

    def __init__(
        self,
        nursery: Nursery,
        size: int,
        variables: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._store = meshdist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [Rank(nursery, {**(variables or {}), "TEST_RANK": str(rank)}) for rank in range(size)]

    def __enter__(self) -> WorkerSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    @property
    def address(self) -> str:
        """Where the store is, as host:port."""
        return f"127.0.0.1:{self._store.port}"

    def join(self) -> None:
        """Initialise the default group on all ranks."""
        self.start(_join, self._store.port, self.size, self._timeout_s)
        self.gather()

    def start(self, program: Callable[..., Any], *args: Any, ranks: range | list[int] | None = None) -> None:
        """Have the ranks run `program`; come back at once."""
        for rank in range(self.size) if ranks is None else ranks:
            self._ranks[rank].ask(program, args)

    def reported(self, rank: int, timeout_s: float = PROGRAM_S) -> Any:
        """Return the next value that `rank` reports while it runs its program."""
        kind, value, text = self._ranks[rank].answer(timeout_s)
        if kind != "reported":
            raise RankFailedError(f"rank {rank} was to report something, but {kind} {value!r}\n{text}")
        return value

    def outcome(self, rank: int, timeout_s: float = PROGRAM_S) -> Any:
        """Return what the program returned on `rank`, or the exception that it raised."""
        kind, value, text = self._ranks[rank].answer(timeout_s)
        if kind not in ("returned", "raised"):
            raise RankFailedError(f"rank {rank} {kind} {value!r} {text}")
        return value

    def first_outcome(self, ranks: list[int], timeout_s: float = PROGRAM_S) -> tuple[int, Any]:
        """Return the first of these ranks whose program ends, and its outcome."""
        connections = {self._ranks[rank].connection: rank for rank in ranks}
        ready = wait(list(connections), timeout_s)
        if not ready:
            raise RankFailedError(f"none of the ranks {ranks} answered within {timeout_s:g} s")
        rank = connections[ready[0]]  # type: ignore[index]
        return rank, self.outcome(rank)

    def gather(self, timeout_s: float = PROGRAM_S) -> list[Any]:
        """Return what the program returned on each rank.

        Raises:
            Exception: What the first rank raised that failed by itself.
            RankFailedError: A rank ended, or did not answer in time.
        """
        answers: dict[int, tuple[str, Any, str]] = {}
        end = time.monotonic() + timeout_s
        while len(answers) < self.size:
            silent = {self._ranks[rank].connection: rank for rank in range(self.size) if rank not in answers}
            ready = wait(list(silent), max(0.0, end - time.monotonic()))
            for connection in ready:
                rank = silent[connection]  # type: ignore[index]
                answers[rank] = self._ranks[rank].answer(0.0)
                if answers[rank][0] != "returned":
                    end = min(end, time.monotonic() + FOLLOW_S)
            if not ready:
                if all(kind == "returned" for kind, _, _ in answers.values()):
                    self._show_stacks(list(silent.values()))
                answers.update((rank, ("did not answer", None, "")) for rank in silent.values())
        failed = [(rank, *answers[rank]) for rank in range(self.size) if answers[rank][0] != "returned"]
        if failed:
            _raise_first(failed, self.size)
        return [answers[rank][1] for rank in range(self.size)]

    def signal(self, rank: int, signum: int) -> float:
        """Send a signal to one rank; return when, as `time.monotonic()`, which all processes share."""
        now = time.monotonic()
        self._ranks[rank].signal(signum)
        return now

    def until_asleep(self, rank: int, timeout_s: float = PROGRAM_S) -> None:
        """Wait until the rank sleeps in the kernel; after it reported something, that is where it waits for others."""
        end = time.monotonic() + timeout_s
        while True:
            with open(f"/proc/{self._ranks[rank].pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "S":
                    return
            if time.monotonic() > end:
                raise RankFailedError(f"rank {rank} does not sleep within {timeout_s:g} s")
            select.select([], [], [], 0.001)

    def ended(self, rank: int, timeout_s: float = PROGRAM_S) -> bool:
        """Return True once the process of `rank` has ended, False at the timeout."""
        return self._ranks[rank].ended(timeout_s)

    def close(self) -> None:
        """Kill what is left."""
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.ended(PROGRAM_S)
            rank.close()
        self._store.close()

    def _show_stacks(self, ranks: list[int]) -> None:
        # Into the captured stderr of the test: where they hang.
        for rank in ranks:
            self._ranks[rank].signal(signal.SIGUSR1)
            select.select([], [], [], 0.1)  # one after the other; nothing depends on it


def _raise_first(failed: list[tuple[int, str, Any, str]], size: int) -> None:
    def follows(answer: tuple[int, str, Any, str]) -> bool:
        return answer[1] == "did not answer" or getattr(answer[2], "peer_failed", False)

    rank, kind, error, text = min(failed, key=follows)
    also = ", ".join(f"rank {other} {how}" for other, how, _, _ in failed if other != rank)
    cause = RankFailedError(f"on rank {rank} of {size}{f' ({also})' if also else ''}:\n{text}")
    if isinstance(error, BaseException):
        raise error from cause
    raise RankFailedError(f"rank {rank} of {size} {kind}{f' ({also})' if also else ''}")


class Rank:
    """One process, seen from outside."""

    def __init__(self, nursery: Nursery, variables: Mapping[str, str]) -> None:
        ours, its = socket.socketpair()
        nursery.fork(its, variables)
        its.close()
        self.connection = Connection(ours.detach())
        self.pid: int = self.answer(PROGRAM_S)[1]
        self._pidfd: int | None = os.pidfd_open(self.pid)

    def ask(self, program: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.connection.send_bytes(pickle.dumps((program, args)))

    def answer(self, timeout_s: float) -> tuple[str, Any, str]:
        if not self.connection.poll(timeout_s):
            return "did not answer", None, f"within {timeout_s:g} s"
        try:
            answer: tuple[str, Any, str] = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return "ended", None, ""
        return answer

    def signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            assert self._pidfd is not None
            signal.pidfd_send_signal(self._pidfd, signum)

    def ended(self, timeout_s: float) -> bool:
        return bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def close(self) -> None:
        self.connection.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


# ---- In the processes


class Nursery:
    """The process that forks ranks, seen from outside.

    Args:
        preloaded: Modules that it imports, where they are installed, so that no rank needs to.
    """

    def __init__(self, preloaded: Sequence[str] = PRELOADED) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import worlds; worlds.nursery()"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MESHDIST_") or k == "MESHDIST_SECRET"}
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(sys.path), str(its.fileno()), str(os.getpid()), *preloaded],
                pass_fds=[its.fileno()],
                # A thread of a library would not survive the fork.
                env={**kept, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._socket = ours

    def fork(self, connection: socket.socket, variables: Mapping[str, str]) -> None:
        """Have a rank forked that is asked through `connection`."""
        socket.send_fds(self._socket, [json.dumps(dict(variables)).encode()], [connection.fileno()])

    def close(self) -> None:
        self._socket.close()
        self._process.wait(PROGRAM_S)


def nursery() -> None:
    """Fork a rank for every message, until there are no more."""
    control, parent_pid = int(sys.argv[2]), int(sys.argv[3])
    die_with_parent(parent_pid)
    for name in sys.argv[4:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    gc.freeze()  # ranks that looked through what was imported would copy all of its pages
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks; they are watched by pidfd
    pid = os.getpid()
    with socket.socket(fileno=control) as messages:
        while True:
            text, fds, _, _ = socket.recv_fds(messages, 1 << 16, 1)
            if not text:
                return
            if os.fork() == 0:
                messages.close()
                die_with_parent(pid)
                _be_a_rank(Connection(fds[0]), json.loads(text))
            os.close(fds[0])


_connection: list[Connection] = []


def report(value: Any) -> None:
    """On a rank: report something to the test while the program runs."""
    _connection[0].send_bytes(pickle.dumps(("reported", value, "")))


def worker_rank() -> int:
    """On a rank: return its number in the worker set, also where there is no world yet."""
    return int(os.environ["TEST_RANK"])


def _be_a_rank(connection: Connection, variables: Mapping[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update(variables)
    status = 1
    try:
        serve(connection, os.getpid())
        status = 0
    finally:
        os._exit(status)


def serve(connection: Connection, introduction: Any) -> None:
    """On a rank: say who this is, and run the programs that the tests ask for."""
    if not _connection:
        _connection.append(connection)
    with contextlib.suppress(ConnectionError):
        report(introduction)
        for program, args in _requests(connection):
            connection.send_bytes(_answer(program, args))


def _requests(connection: Connection) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.loads(connection.recv_bytes())


def _answer(program: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(("returned", program(*args), ""))
    except BaseException as error:  # handed to the test
        text = traceback.format_exc()
        try:
            answer = pickle.dumps(("raised", error, text))
            pickle.loads(answer)
        except Exception:  # an exception that does not travel: its traceback does
            answer = pickle.dumps(("raised", RankFailedError(text), text))
        return answer


def _join(port: int, size: int, timeout_s: float) -> None:
    if "TEST_HOSTS" in os.environ:
        os.environ["MESHDIST_HOST_ID"] = f"host {worker_rank() % int(os.environ['TEST_HOSTS'])}"
    store = meshdist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout_s)
    meshdist.init_process_group("gloo", store=store, rank=worker_rank(), world_size=size, timeout=timeout_s)
