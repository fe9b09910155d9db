"""Faults of peers: they die, end, stop, do not come, wait for each other."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import numpy as np

from faults_compared.fault import UNDER_WAY_S, Fault
from faults_compared.library import Library, ones
from faults_compared.witness import Witness

VICTIM = 1


def _befalls_one(lib: Library, witness: Witness) -> bool:
    """Return True on the rank that something is about to befall, once the others wait for it."""
    if lib.rank == VICTIM:
        time.sleep(UNDER_WAY_S)
        witness.fault()
        return True
    witness.attempt(lambda: lib.all_reduce(ones(4)))
    return False


def killed(lib: Library, witness: Witness) -> None:
    """One is killed while the others wait in a collective."""
    if _befalls_one(lib, witness):
        os.kill(os.getpid(), signal.SIGKILL)


def raises(lib: Library, witness: Witness) -> None:
    """One raises, and ends with a traceback."""
    if _befalls_one(lib, witness):
        raise ValueError("the data is damaged")


def raises_watched(lib: Library, witness: Witness) -> None:
    """The same, where something is there that notices."""
    raises(lib, witness)


def exits(lib: Library, witness: Witness) -> None:
    """One ends with status 0, a call too early."""
    if _befalls_one(lib, witness):
        sys.exit(0)


def stopped(lib: Library, witness: Witness) -> None:
    """One is stopped by a signal."""
    if _befalls_one(lib, witness):
        os.kill(os.getpid(), signal.SIGSTOP)


def computes(lib: Library, witness: Witness) -> None:
    """One is elsewhere."""
    if _befalls_one(lib, witness):
        time.sleep(60)


def circle(lib: Library, witness: Witness) -> None:
    """Two groups are used in different orders."""
    groups = [lib.group(), lib.group()]
    for group in groups:
        group.barrier()
    witness.fault()
    first, second = groups if lib.rank == 0 else groups[::-1]
    witness.attempt(lambda: (first.all_reduce(ones(4)), second.all_reduce(ones(4))))


def ctrl_c(lib: Library, witness: Witness) -> None:
    """Somebody presses Ctrl-C."""
    if lib.rank == VICTIM:
        time.sleep(UNDER_WAY_S)
        witness.fault()
        os.kill(witness.pid_of(0), signal.SIGINT)
    else:
        witness.attempt(lambda: lib.all_reduce(ones(4)))


def fork(lib: Library, witness: Witness) -> None:
    """A forked process uses what its parent has."""
    if lib.rank == 0 and os.fork() == 0:
        witness.fault()
        witness.attempt(lambda: lib.all_reduce(ones(4)), lambda: False)
        os._exit(0)


def ends_twice(lib: Library, witness: Witness) -> None:
    """The end comes twice."""
    lib.leave()
    witness.fault()
    witness.attempt(lib.leave)


def ends_amidst(lib: Library, witness: Witness) -> None:
    """A rank leaves, with a call on its way that nobody else makes."""
    if lib.rank == 0:
        begun = lib.begin(ones(4))
        witness.fault()
        witness.attempt(lambda: (lib.leave(), begun()))


def _held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _grown(before: tuple[int, int]) -> str:
    files, threads = _held()
    return f"{files - before[0]:+d} descriptors, {threads - before[1]:+d} threads"


def many_groups(lib: Library, witness: Witness) -> None:
    """Groups are made and kept, where 1,024 descriptors are allowed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    groups, before = [lib], _held()
    witness.fault()

    def make() -> None:
        for _ in range(500):
            groups.append(lib.group())
            groups[-1].all_reduce(ones(4))

    witness.attempt(make)
    if lib.rank == 0:
        witness.note(f"{len(groups) - 1} groups: {_grown(before)}")


def many_calls(lib: Library, witness: Witness) -> None:
    """Thousands of async calls are outstanding."""
    lib.begin(ones(4))()
    arrays, before = [ones(4) for _ in range(5000)], _held()
    witness.fault()

    def make() -> None:
        waits = [lib.begin(array) for array in arrays]
        if lib.rank == 0:
            witness.note(_grown(before))
        for wait in waits:
            wait()

    witness.attempt(make, lambda: bool(np.all(np.array(arrays) == lib.size)))


def another_thread(lib: Library, witness: Witness) -> None:
    """Somebody presses Ctrl-C, and the signal comes to another thread."""
    if lib.rank == VICTIM:
        time.sleep(UNDER_WAY_S)
        witness.fault()
        os.kill(int((witness.folder / "thread").read_text()), signal.SIGINT)
    else:
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        (witness.folder / "thread").write_text(str(thread.native_id))
        witness.attempt(lambda: lib.begin(ones(4))())


PEERS = (
    Fault("SIGKILL of a rank; the three others wait in a collective", killed, 4, (0, 2, 3)),
    Fault("a rank raises, and ends", raises, 4, (0, 2, 3)),
    Fault(
        "the same; with MPI under `python -m mpi4py`, which handles this",
        raises_watched,
        4,
        (0, 2, 3),
        senseless={"torch": "as above", "meshdist": "as above"},
        mpi_module="mpi4py",
    ),
    Fault("a rank ends with status 0, one call too early", exits, 4, (0, 2, 3)),
    Fault("a rank is stopped (SIGSTOP)", stopped, 3, (0, 2)),
    Fault("a rank computes and never makes the call", computes, 3, (0, 2)),
    Fault("two groups are used in different orders", circle),
    Fault("Ctrl-C in the wait for a collective", ctrl_c, 2, (0,)),
    Fault("Ctrl-C, received by another thread, in the wait for an async call", another_thread, 2, (0,)),
    Fault("fork after the start, a call in the child", fork, 2, (0,)),
    Fault("`destroy_process_group` called twice", ends_twice),
    Fault("`destroy_process_group` with an outstanding async call that no other rank makes", ends_amidst, 2, (0,)),
    Fault("500 groups, a call on each; 1,024 descriptors are allowed", many_groups, grace_s=60.0),
    Fault("5,000 outstanding async calls", many_calls, grace_s=60.0, has_answer=True),
)
