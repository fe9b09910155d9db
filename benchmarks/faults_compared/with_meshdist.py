"""The calls in terms of meshdist."""

# ruff: noqa: D102 - Library says what each method does

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import meshdist as dist
from faults_compared.library import Array, Library


class Meshdist(Library):
    """A rank of meshdist, or a group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        if group is not None:
            self.rank, self.size = group.rank(), group.size()

    def join(self, rank: int, size: int, timeout_s: float, url: str) -> None:
        self.rank, self.size = rank, size
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=size, timeout=timeout_s)

    def leave(self) -> None:
        dist.destroy_process_group()

    def peek(self, host: str, port: int) -> None:
        dist.TCPStore(host, port, timeout=5.0).num_keys()

    def group(self) -> Library:
        return Meshdist(dist.new_group())

    def all_reduce(self, array: Array, op: str = "sum") -> None:
        dist.all_reduce(array, op, group=self._group)

    def begin(self, array: Array) -> Callable[[], Any]:
        return dist.all_reduce(array, group=self._group, async_op=True).wait

    def broadcast(self, array: Array, root: int) -> None:
        dist.broadcast(array, root, group=self._group)

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def send(self, array: Array, dst: int) -> None:
        dist.send(array, dst, group=self._group)

    def recv(self, array: Array, src: int) -> None:
        dist.recv(array, src, group=self._group)


def library() -> Library:
    """Return what is not joined yet."""
    return Meshdist()
