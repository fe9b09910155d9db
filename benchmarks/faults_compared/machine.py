"""Faults of processes and what is left of them."""

from __future__ import annotations

import os
import signal
import time

from faults_compared.fault import UNDER_WAY_S, Fault
from faults_compared.library import Library, ones
from faults_compared.witness import Witness


def all_killed(lib: Library, witness: Witness) -> None:
    """All ranks are killed at once."""
    lib.all_reduce(ones(1 << 20))
    time.sleep(UNDER_WAY_S)
    witness.fault()
    os.kill(os.getpid(), signal.SIGKILL)


def launcher_killed(lib: Library, witness: Witness) -> None:
    """The launcher is killed, and nobody tells the ranks."""
    lib.barrier()
    witness.note("")
    time.sleep(100)


def ignores_sigterm(lib: Library, witness: Witness) -> None:
    """A rank fails, and the other one does not end when it is asked to."""
    if lib.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lib.barrier()
        time.sleep(100)
    lib.barrier()
    witness.fault()
    raise ValueError("the data is damaged")


MACHINE = (
    Fault("all ranks are killed with -9", all_killed, asks="files"),
    Fault(
        "the launcher is killed with -9 (meshrun, torchrun, mpirun)",
        launcher_killed,
        launched=True,
        kills="launcher",
        asks="processes",
    ),
    Fault(
        "a rank fails, the other ignores SIGTERM, under the launcher",
        ignores_sigterm,
        launched=True,
        asks="processes",
        grace_s=45.0,
    ),
)
