"""The calls in terms of MPI, by mpi4py's methods of buffers."""

# ruff: noqa: D102 - Library says what each method does

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from faults_compared.library import Array, Library

_OPS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Mpi(Library):
    """A rank of MPI.COMM_WORLD, or of another communicator."""

    def __init__(self, comm: Any = MPI.COMM_WORLD) -> None:
        self._comm = comm
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def join(self, rank: int, size: int, timeout_s: float, url: str) -> None:
        """Do nothing: mpirun has started and numbered them, and there are no timeouts."""

    def leave(self) -> None:
        MPI.Finalize()

    def peek(self, host: str, port: int) -> None:
        raise NotImplementedError("there is no store")

    def group(self) -> Library:
        return Mpi(self._comm.Dup())

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        self._comm.Allreduce(MPI.IN_PLACE, array, _OPS[op])

    def begin(self, array: Array) -> Callable[[], Any]:
        request = self._comm.Iallreduce(MPI.IN_PLACE, array)
        wait: Callable[[], Any] = request.Wait
        return wait

    def broadcast(self, array: Array, root: int) -> None:
        self._comm.Bcast(array, root)

    def barrier(self) -> None:
        self._comm.Barrier()

    def send(self, array: Array, dst: int) -> None:
        self._comm.Send(array, dst)

    def recv(self, array: Array, src: int) -> None:
        self._comm.Recv(array, src)


def library() -> Library:
    """Return all ranks of the job."""
    return Mpi()
