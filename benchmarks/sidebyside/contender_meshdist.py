"""A rank of meshdist, through its public flat functions."""

# ruff: noqa: D102 - Contender says what each method does

from __future__ import annotations

from functools import partial

import numpy as np

import meshdist as dist
from sidebyside.contender import (
    COALESCED,
    OUTSTANDING,
    Array,
    Call,
    Contender,
    begin_and_wait,
    both_ways,
    objects_there_and_back,
    parts,
    send_meanwhile,
    there_and_back,
)


class MeshdistRank(Contender):
    """One rank of a meshdist world."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def barrier(self) -> Call:
        return dist.barrier

    def all_reduce(self, array: Array) -> Call:
        return partial(dist.all_reduce, array)

    def all_reduce_outstanding(self, array: Array) -> Call:
        return begin_and_wait(partial(dist.all_reduce, async_op=True), parts(array, OUTSTANDING))

    def all_reduce_coalesced(self, array: Array) -> Call:
        return partial(dist.all_reduce_coalesced, parts(array, COALESCED))

    def broadcast(self, array: Array) -> Call:
        return partial(dist.broadcast, array, 0)

    def reduce(self, array: Array) -> Call:
        return partial(dist.reduce, array, 0)

    def all_gather(self, give: Array, take: Array) -> Call:
        return partial(dist.all_gather, np.split(take, self.size), give)

    def gather(self, give: Array, take: Array) -> Call:
        return partial(dist.gather, give, np.split(take, self.size) if self.rank == 0 else None, 0)

    def scatter(self, give: Array, take: Array) -> Call:
        return partial(dist.scatter, take, np.split(give, self.size) if self.rank == 0 else None, 0)

    def reduce_scatter(self, give: Array, take: Array) -> Call:
        return partial(dist.reduce_scatter, take, np.split(give, self.size))

    def all_to_all(self, give: Array, take: Array) -> Call:
        return partial(dist.all_to_all, np.split(take, self.size), np.split(give, self.size))

    def all_gather_into_tensor(self, give: Array, take: Array) -> Call:
        return partial(dist.all_gather_into_tensor, take, give)

    def reduce_scatter_tensor(self, give: Array, take: Array) -> Call:
        return partial(dist.reduce_scatter_tensor, take, give)

    def all_to_all_single(self, give: Array, take: Array) -> Call:
        return partial(dist.all_to_all_single, take, give)

    def scan(self, array: Array) -> Call:
        return partial(dist.scan, array)

    def send_recv(self, give: Array, take: Array) -> Call:
        return there_and_back(self.rank, self.size, dist.send, dist.recv, give, take)

    def recv_from_any(self, give: Array, take: Array) -> Call:
        return there_and_back(self.rank, self.size, dist.send, lambda array, _: dist.recv(array), give, take)

    def probe_and_recv(self, give: Array, take: Array) -> Call:
        def recv(array: Array, _: int) -> None:
            found = dist.probe(tag=None)
            dist.recv(array, found.source, tag=found.tag)

        return there_and_back(self.rank, self.size, dist.send, recv, give, take)

    def send_object(self, give: Array, take: Array) -> Call:
        return objects_there_and_back(self.rank, self.size, dist.send_object, dist.recv_object, give, take)

    def exchange(self, give: Array, take: Array) -> Call:
        return both_ways(self.rank, self.size, dist.isend, dist.irecv, give, take)

    def sendrecv(self, give: Array, take: Array) -> Call:
        return partial(dist.sendrecv, give, take, (self.rank + 1) % self.size, (self.rank - 1) % self.size)

    def irecv_and_send(self, give: Array, take: Array) -> Call:
        return send_meanwhile(dist.send, dist.irecv, give, take, self.rank, self.size)

    def leave(self) -> None:
        dist.destroy_process_group()


def join() -> Contender:
    """Meet the other ranks, as the launcher's environment says."""
    dist.init_process_group("gloo")
    return MeshdistRank()
