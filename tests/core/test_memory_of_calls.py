"""Calls release their memory when they end: nothing of them waits for Python's garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from calls import COLLECTIVES, SYNC_ONLY, Case, make
from mpi_worlds import WORLDS as MPI_WORLDS
from worlds import needs_linux

import meshdist as dist

pytestmark = pytest.mark.timeout(120)
WORLDS = pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param("gloo-hosts", 3, marks=needs_linux),
        pytest.param("threads", 3, marks=pytest.mark.slow),
        *(pytest.param(backend, 3, marks=[needs_linux, pytest.mark.slow]) for backend in ("gloo", "gloo-tcp")),
        *(pytest.param(*world, marks=[needs_linux, pytest.mark.slow]) for world in MPI_WORLDS if world[1] == 3),
    ],
)
SIZES = pytest.mark.parametrize("count", [1, 10_000, 40_000])
CALLS = 8
# A class of ctypes is made once, in a call that comes too late for the first two.
OF_CTYPES = {"CDLL", "PyCFuncPtrType", "StgDict", "getset_descriptor", "tuple", "dict", "type", "_FuncPtr"}


def both_ways(count):
    """Return messages to the next rank and from the one before, by name."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, preceding = (rank + 1) % size, (rank - 1) % size
    x, y = np.ones(count, np.float32), np.ones(count, np.float32)

    def irecv_and_isend():
        works = [dist.irecv(y, preceding), dist.isend(x, following)]
        assert all(work.wait() for work in works)

    def late_recv():
        work = dist.isend(x, following)
        dist.barrier()
        dist.recv(y, preceding)
        work.wait()

    def recv_from_anyone():
        work = dist.isend(x, following)
        assert dist.recv(y) == preceding
        work.wait()

    def probe_and_recv():
        work = dist.isend(x, following)
        assert dist.probe(preceding).source == preceding
        dist.recv(y, preceding)
        work.wait()

    return {
        "irecv and isend": irecv_and_isend,
        "recv after the message has come": late_recv,
        "recv from anyone": recv_from_anyone,
        "probe and recv": probe_and_recv,
        "sendrecv": lambda: dist.sendrecv(x, y, following, preceding),
        "sendrecv_object": lambda: dist.sendrecv_object({"x": x}, following, preceding),
    }


def collectives(count):
    """Return all collectives, sync and async, by name."""
    calls = {}
    for name in COLLECTIVES:
        for async_op in (False, True) if name not in SYNC_ONLY else (False,):
            made = make(replace(Case(name, shape=(count,)), async_op=async_op), dist.get_rank(), dist.get_world_size())
            arrays = [[np.array(array) for array in side] for side in (made.give, made.take)]

            def call(made=made, arrays=arrays, async_op=async_op):
                result = made.call(*arrays, group=dist.group.WORLD, **made.how)
                if async_op:
                    result.wait()

            calls[f"{name}, async" if async_op else name] = call
    return calls


def left_to_the_collector(make_calls, count, in_threads):
    """Return which objects of repeated calls the collector of this process finds, by the name of the call."""
    left, collects = {}, dist.get_rank() == 0 or not in_threads
    if collects:
        gc.freeze()  # what is there already takes most of the time of each collection
    for name, call in make_calls(count).items():
        for _ in range(2):  # plans and connections, and what is imported
            call()
        dist.barrier()
        if collects:
            gc.collect()
            gc.disable()
        dist.barrier()
        try:
            for _ in range(CALLS):
                call()
            dist.barrier()
        finally:
            if collects:
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                found = Counter(type(each).__name__ for each in gc.garbage)
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
        if collects and found["PyCFuncPtrType"]:
            found = Counter({kind: count for kind, count in found.items() if kind not in OF_CTYPES})
        if collects and found:
            left[name] = dict(found)
    if collects:
        gc.unfreeze()
    return left


def received_array_is_free():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.zeros(300_000)
    work = dist.isend(np.ones(300_000), (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)
    received = weakref.ref(x)
    del x
    is_free = received() is None
    work.wait()
    return is_free


def left_in(world, make_calls, count):
    return world.run(left_to_the_collector, make_calls, count, world.backend == "threads")


@WORLDS
@SIZES
def test_collectives_leave_nothing_to_the_garbage_collector(worlds, backend, size, count):
    assert left_in(worlds.world(backend, size), collectives, count) == [{}] * size


@WORLDS
@SIZES
def test_messages_leave_nothing_to_the_garbage_collector(worlds, backend, size, count):
    assert left_in(worlds.world(backend, size), both_ways, count) == [{}] * size


@WORLDS
def test_an_array_that_was_received_is_kept_by_nobody(worlds, backend, size):
    assert worlds.world(backend, size).run(received_array_is_free) == [True] * size
