"""What a rank keeps for itself goes straight into its output, whichever way the rest of a call goes."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import meshdist as dist
from meshdist import core
from meshdist.backends.gloo.shm import shm_group
from meshdist.system import platform
from meshdist.system.env_flags import TUNING

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
SIZES = [3, 2000]  # elements of a block


@pytest.fixture
def trio(worlds):
    return worlds.world("gloo", 3)


def blocks(rank, size, length, number=0):
    """Return what `rank` sends to each rank in a call."""
    return [np.arange(length) + 10_000.0 * number + 1000 * rank + 100 * peer for peer in range(size)]


def gathered(size, length, to, number=0):
    return [blocks(rank, size, length, number)[to] for rank in range(size)]


class Call:
    """A call by name, with its inputs and outputs, as one rank makes it."""

    def __init__(self, name, rank, size, length):
        self.name, self.rank, self.size, self.length = name, rank, size, length
        self.is_root = rank == 1
        self.stacked, self.whole = np.zeros(size * length), np.zeros(size * length)
        self.mine, self.parts = np.split(self.stacked, size), [np.zeros(length) for _ in range(size)]

    def make(self, number, **how):
        """Make the call with the inputs of that number; return the outputs, and what they are to be."""
        rank, size, length = self.rank, self.size, self.length
        self.stacked[:] = np.concatenate(blocks(rank, size, length, number))
        for output in (self.whole, *self.parts):
            output[:] = -1
        to_me, to_all = (gathered(size, length, to, number) for to in (rank, 0))
        outputs, wanted, call = {
            "all_to_all_single": ([self.whole], [np.concatenate(to_me)], (self.whole, self.stacked)),
            "all_to_all": (self.parts, to_me, (self.parts, self.mine)),
            "all_gather_into_tensor": ([self.whole], [np.concatenate(to_all)], (self.whole, self.mine[0])),
            "all_gather": (self.parts, to_all, (self.parts, self.mine[0])),
            "gather": (self.parts, to_all, (self.mine[0], self.parts if self.is_root else None, 1)),
            "scatter": (
                self.parts[:1],
                [blocks(1, size, length, number)[rank]],
                (self.parts[0], self.mine if self.is_root else None, 1),
            ),
        }[self.name]
        work = getattr(dist, self.name)(*call, **how)
        if how:
            work.wait()
        return (outputs, wanted) if self.name != "gather" or self.is_root else ([], [])


NAMES = ["all_to_all_single", "all_to_all", "all_gather_into_tensor", "all_gather", "gather", "scatter"]


def again_and_again(name, length, is_async, times=6):
    rank = dist.get_rank()
    call = Call(name, rank, dist.get_world_size(), length)
    for number in range(times):
        if number == 4 and rank == 0:
            threading.Event().wait(0.05)  # longer than the core waits: the others go on in Python
        outputs, wanted = call.make(number, **({"async_op": True} if is_async else {}))
        for output, block in zip(outputs, wanted, strict=True):
            np.testing.assert_array_equal(output, block)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_rank_gets_every_block(trio, name, length, is_async):
    trio.run(again_and_again, name, length, is_async)


def in_place(length=50, times=4):
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = np.concatenate(gathered(size, length, 0))
    for _ in range(times):
        whole = np.zeros(size * length)
        own = whole[rank * length : (rank + 1) * length]
        own[:] = blocks(rank, size, length)[0]
        dist.all_gather_into_tensor(whole, own)
        np.testing.assert_array_equal(whole, wanted)
        parts = [np.zeros(length) for _ in range(size)]
        parts[rank][:] = blocks(rank, size, length)[0]
        dist.gather(parts[rank], parts if rank == 1 else None, 1)
        if rank == 1:
            np.testing.assert_array_equal(np.concatenate(parts), wanted)
        given = blocks(1, size, length)
        taken = given[1] if rank == 1 else np.zeros(length)
        dist.scatter(taken, given if rank == 1 else None, 1)
        np.testing.assert_array_equal(taken, blocks(1, size, length)[rank])


def test_an_output_may_be_where_its_block_is_sent_from(trio):
    trio.run(in_place)


def with_caches_that_hold_nothing(program, *args):
    known, shm_group.cache_bytes = shm_group.cache_bytes, lambda: 1
    try:
        program(*args)
    finally:
        shm_group.cache_bytes = known


@pytest.mark.parametrize("name", NAMES)
def test_every_way_brings_every_block_past_the_caches(trio, name):
    # So often that every way of moving them is tried. The plans are new ones, of blocks that are not whole cache lines.
    trio.run(with_caches_that_hold_nothing, again_and_again, name, 20_011, False, 30)


def test_past_the_caches_an_output_may_be_where_its_block_is_sent_from(trio):
    trio.run(with_caches_that_hold_nothing, in_place, 20_013, 30)


@pytest.mark.parametrize(
    ("files", "num_processors", "num_bytes"),
    [
        (
            {"index2/size": "1024K\n", "index3/size": "32768K\n", "index3/shared_cpu_list": "0-7\n", "uevent": ""},
            20,
            3 << 25,
        ),
        ({"index0/size": "32K\n", "index0/shared_cpu_list": "0,2\n"}, 2, 32 << 10),
        ({"index0/size": "32K\n"}, 2, 0),
        ({"uevent": ""}, 2, 0),
        ({"index0/size": "much\n", "index0/shared_cpu_list": "0\n"}, 2, 0),
    ],
)
def test_the_size_of_the_caches(monkeypatch, tmp_path, files, num_processors, num_bytes):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(platform, "_CACHES", str(tmp_path))
    monkeypatch.setattr(os, "cpu_count", lambda: num_processors)
    assert platform.cache_bytes.__wrapped__() == num_bytes


@pytest.mark.parametrize("name", ["gather", "scatter", "all_gather"])
def test_every_rank_counts_the_arrays_of_a_call_alike(trio, name):
    assert len({*trio.run(counted_bytes, name)}) == 1


def counted_bytes(name):
    """Return from how many bytes of caches on a call is not one that exceeds them."""
    rank, size, block = dist.get_rank(), dist.get_world_size(), np.zeros(100_000)
    whole = [np.zeros(100_000) for _ in range(size)]
    seen: list[int] = []
    known, streams = shm_group.cache_bytes, shm_group.ShmGroup.streams

    def note(shm, call):
        for limit in range(block.nbytes, 40 * block.nbytes, block.nbytes):
            shm_group.cache_bytes = lambda limit=limit: limit
            if not streams(shm, call):
                break
        seen.append(limit)
        return False

    shm_group.ShmGroup.streams = note
    before, os.environ[TUNING] = os.environ.get(TUNING, "on"), "force"
    try:
        group = dist.new_group()
        call = {
            "gather": lambda: group.gather(block, whole if rank == 1 else None, group_dst=1),
            "scatter": lambda: group.scatter(block, whole if rank == 1 else None, group_src=1),
            "all_gather": lambda: group.all_gather(whole, block),
        }[name]
        backend = group.usable_backend("test")
        for _ in range(300):  # each way is tried, more often where others have the cores
            call()
            if all(choice.chosen is not None for choice in backend.choices()):
                break
    finally:
        shm_group.ShmGroup.streams, shm_group.cache_bytes = streams, known
        os.environ[TUNING] = before
    return seen[0]
