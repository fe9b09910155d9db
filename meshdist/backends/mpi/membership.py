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
    if backend.session.may_block:
        making = Making(backend.session, backend.addresses, options.name)
        yield making
        return making.comm
    turn = Turn(backend)
    try:
        yield turn
        with backend.session.lock:
            return _make(backend.session, backend.addresses, options.name)
    except backend.session.mpi.Exception as error:
        raise backend.session.error(error) from None
    finally:
        turn.end()


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
        self._name = name
        self._error: BaseException | None = None
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
        try:
            self.comm = _make(self._session, self._addresses, self._name)
        except BaseException as error:  # it belongs to whoever waits
            self._error = DistBackendError(str(self._session.error(error)))


class Turn(Polled):
    """It is the turn of this group to be made, alone of all groups of the job.

    MPI lets one thread in at a time, and the one that makes a group waits there for all its members. Were two groups
    made at once, a rank might wait in the one for a rank that waits in the other.
    """

    def __init__(self, backend: MpiBackend) -> None:
        super().__init__()
        self._backend = backend
        self._own, self._job = backend.options.store, backend.options.world_store
        # The first rank takes a number, and says when it is next; the other members wait for that.
        self._number = self._job.add("mpi/numbers", 1) if backend.rank == 0 else 0
        self._is_on = False

    def ready(self) -> bool:
        if not self._is_on and self._number:
            self._is_on = self._number == 1 or self._job.check([_made_key(self._number - 1)])
            if self._is_on:
                self._own.set("turn", "")
        elif not self._is_on:
            self._is_on = self._own.check(["turn"])
        return self._is_on

    def check(self) -> None:
        self._backend.look()

    def missing(self) -> str:
        return "its turn to make the group's communicator: MPI lets in one thread at a time, and is making others"

    def end(self) -> None:
        """Let the next group be made."""
        if self._number:
            self._job.set(_made_key(self._number), "")


def _made_key(number: int) -> str:
    return f"mpi/made/{number}"


def _make(session: Session, addresses: list[int], name: str) -> Any:
    """Return a new communicator; all its ranks do this."""
    mpi = session.mpi
    # Groups that are made at the same time are told apart by it.
    tag = zlib.crc32(name.encode()) % (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1)
    members = mpi.COMM_WORLD.Get_group().Incl(addresses)
    comm = mpi.COMM_WORLD.Create_group(members, tag)
    members.Free()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm
