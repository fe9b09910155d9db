"""How the ranks of a group get a communicator of their own."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from meshdist.backends.mpi.library import Polled, Session
from meshdist.errors import DistBackendError
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.mpi.backend import MpiBackend

_LOOK_S = 0.1
# How many of those that have not come are looked after at each look.
_LOOKED_AFTER = 16


def new_communicator(backend: MpiBackend) -> Generator[Waitable, None, Any]:
    """Meet all ranks of the group in its store, and make its communicator, which the generator returns."""
    store = backend.options.store
    store.set(f"here/{backend.rank}", "")
    if store.add("num_here", 1) == backend.size:
        store.set("all_here", "")
    yield Gathering(backend)
    making = Making(backend.session, backend.addresses, backend.options.name)
    yield making
    return making.comm


class Gathering(Polled):
    """All ranks of the group have made their first call."""

    def __init__(self, backend: MpiBackend) -> None:
        super().__init__()
        self._backend = backend
        self._store = backend.options.store
        self._absent = [rank for rank in range(backend.size) if rank != backend.rank]
        self._next_look_s = 0.0

    def ready(self) -> bool:
        return self._store.check(["all_here"])

    def check(self) -> None:
        self._backend.look()
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _LOOK_S
        looked_after, self._absent = self._absent[:_LOOKED_AFTER], self._absent[_LOOKED_AFTER:]
        for rank in looked_after:
            if not self._store.check([f"here/{rank}"]):
                self._backend.check_there(rank)
                self._absent.append(rank)

    def missing(self) -> str:
        absent = [rank for rank in range(self._backend.size) if not self._store.check([f"here/{rank}"])]
        return ", ".join(f"rank {rank}" for rank in absent)


class Making(Polled):
    """The communicator of a group is made, by a thread of its own.

    MPI makes it in a call that waits for all members. Of two groups that are used for the first time at once, ranks may
    turn to either first; so none of them may keep the other waiting.
    """

    def __init__(self, session: Session, addresses: list[int], name: str) -> None:
        super().__init__()
        self.comm: Any = None
        self._session = session
        self._addresses = addresses
        # Groups that are made at the same time are told apart by it.
        self._tag = zlib.crc32(name.encode()) % (session.mpi.COMM_WORLD.Get_attr(session.mpi.TAG_UB) + 1)
        self._error: BaseException | None = None
        if not session.may_block:
            self._make()
            return
        threading.Thread(target=self._make, name=f"meshdist-new-{name}", daemon=True).start()

    def ready(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.comm is not None

    def check(self) -> None:
        return

    def missing(self) -> str:
        return "the other ranks to make the group's communicator"

    def _make(self) -> None:
        mpi = self._session.mpi
        try:
            members = mpi.COMM_WORLD.Get_group().Incl(self._addresses)
            comm = mpi.COMM_WORLD.Create_group(members, self._tag)
            members.Free()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            self.comm = comm
        except BaseException as error:  # it belongs to whoever waits
            self._error = DistBackendError(str(self._session.error(error)))
