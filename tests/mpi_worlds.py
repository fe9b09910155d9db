"""Worlds of MPI ranks: each MPI library in an environment of its own, and worker sets that its mpirun starts."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import worlds
from environments import install_step, made_once

import meshdist
from meshdist.launch.mpirun import mpirun_command
from meshdist.launch.worker import die_with_parent

LIBRARIES = ("openmpi", "mpich")
VARIABLE = "MESHDIST_MPI_WORLDS"
START_S, END_S = 60.0, 5.0
ROOT = Path(__file__).resolve().parents[1]


def _chosen() -> list[tuple[str, int]]:
    text = os.environ.get(VARIABLE, "openmpi:3,mpich:2")
    if text == "all":
        return [(f"mpi-{library}", size) for library in LIBRARIES for size in (1, 2, 3, 4)]
    pairs = [pair.split(":") for pair in text.split(",") if pair]
    return [(f"mpi-{library}", int(size)) for library, size in pairs]


# The worlds that the conformance suite runs on: each library and the sizes 2 and 3 once, for the sake of time.
WORLDS = _chosen()
RUNS_ALL = os.environ.get(VARIABLE) == "all"


@functools.cache
def environment(library: str) -> Path:
    """Return the Python of an environment with mpi4py and one MPI library; it is made once and kept.

    Everything else the ranks import from where the tests do.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(os.environ.get("MESHDIST_MPI_ENVIRONMENTS") or ROOT / ".pytest_cache" / "mpi")
    folder = base / f"{library}-{version}"
    python = folder / "bin" / "python"
    with made_once(folder) as is_new:
        if is_new:
            step = functools.partial(install_step, f"mpi4py and {library}")
            step(sys.executable, "-m", "venv", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(python))
            step(*pip, "install", "-q", "mpi4py>=4.0", library)
            step(str(python), "-c", "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI")
        # All else comes from here, and behind what the environment has itself.
        paths = next(folder.glob("lib/python*/site-packages")) / "tests.pth"
        text = "".join(f"{path}\n" for path in sys.path if path.endswith("-packages"))
        if not paths.exists() or paths.read_text() != text:  # others may be starting there
            paths.write_text(text)
    return python


def variables() -> dict[str, str]:
    """Return the environment of what mpirun starts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MESHDIST_", "OMPI_", "PMI"))}
    ours = {
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_btl_sm_backing_directory": _segments().name,
        "PRTE_MCA_prte_tmpdir_base": _sessions().name,
    }
    return {**kept, **ours}


@functools.cache
def _segments() -> tempfile.TemporaryDirectory[str]:
    """Return where Open MPI puts shared memory: that of killed ranks stays there, and goes with the session."""
    return tempfile.TemporaryDirectory(prefix="mpi-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)


@functools.cache
def _sessions() -> tempfile.TemporaryDirectory[str]:
    """Return where Open MPI has its session directories: an mpirun that ends removes the one above that of the next."""
    return tempfile.TemporaryDirectory(prefix="mpi-")


class MpiWorkerSet(worlds.WorkerSet):
    """The ranks of an MPI job; mpirun starts them, and they end with `close` or with the process that made them."""

    def __init__(self, library: str, size: int, timeout_s: float = worlds.CALL_TIMEOUT_S) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._ranks: list[worlds.Rank] = []
        python = environment(library)
        code = "import json, sys; sys.path += json.loads(sys.argv[1]); import mpi_worlds; mpi_worlds.be_a_rank()"
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "workers")
        pid = os.getpid()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(START_S)
            self._mpirun = subprocess.Popen(
                [*mpirun_command(str(python), size), str(python), "-c", code, json.dumps(sys.path), address],
                env=variables(),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(pid),
            )
            self._store = meshdist.HashStore()  # WorkerSet closes one; those ranks need none
            arrived: dict[int, MpiRank] = {}
            for _ in range(size):
                rank = MpiRank(Connection(listener.accept()[0].detach()))
                arrived[rank.number] = rank
        self._ranks = [arrived[number] for number in range(size)]

    def join(self) -> None:
        self.start(_join, self._timeout_s)
        self.gather()

    def close(self) -> None:
        for rank in self._ranks:
            rank.connection.close()  # so they end by themselves, unless they hang
        end = time.monotonic() + END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(max(0.0, end - time.monotonic()))
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        if self._mpirun.poll() is None:
            self._mpirun.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._mpirun.wait(END_S)
        if self._mpirun.poll() is None:
            self._mpirun.kill()
            self._mpirun.wait()
        for rank in self._ranks:
            rank.close()
        self._store.close()
        self._folder.cleanup()


class MpiRank(worlds.Rank):
    """One rank of an MPI job, seen from outside."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid, self.number = self.answer(START_S)[1]
        self._pidfd = os.pidfd_open(self.pid)


# ---- In the ranks


def _join(timeout_s: float) -> None:
    meshdist.init_process_group("mpi", timeout=timeout_s)


def be_a_rank() -> None:
    """Do what the tests ask for, until they ask no more."""
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    os.environ["TEST_RANK"] = str(number)
    faulthandler.register(signal.SIGUSR1)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[2])
    connection = Connection(sock.detach())
    worlds.serve(connection, (os.getpid(), number))
    if meshdist.is_initialized():
        meshdist.destroy_process_group()
