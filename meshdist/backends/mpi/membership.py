"""How the ranks of a group get a communicator of their own."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from meshdist.backends.counting_in import Counted
from meshdist.backends.mpi.library import Polled, Session
from meshdist.errors import DistBackendError
from meshdist.waiting import Waitable

if TYPE_CHECKING:
    from meshdist.backends.mpi.backend import MpiBackend


def new_communicator(backend: MpiBackend) -> Generator[Waitable, None, Any]:
    """Meet all ranks of the group in its store, and make its communicator, which the generator returns."""
    options = backend.options
    yield Counted(options, options.store, tuple(range(backend.size)), "", backend.look)
    making = Making(backend.session, backend.addresses, backend.options.name)
    yield making
    return making.comm


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
