"""What all groups of this process share: the post office, and the arithmetic that MPI was taught."""

from __future__ import annotations

from typing import Any

from meshdist.backends.mpi.arithmetic import Arithmetic
from meshdist.backends.mpi.library import Session
from meshdist.backends.mpi.post_office import PostOffice


class Offices:
    """What groups share.

    Attributes:
        office: The messages of this process.
        arithmetic: The datatypes and operations of reductions.
    """

    def __init__(self, session: Session, comm: Any) -> None:
        self.office = PostOffice(session, comm)
        self.arithmetic = Arithmetic(session)


def office_of(session: Session) -> Offices:
    """Return what the groups of this process share.

    In a world that was not made by MPI nobody knows which ranks will ever use it, so the messages go over
    MPI.COMM_WORLD itself, with tags that are not negative and small: a program's own messages there need others.
    """
    with session.lock:
        if session.shared is None:
            session.shared = Offices(session, session.mpi.COMM_WORLD)
        shared: Offices = session.shared
        return shared


def open_offices(session: Session) -> None:
    """Have messages go over a communicator of their own from now on; all ranks of MPI do this together, once."""
    with session.lock:
        if session.shared is None:
            comm = session.mpi.COMM_WORLD.Dup()
            comm.Set_errhandler(session.mpi.ERRORS_RETURN)
            session.shared = Offices(session, comm)
