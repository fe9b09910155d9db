"""Faults of the start: ranks that do not come, or are not who they should be; addresses that are not what they seem."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from faults_compared.fault import TIMEOUT_S, UNDER_WAY_S, Fault
from faults_compared.library import Library
from faults_compared.witness import Witness

_BY_MPIRUN = {"openmpi": "not applicable: mpirun starts and numbers the ranks"}


def _join(lib: Library, witness: Witness, size: int = 2, rank: int | None = None, url: str | None = None) -> None:
    witness.fault()
    number = witness.rank if rank is None else rank
    witness.attempt(lambda: lib.join(number, size, TIMEOUT_S, url or witness.url))


def one_missing(lib: Library, witness: Witness) -> None:
    """Rank 2 does not come."""
    if witness.rank != 2:
        _join(lib, witness, 3)


def nobody_home(lib: Library, witness: Witness) -> None:
    """There is no store."""
    if witness.rank == 1:
        _join(lib, witness)


def silent_listener(lib: Library, witness: Witness) -> None:
    """The port is that of something else, which says nothing."""
    host, _, port = witness.url.removeprefix("tcp://").rpartition(":")
    if witness.rank == 0:
        # It is taken by this process, and rank 0 of the job cannot be anywhere else.
        listener = socket.create_server((host, int(port)))
        (witness.folder / "listens").touch()
        witness.note("")
        time.sleep(60)
        listener.close()
    while not (witness.folder / "listens").exists():
        time.sleep(0.01)
    _join(lib, witness)


def missing_folder(lib: Library, witness: Witness) -> None:
    """The file that the ranks are to meet in has no directory."""
    _join(lib, witness, url=f"file://{witness.folder}/nowhere/meet")


def stale_file(lib: Library, witness: Witness) -> None:
    """A run that was killed has left its file, and the next one uses it."""
    url = f"file://{witness.folder}/meet"
    if os.fork() == 0:
        lib.join(witness.rank, 2, TIMEOUT_S, url)
        (witness.folder / f"was there {witness.rank}").touch()
        time.sleep(60)
    while len(list(witness.folder.glob("was there *"))) < 2:
        time.sleep(0.01)
    # Both of the first run end before one of the second begins.
    time.sleep(UNDER_WAY_S)
    for child in _children():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    (witness.folder / f"is over {witness.rank}").touch()
    while len(list(witness.folder.glob("is over *"))) < 2:
        time.sleep(0.01)
    _join(lib, witness, url=url)


def _children() -> list[int]:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return list(map(int, text.split()))


def other_size(lib: Library, witness: Witness) -> None:
    """One says that there are three."""
    _join(lib, witness, 2 + witness.rank)


def same_rank(lib: Library, witness: Witness) -> None:
    """Two of three say that they are rank 1."""
    _join(lib, witness, 3, min(witness.rank, 1))


def rank_too_large(lib: Library, witness: Witness) -> None:
    """A rank of a world of two says that it is number 5."""
    _join(lib, witness, 2, 5 * witness.rank)


def two_jobs(lib: Library, witness: Witness) -> None:
    """Two jobs of two ranks use one port; ranks 2 and 3 are those of the second."""
    if witness.rank >= 2:
        time.sleep(UNDER_WAY_S)
        os.environ["MESHDIST_SECRET"] = "that of the other job"
    _join(lib, witness, 2, witness.rank % 2)


START = (
    Fault("a rank never arrives", one_missing, 3, (0, 1), joins=False, senseless=_BY_MPIRUN),
    Fault("no process listens at the address", nobody_home, 2, (1,), joins=False, senseless=_BY_MPIRUN),
    Fault(
        "the port belongs to an unrelated server that never answers",
        silent_listener,
        2,
        (1,),
        joins=False,
        senseless=_BY_MPIRUN,
    ),
    Fault("two jobs use one port", two_jobs, 4, (2, 3), joins=False, senseless=_BY_MPIRUN),
    Fault("a file left behind by a killed run", stale_file, joins=False, senseless=_BY_MPIRUN),
    Fault("a file in a directory that does not exist", missing_folder, joins=False, senseless=_BY_MPIRUN),
    Fault("one rank passes a different world size", other_size, joins=False, senseless=_BY_MPIRUN),
    Fault("two processes with the same rank", same_rank, 3, joins=False, senseless=_BY_MPIRUN),
    Fault("a rank that exceeds the world size", rank_too_large, joins=False, senseless=_BY_MPIRUN),
)
