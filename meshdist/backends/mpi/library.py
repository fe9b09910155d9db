"""Session: the MPI library of this process, started once, and what the groups of this process share of it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshdist.backends.mpi.environment import NO_LIBRARY, has_cores_for_all
from meshdist.backends.mpi.launchers import warn_of_other_library
from meshdist.errors import DistBackendError
from meshdist.waiting import Doorbell, Waitable

# Nobody rings when a request is done. Who waits looks again after an eighth of the time that it has waited, so that
# what comes late is noticed little later, within these bounds.
_SHORTEST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
_SHARE_OF_WAIT = 8
# How often to look for what is nearly there, some ten microseconds, where the other ranks have processors of their own.
_SPINS = 100
LARGEST_COUNT = (1 << 31) - 1


class Session:
    """The MPI library, as all groups of this process use it.

    MPI cannot be started again once it has ended, so this lives as long as the process.

    Args:
        mpi: The module mpi4py.MPI, started.

    Attributes:
        mpi: That module.
        lock: Held for every call that does not block: a library may not stand two threads at once.
        may_block: Threads may wait inside of MPI, as it lets several threads in.
        largest_count: How many elements one call can carry; None where there is no limit.
        spins: How often to look before anything else is done.
    """

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.lock = threading.RLock()
        self.may_block = mpi.Query_thread() == mpi.THREAD_MULTIPLE
        self.largest_count = None if mpi.Get_version() >= (4, 0) else LARGEST_COUNT
        self.spins = _SPINS if has_cores_for_all() else 1
        self.rank: int = mpi.COMM_WORLD.Get_rank()
        self.size: int = mpi.COMM_WORLD.Get_size()
        # What the groups share; made by those who need it.
        self.shared: Any = None
        # What MPI may still write to or read from must live, also where nobody waits for it any more.
        self._held: dict[int, Any] = {}

    def hold(self, pending: Any) -> None:
        """Keep what belongs to a request until `let_go`."""
        self._held[id(pending)] = pending

    def let_go(self, pending: Any) -> None:
        """End `hold`."""
        self._held.pop(id(pending), None)

    def error(self, error: BaseException) -> BaseException:
        """Return what the caller gets for an error: one of MPI in its own words, any other as it is."""
        if not isinstance(error, self.mpi.Exception):
            return error
        text = " ".join(str(error.Get_error_string()).split())
        return DistBackendError(f"MPI says: {text}")


class Once:
    """Makes the session of this process when it is first asked for."""

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Session | None = None

    def __call__(self) -> Session:
        """Return the session.

        Raises:
            DistBackendError: There is no MPI library, or it has ended.
        """
        if self._made is None:
            with self._lock:
                self._made = self._made or self._make()
        return self._made


def _start() -> Session:
    if "mpi4py.MPI" not in sys.modules:
        warn_of_other_library()
    try:
        # By default the import starts MPI, with all threads let in, and has it ended when the process ends.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(f"backend 'mpi': {NO_LIBRARY} ({str(error).splitlines()[0]})") from None
    if MPI.Is_finalized():
        raise DistBackendError("backend 'mpi': MPI has been finalized in this process, and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return Session(MPI)


# MPI is one to a process, started once and never again: what is known of it is the module's, no part of a World.
session = Once(_start)


class Polled(Waitable):
    """Something that is found out by looking: nobody rings for it."""

    def __init__(self) -> None:
        self._since_s = 0.0

    def waited_s(self) -> float:
        """Return the seconds since this was first asked for in vain."""
        now_s = time.monotonic()
        if not self._since_s:
            self._since_s = now_s
        return now_s - self._since_s

    def nap_s(self) -> float:
        return min(max(self.waited_s() / _SHARE_OF_WAIT, _SHORTEST_NAP_S), _LONGEST_NAP_S)

    def arm(self, bell: Doorbell) -> None:
        return

    def disarm(self, bell: Doorbell) -> None:
        return


class Requests:
    """Requests of MPI that belong together, and the memory that they use.

    Args:
        session: The session.
        requests: The requests, begun.
        memory: What must live until they are done.
    """

    def __init__(self, session: Session, requests: Sequence[Any], memory: Any) -> None:
        self._session = session
        self._left = list(requests)
        self._memory = memory
        session.hold(self)

    def done(self) -> bool:
        """Return True once all are done; move them on."""
        left = self._left
        with self._session.lock:
            while left and left[-1].Test():
                left.pop()
        if left:
            return False
        self._session.let_go(self)
        self._memory = None
        return True
