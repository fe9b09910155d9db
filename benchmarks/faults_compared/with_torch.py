"""The calls in terms of torch.distributed with its gloo backend; its tensors share the memory of the arrays."""

# ruff: noqa: D102 - Library says what each method does

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from faults_compared.library import Array, Library

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Torch(Library):
    """A rank of torch.distributed, or a group."""

    def __init__(self, timeout_s: float = 0.0, group: Any = None) -> None:
        self._timeout_s = timeout_s
        self._group = group
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def join(self, rank: int, size: int, timeout_s: float, url: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        dist.init_process_group("gloo", url, timedelta(seconds=timeout_s), size, rank)

    def leave(self) -> None:
        dist.destroy_process_group()

    def peek(self, host: str, port: int) -> None:
        dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5.0)).num_keys()

    def group(self) -> Library:
        return Torch(self._timeout_s, dist.new_group(timeout=timedelta(seconds=self._timeout_s)))

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        dist.all_reduce(torch.from_numpy(array), _OPS[op], group=self._group)

    def begin(self, array: Array) -> Callable[[], Any]:
        return dist.all_reduce(torch.from_numpy(array), group=self._group, async_op=True).wait

    def broadcast(self, array: Array, root: int) -> None:
        dist.broadcast(torch.from_numpy(array), root, group=self._group)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def send(self, array: Array, dst: int) -> None:
        dist.send(torch.from_numpy(array), dst, group=self._group)

    def recv(self, array: Array, src: int) -> None:
        dist.recv(torch.from_numpy(array), src, group=self._group)


def library() -> Library:
    """Return what is not joined yet."""
    return Torch()
