"""Creation of a group's communicator."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Generator
from typing import Any

from meshdist.backends.group_setup import StoreBarrier
from meshdist.backends.mpi.library import Member, Polled, Session
from meshdist.errors import DistBackendError
from meshdist.runtime.waiting import Waitable


def new_communicator(backend: Member) -> Generator[Waitable, None, Any]:
    """Wait for all ranks of the group in its store, then create its communicator; the generator returns it."""
    options = backend.options
    yield StoreBarrier(options, options.store, tuple(range(backend.size)), "", backend.look)
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
    """Creation of the group's communicator by a thread of its own.

    The MPI call blocks until all members make it. Ranks may first use two groups in different orders, so one creation
    must not block the other.
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
        except BaseException as error:  # raised by `ready`
            self._error = DistBackendError(str(self._session.error(error)))


class Turn(Polled):
    """The turn of this group among all groups of the job whose communicators are being created.

    MPI admits one thread at a time, and creating a group blocks it until all members come. If two groups were created
    at once, a rank might block in one for a rank that blocks in the other.
    """

    def __init__(self, backend: Member) -> None:
        super().__init__()
        self._backend = backend
        self._own, self._job = backend.options.store, backend.options.world_store
        # The first rank draws a number and reports when it is next; the other members wait for that.
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
        return "the creation of other groups' communicators: MPI admits one thread at a time"

    def end(self) -> None:
        """Let the next group create its communicator."""
        if self._number:
            self._job.set(_made_key(self._number), "")


def _made_key(number: int) -> str:
    return f"mpi/made/{number}"


def _make(session: Session, addresses: list[int], name: str) -> Any:
    """Return a new communicator; collective over its ranks."""
    mpi = session.mpi
    # The tag distinguishes groups that are created at the same time.
    tag = zlib.crc32(name.encode()) % (mpi.COMM_WORLD.Get_attr(mpi.TAG_UB) + 1)
    members = mpi.COMM_WORLD.Get_group().Incl(addresses)
    comm = mpi.COMM_WORLD.Create_group(members, tag)
    members.Free()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comm
