"""A rank of torch.distributed with its gloo backend, on CPU tensors."""

# ruff: noqa: D102 - Contender says what each method does

from __future__ import annotations

from functools import partial
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist

from sidebyside.contender import (
    COALESCED,
    OUTSTANDING,
    Array,
    Call,
    Contender,
    at_once,
    begin_and_wait,
    both_ways,
    objects_there_and_back,
    parts,
    send_meanwhile,
    there_and_back,
)


class TorchRank(Contender):
    """One rank of a torch.distributed world. Its tensors share the memory of the given arrays."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def barrier(self) -> Call:
        return dist.barrier

    def all_reduce(self, array: Array) -> Call:
        return partial(dist.all_reduce, torch.from_numpy(array))

    def all_reduce_outstanding(self, array: Array) -> Call:
        tensors = [torch.from_numpy(part) for part in parts(array, OUTSTANDING)]
        return begin_and_wait(partial(dist.all_reduce, async_op=True), tensors)

    def all_reduce_coalesced(self, array: Array) -> Call:
        # It warns at each call, which would count against it.
        all_reduce = unwrap(dist.all_reduce_coalesced)
        return partial(all_reduce, [torch.from_numpy(part) for part in parts(array, COALESCED)])

    def broadcast(self, array: Array) -> Call:
        return partial(dist.broadcast, torch.from_numpy(array), 0)

    def reduce(self, array: Array) -> Call:
        return partial(dist.reduce, torch.from_numpy(array), 0)

    def all_gather(self, give: Array, take: Array) -> Call:
        return partial(dist.all_gather, self._blocks(take), torch.from_numpy(give))

    def gather(self, give: Array, take: Array) -> Call:
        return partial(dist.gather, torch.from_numpy(give), self._blocks(take) if self.rank == 0 else None, 0)

    def scatter(self, give: Array, take: Array) -> Call:
        return partial(dist.scatter, torch.from_numpy(take), self._blocks(give) if self.rank == 0 else None, 0)

    def reduce_scatter(self, give: Array, take: Array) -> Call:
        return partial(dist.reduce_scatter, torch.from_numpy(take), self._blocks(give))

    def all_to_all(self, give: Array, take: Array) -> Call:
        return partial(dist.all_to_all, self._blocks(take), self._blocks(give))

    def all_gather_into_tensor(self, give: Array, take: Array) -> Call:
        # Newer versions warn at each call of the older name, which would count against them.
        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return partial(all_gather, torch.from_numpy(take), torch.from_numpy(give))

    def reduce_scatter_tensor(self, give: Array, take: Array) -> Call:
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # likewise
        return partial(reduce_scatter, torch.from_numpy(take), torch.from_numpy(give))

    def all_to_all_single(self, give: Array, take: Array) -> Call:
        return partial(dist.all_to_all_single, torch.from_numpy(take), torch.from_numpy(give))

    def scan(self, array: Array) -> Call:
        raise NotImplementedError  # torch has none, and `libraries` leaves it out

    def send_recv(self, give: Array, take: Array) -> Call:
        return there_and_back(
            self.rank, self.size, dist.send, dist.recv, torch.from_numpy(give), torch.from_numpy(take)
        )

    def recv_from_any(self, give: Array, take: Array) -> Call:
        given, taken = torch.from_numpy(give), torch.from_numpy(take)
        return there_and_back(self.rank, self.size, dist.send, lambda tensor, _: dist.recv(tensor), given, taken)

    def probe_and_recv(self, give: Array, take: Array) -> Call:
        raise NotImplementedError  # torch has no probe, and `libraries` leaves it out

    def send_object(self, give: Array, take: Array) -> Call:
        def recv(sender: int) -> Any:
            objects = [None]
            dist.recv_object_list(objects, sender)
            return objects[0]

        return objects_there_and_back(
            self.rank, self.size, lambda given, to: dist.send_object_list([given], to), recv, give, take
        )

    def exchange(self, give: Array, take: Array) -> Call:
        return both_ways(self.rank, self.size, dist.isend, dist.irecv, torch.from_numpy(give), torch.from_numpy(take))

    # torch has no sendrecv.
    def sendrecv(self, give: Array, take: Array) -> Call:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return at_once(dist.isend, dist.irecv, torch.from_numpy(give), torch.from_numpy(take), after, before)

    def irecv_and_send(self, give: Array, take: Array) -> Call:
        return send_meanwhile(
            dist.send, dist.irecv, torch.from_numpy(give), torch.from_numpy(take), self.rank, self.size
        )

    def _blocks(self, array: Array) -> list[torch.Tensor]:
        return list(torch.from_numpy(array).chunk(self.size))

    def leave(self) -> None:
        dist.destroy_process_group()


def join() -> Contender:
    """Meet the other ranks, as the launcher's environment says."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return TorchRank()
