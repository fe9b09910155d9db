"""A rank of an MPI library through mpi4py's buffer methods, those with a capital letter."""

# ruff: noqa: D102 - Contender says what each method does

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI

from sidebyside.contender import (
    COALESCED,
    OUTSTANDING,
    Array,
    Call,
    Contender,
    both_ways,
    objects_there_and_back,
    parts,
    send_meanwhile,
    there_and_back,
)

_LEAST_NOT_PACKED = 1 << 20


class MpiRank(Contender):
    """One rank of MPI.COMM_WORLD."""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()

    def barrier(self) -> Call:
        return self._comm.Barrier

    def all_reduce(self, array: Array) -> Call:
        return partial(self._comm.Allreduce, MPI.IN_PLACE, array)

    def all_reduce_outstanding(self, array: Array) -> Call:
        arrays = parts(array, OUTSTANDING)

        def call() -> None:
            MPI.Request.Waitall([self._comm.Iallreduce(MPI.IN_PLACE, part) for part in arrays])

        return call

    def all_reduce_coalesced(self, array: Array) -> Call:
        # MPI reduces one array: a program that has several packs them, or calls it for each if they are long.
        arrays, packed = parts(array, COALESCED), np.empty_like(array)
        places = parts(packed, COALESCED)

        def call() -> None:
            np.concatenate(arrays, out=packed)
            self._comm.Allreduce(MPI.IN_PLACE, packed)
            for part, place in zip(arrays, places, strict=True):
                part[...] = place

        def call_for_each() -> None:
            for part in arrays:
                self._comm.Allreduce(MPI.IN_PLACE, part)

        return call if array.nbytes < _LEAST_NOT_PACKED else call_for_each

    def broadcast(self, array: Array) -> Call:
        return partial(self._comm.Bcast, array, 0)

    def reduce(self, array: Array) -> Call:
        # Rank 0's array keeps its place: MPI takes no array that is sent and received at once.
        if self.rank == 0:
            return partial(self._comm.Reduce, MPI.IN_PLACE, array)
        return partial(self._comm.Reduce, array, None)

    # MPI has no lists of arrays: what is nearest are blocks of one.
    def all_gather(self, give: Array, take: Array) -> Call:
        return self.all_gather_into_tensor(give, take)

    def reduce_scatter(self, give: Array, take: Array) -> Call:
        return self.reduce_scatter_tensor(give, take)

    def all_to_all(self, give: Array, take: Array) -> Call:
        return self.all_to_all_single(give, take)

    def gather(self, give: Array, take: Array) -> Call:
        return partial(self._comm.Gather, give, take if self.rank == 0 else None)

    def scatter(self, give: Array, take: Array) -> Call:
        return partial(self._comm.Scatter, give if self.rank == 0 else None, take)

    def all_gather_into_tensor(self, give: Array, take: Array) -> Call:
        return partial(self._comm.Allgather, give, take)

    def reduce_scatter_tensor(self, give: Array, take: Array) -> Call:
        return partial(self._comm.Reduce_scatter_block, give, take)

    def all_to_all_single(self, give: Array, take: Array) -> Call:
        return partial(self._comm.Alltoall, give, take)

    def scan(self, array: Array) -> Call:
        return partial(self._comm.Scan, MPI.IN_PLACE, array)

    def send_recv(self, give: Array, take: Array) -> Call:
        return there_and_back(self.rank, self.size, self._comm.Send, self._comm.Recv, give, take)

    def recv_from_any(self, give: Array, take: Array) -> Call:
        return there_and_back(
            self.rank, self.size, self._comm.Send, lambda array, _: self._comm.Recv(array), give, take
        )

    def probe_and_recv(self, give: Array, take: Array) -> Call:
        comm, status = self._comm, MPI.Status()

        def recv(array: Array, _: int) -> None:
            comm.Probe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            comm.Recv(array, status.source, status.tag)

        return there_and_back(self.rank, self.size, comm.Send, recv, give, take)

    def send_object(self, give: Array, take: Array) -> Call:
        comm = self._comm
        return objects_there_and_back(
            self.rank, self.size, comm.send, lambda sender: comm.recv(source=sender), give, take
        )

    def exchange(self, give: Array, take: Array) -> Call:
        return both_ways(self.rank, self.size, self._comm.Isend, self._comm.Irecv, give, take)

    def sendrecv(self, give: Array, take: Array) -> Call:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return partial(self._comm.Sendrecv, give, after, 0, take, before, 0)

    def irecv_and_send(self, give: Array, take: Array) -> Call:
        return send_meanwhile(self._comm.Send, self._comm.Irecv, give, take, self.rank, self.size)

    def leave(self) -> None:
        MPI.Finalize()


def join() -> Contender:
    """Importing mpi4py.MPI has met the other ranks."""
    return MpiRank()
