"""The memory of shared arrays: who has it, how long, and that to NumPy it is like any other."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import threading
import time

import numpy as np
import pytest
from shared_programs import held_bytes, is_shared, mapped_bytes
from until import until

import meshdist as dist
from meshdist.backends.gloo.shm.heap import Heap
from meshdist.backends.gloo.shm.segment import map_until_unused

pytestmark = pytest.mark.timeout(60)
needs_gloo = pytest.mark.skipif(sys.platform != "linux", reason="backend gloo shares memory on Linux only")
MIB = 1 << 20


@pytest.fixture
def two(worlds):
    return worlds.world("gloo", 2)


# ---- On every backend


def makes_arrays():
    x, y, z = dist.empty((3, 4), np.float32), dist.zeros(100_000), dist.full((2, 20_000), 7)
    assert (x.shape, x.dtype, y.dtype, z.dtype) == ((3, 4), np.float32, np.float64, np.asarray(7).dtype)
    assert all(type(array) is np.ndarray and array.flags.c_contiguous and array.flags.writeable for array in (x, y, z))
    assert not y.any()
    assert (z == 7).all()
    assert dist.full(3, [1, 2, 3], "int16").tolist() == [1, 2, 3]
    assert dist.empty(np.int64(5), bool, dist.group.WORLD).shape == (5,)
    assert dist.empty((), group=dist.new_group()).shape == ()
    assert dist.empty((0, 3)).shape == (0, 3)
    total = dist.all_reduce(dist.full(50_000, dist.get_rank() + 1.0))
    size = dist.get_world_size()
    assert (total == size * (size + 1) / 2).all()


def test_arrays_of_every_backend(world):
    world.run(makes_arrays)


def test_arrays_of_a_dry_run():
    with dist.dry_run(world_size=4):
        assert dist.all_reduce(dist.full(9000, 2.0)).tolist() == [8.0] * 9000


def test_before_init():
    with pytest.raises(ValueError, match="the default process group .*; call meshdist.init_process_group"):
        dist.empty(3)


@pytest.mark.parametrize(
    ("error", "text", "args"),
    [
        (TypeError, r"empty on group 'world' \(rank 0 of 1\): shape must be an integer or .* got 2.5", (2.5,)),
        (TypeError, r"empty on group 'world' \(rank 0 of 1\): shape must be an integer or .* got \('a',\)", (("a",),)),
        (ValueError, r"empty on group 'world' \(rank 0 of 1\): shape must not be negative, got \(3, -1\)", ((3, -1),)),
        (TypeError, r"empty on group 'world' \(rank 0 of 1\): dtype has the unsupported dtype object", (3, object)),
        (TypeError, "group must be a ProcessGroup", (3, float, "world")),
    ],
)
def test_wrong_arguments(error, text, args):
    with pytest.raises(error, match=text):
        dist.run(lambda: dist.empty(*args), 1)


def of_a_mesh():
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    one, other = dist.empty(10_000, "int32", mesh["dp"]), dist.new_group([0])
    one[:] = 1 + dist.get_rank()
    mesh["dp"].all_reduce(one)
    return int(one[0]), dist.zeros(3, group=other).tolist()


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=needs_gloo)])
def test_of_a_mesh_and_of_a_group_this_rank_is_not_in(worlds, backend):
    assert worlds.world(backend, 2).run(of_a_mesh) == [(3, [0.0] * 3)] * 2


# ---- In shared memory


def shares_with_its_peer():
    x = dist.empty(MIB, np.uint8)
    alone = mapped_bytes()
    dist.all_reduce(x)
    group = dist.new_group()
    group.all_reduce(x)
    return alone, mapped_bytes()


@needs_gloo
def test_all_groups_look_at_one_mapping(worlds):
    worlds.drop("gloo", 2)  # ranks keep what they have mapped of their peers' arrays
    assert worlds.world("gloo", 2).run(shares_with_its_peer) == [(MIB, 2 * MIB)] * 2


def shared_among_small_ones():
    small, large = [dist.empty(1000) for _ in range(100)], dist.empty(100_000)
    return sum(map(is_shared, small)), is_shared(large)


@needs_gloo
def test_small_arrays_are_ordinary(two):
    assert two.run(shared_among_small_ones) == [(0, True)] * 2


def until_nothing_is_held():
    """Wait until the memory of dead arrays is given back: a thread does that, maybe after the test that made them."""
    until(lambda: held_bytes() == 0, "the memory of all arrays is given back")


def dies_with_its_last_view():
    gc.collect()
    until_nothing_is_held()
    x = dist.empty((1024, 1024), np.uint8)
    view = x[5:, 7:9].T
    view[...] = 3
    dist.all_reduce(x)
    del x
    held = held_bytes()
    value = int(view[0, 0])
    del view
    # Also what the peer has mapped is given back.
    dist.barrier()
    until_nothing_is_held()
    return held, value


@needs_gloo
def test_a_view_keeps_it_alive_and_the_last_one_gives_it_back(two):
    assert two.run(dies_with_its_last_view) == [(MIB, 6)] * 2


def made_and_dropped(times):
    gc.collect()
    for value in range(times):
        x = dist.full(65_536, value, np.int64)
        assert (dist.all_reduce(x) == 2 * value).all()
    del x
    until_nothing_is_held()
    return mapped_bytes() < 300 * MIB


@needs_gloo
def test_many_one_after_the_other(two):
    assert two.run(made_and_dropped, 300) == [True] * 2


def copies():
    x = dist.empty(MIB, np.uint8)
    x[:] = np.arange(MIB) % 251
    others = [x.copy(), copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)), np.array(x), x + np.uint8(0)]
    assert all((other == x).all() for other in others)
    others[0][:] = 0
    return sum(map(is_shared, [x, *others])), int(x[1])


@needs_gloo
def test_copies_and_pickles_are_ordinary(two):
    assert two.run(copies) == [(1, 1)] * 2  # x alone is in shared memory


def forks():
    x = dist.full(MIB, 5, np.uint8)
    pid = os.fork()
    if pid == 0:
        del x
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    return int(x.sum()), int(dist.all_reduce(x)[0])


@needs_gloo
def test_a_forked_process_gives_nothing_back(two):
    assert two.run(forks) == [(5 * MIB, 10)] * 2


def sums_of(count):
    group = dist.new_group()
    x, y = dist.full(count, 1.0), dist.full(count, 2.0)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, group=group, async_op=True)]
    for work in works:
        work.wait()
    return float(x[-1]), float(y[-1])


@needs_gloo
def test_async_calls_of_two_groups_at_once(two):
    assert two.run(sums_of, 300_000) == [(2.0, 4.0)] * 2


def map_once_more():
    fd = os.memfd_create("a mapping")
    try:
        memory = map_until_unused(fd, 0, os.ftruncate(fd, MIB) or MIB)
        np.frombuffer(memory, np.uint8)[:] = 1
    finally:
        os.close(fd)


MADE = {"an own array": lambda: dist.empty(1 << 18), "a mapping of a peer's": map_once_more}


def make_and_drop_while_interrupted(what, times):
    """Be interrupted at random moments, most of them in the death of an array; return how often that was noticed."""
    rng = np.random.default_rng(7)
    noticed = 0
    for _ in range(times):
        interrupt = threading.Timer(float(rng.random()) * 0.004, os.kill, (os.getpid(), signal.SIGINT))
        try:
            interrupt.start()
            end = time.monotonic() + 5
            while time.monotonic() < end:
                MADE[what]()
        except KeyboardInterrupt:
            noticed += 1
        interrupt.join()
    return noticed


@needs_gloo
@pytest.mark.parametrize("what", MADE)
def test_no_ctrl_c_is_lost_in_the_death_of_an_array(two, what):
    assert two.run(make_and_drop_while_interrupted, what, 40) == [40] * 2


def test_a_heap_finds_the_array_of_an_address():
    heap = Heap()
    array = heap.empty((1000, 1000), np.dtype(np.float32))
    extent = heap.find(array[10:].__array_interface__["data"][0])
    assert extent is not None
    assert extent.num_bytes >= array.nbytes
    del array
    heap.close()
