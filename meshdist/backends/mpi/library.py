"""Session: the MPI library of this process, started once and shared by its groups."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from meshdist.backends.mpi.environment import NO_LIBRARY, has_cores_for_all, warn_of_other_library
from meshdist.errors import DistBackendError
from meshdist.runtime.waiting import Waitable, WithoutBell

if TYPE_CHECKING:
    from meshdist.backends.backend_options import BackendOptions
    from meshdist.system.deadline import Deadline

# Requests have no notification: poll after an eighth of the time waited so far, within these bounds.
_SHORTEST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
_SHARE_OF_WAIT = 8
# Polls before any other work, about ten microseconds, if every rank has a core of its own.
_SPINS = 100
LARGEST_COUNT = (1 << 31) - 1


class Session:
    """The MPI library, shared by all groups; lives as long as the process, since MPI cannot be restarted."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi  # the module mpi4py.MPI, initialized
        self.lock = threading.RLock()  # held for every nonblocking call: the library may not support concurrent calls
        self.may_block = mpi.Query_thread() == mpi.THREAD_MULTIPLE  # threads may block inside MPI
        self.largest_count = None if mpi.Get_version() >= (4, 0) else LARGEST_COUNT  # elements of one call
        self.spins = _SPINS if has_cores_for_all() else 1  # polls before any other work
        self.rank: int = mpi.COMM_WORLD.Get_rank()
        self.size: int = mpi.COMM_WORLD.Get_size()
        # Resources of all groups; see `resources_of`.
        self.shared: Any = None
        # Memory of pending requests must stay alive, even if no caller waits for them.
        self._held: dict[int, Any] = {}

    def hold(self, pending: Any) -> None:
        """Keep the memory of a request alive until `let_go`."""
        self._held[id(pending)] = pending

    def let_go(self, pending: Any) -> None:
        self._held.pop(id(pending), None)

    def error(self, error: BaseException) -> BaseException:
        """Return an error of MPI as DistBackendError with MPI's text, any other as it is."""
        if not isinstance(error, self.mpi.Exception):
            return error
        text = " ".join(str(error.Get_error_string()).split())
        return DistBackendError(f"MPI says: {text}")


class Once:
    """Creates the session at its first use."""

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Session | None = None

    def __call__(self) -> Session:
        """Return the session; raise DistBackendError if there is no MPI library, or MPI is finalized."""
        if self._made is None:
            with self._lock:
                self._made = self._made or self._make()
        return self._made


def _start() -> Session:
    if "mpi4py.MPI" not in sys.modules:
        warn_of_other_library()
    try:
        # By default the import initializes MPI with MPI_THREAD_MULTIPLE and finalizes it at exit.
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(f"backend 'mpi': {NO_LIBRARY} ({str(error).splitlines()[0]})") from None
    if MPI.Is_finalized():
        raise DistBackendError("backend 'mpi': MPI has been finalized in this process and cannot be started again")
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    return Session(MPI)


# One MPI per process, started once: module state, not part of a World.
session = Once(_start)


class Member(Protocol):
    """What the precheck, the messages and the set-up of a group need of its backend."""

    options: BackendOptions
    rank: int
    size: int
    addresses: list[int]

    @property
    def session(self) -> Session: ...

    def look(self) -> None:
        """Raise DistBackendError if another rank has failed, or a precondition of the group is broken."""

    def check_there(self, rank: int) -> None:
        """Raise DistBackendError if a rank has gone away."""

    def wait(self, waitable: Waitable, error_prefix: str, deadline: Deadline | None = None) -> None: ...


class Polled(WithoutBell):
    """A condition that is polled: no doorbell rings for it."""

    def __init__(self) -> None:
        self._since_s = 0.0

    def waited_s(self) -> float:
        """Return the seconds since the first unsuccessful poll."""
        now_s = time.monotonic()
        if not self._since_s:
            self._since_s = now_s
        return now_s - self._since_s

    def poll_interval_s(self) -> float:
        return min(max(self.waited_s() / _SHARE_OF_WAIT, _SHORTEST_NAP_S), _LONGEST_NAP_S)


class Requests:
    """MPI requests that belong together; `memory` stays alive until they are done."""

    def __init__(self, session: Session, requests: Sequence[Any], memory: Any) -> None:
        self._session = session
        self._left = list(requests)
        self._memory = memory
        session.hold(self)

    def done(self) -> bool:
        """Advance the requests; return True once all are done."""
        left = self._left
        with self._session.lock:
            while left and left[-1].Test():
                left.pop()
        if left:
            return False
        self._session.let_go(self)
        self._memory = None
        return True
