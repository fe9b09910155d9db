"""Engines of a third party, and what the ranks do with them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import meshdist as dist
from meshdist.backends import Engine, Incoming, Plan, Waitable, Wrapper


class Posted(Waitable):
    """A message in the store: nothing to wait for."""

    def ready(self):
        return True

    def check(self):
        pass

    def arm(self, bell):
        pass

    def disarm(self, bell):
        pass

    def missing(self):
        return "nobody"


class Awaited(Posted, Incoming):
    """A message that is to come into the store."""

    def __init__(self, store, key, array, source):
        self.store, self.key, self.array, self.source, self.done = store, key, array, source, False

    def ready(self):
        if not self.done and self.store.check([self.key]):
            self.array[...] = np.frombuffer(self.store.get(self.key), self.array.dtype).reshape(self.array.shape)
            self.done = True
        return self.done

    def check(self):
        if self.store.check([f"failed/{self.source}"]):
            reason = self.store.get(f"failed/{self.source}").decode()
            raise dist.DistBackendError(f"rank {self.source} failed: {reason}", peer_failed=True)


class StoreEngine(Engine):
    """Messages through the store, and nothing else: made of the four things that torch gives."""

    def __init__(self, store, rank, size, timeout):
        super().__init__()
        self.store, self.mine, self.num_ranks, self.timeout = store, rank, size, timeout
        self.counts = {}

    def key(self, src, dst, tag):
        count = self.counts[src, dst, tag] = self.counts.get((src, dst, tag), 0) + 1
        return f"{src}/{dst}/{tag}/{count}"

    def send(self, array, dst, tag):
        self.store.set(self.key(self.mine, dst, tag), array.tobytes())
        return Posted()

    def recv(self, array, src, tag):
        return Awaited(self.store, self.key(src, self.mine, tag), array, src)

    def abort(self, reason):
        self.store.set(f"failed/{self.mine}", reason)


class OnlyBarrier(Engine):
    """One collective and no messages."""

    def barrier(self, call):
        return Nothing(self, call)


class Nothing(Plan):
    def steps(self, send, recv):
        return iter(())


class Counting(Wrapper):
    """Counts the plans that it hands on."""

    def __init__(self, inner, options):
        super().__init__(inner, options)
        self.num_plans = 0

    def prepare(self, call):
        self.num_plans += 1
        return super().prepare(call)


def every_collective(name):
    """Run collectives and messages on a group of backend `name`, and compare with what must come."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend=name)
    assert dist.get_backend(group) == name
    assert group.all_reduce(np.full(5, rank + 1.0)).tolist() == [size * (size + 1) / 2] * 5
    assert group.broadcast(np.full(3, rank), src=size - 1).tolist() == [size - 1] * 3
    out = [np.zeros(1) for _ in range(size)]
    group.all_gather(out, np.full(1, float(rank)))
    assert [block.item() for block in out] == list(range(size))
    scattered = np.zeros(1)
    group.reduce_scatter_tensor(scattered, np.arange(size, dtype=float))
    assert scattered.item() == size * rank
    if size > 1:
        taken = np.zeros(1)
        work = group.irecv(taken, (rank - 1) % size)
        group.isend(np.full(1, float(rank)), (rank + 1) % size).wait()
        work.wait()
        assert taken.item() == (rank - 1) % size
    group.barrier()
    dist.destroy_process_group(group)


def register_and_run_every_collective(name):
    dist.Backend.register_backend(name, StoreEngine)
    every_collective(name)


def make_counting(options, pg_options):
    engine = Counting.around(dist.get_backend())(options, pg_options)
    if pg_options is not None:
        pg_options.append(engine)
    return engine


def register_around(name):
    """Register an engine around that of the world, use it, and return how many plans it made."""
    dist.Backend.register_backend(name, make_counting, extended_api=True, devices=["cpu"])
    every_collective(name)
    made = []
    group = dist.new_group([0, 1], backend=name.upper(), pg_options=made)
    for _ in range(3):
        group.all_reduce(np.zeros(2))
    (engine,) = made
    return engine.num_plans


def disagree(name):
    dist.Backend.register_backend(name, StoreEngine)
    group = dist.new_group(backend=name)
    whole, part = np.zeros(group.size()), np.zeros(1)
    call = group.all_reduce if dist.get_rank() == 0 else partial(group.all_gather_into_tensor, whole)
    with pytest.raises(dist.DistBackendError) as caught:
        call(part)
    return str(caught.value)


def use_only_barrier():
    dist.Backend.register_backend("only_barrier", lambda *given: OnlyBarrier())
    group = dist.new_group(backend="only_barrier")
    group.barrier()
    with pytest.raises(dist.DistBackendError) as caught:
        group.all_reduce(np.zeros(3))
    with pytest.raises(dist.DistBackendError, match=r"all_gather on group .*neither a method all_gather"):
        group.all_gather([np.zeros(1)] * group.size(), np.zeros(1))
    group.barrier()  # a refused call breaks nothing
    return str(caught.value)
