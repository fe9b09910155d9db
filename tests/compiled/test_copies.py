"""What the compiled core copies into shared memory arrives whole, in whichever way it copies."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import meshdist as dist
import meshdist.runtime.flight_recorder  # it tells the core what NumPy's arrays are
from meshdist import core
from meshdist.backends.gloo.shm.single_copy import address_of

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(core.module is None, reason=f"there is no compiled core: {core.missing}"),
]
HEAD, PACE, TAIL, WORDS, RING_BYTES = 0, 1, 2, 512, 64 << 10
SIZES = (0, 1, 63, 64, 65, 2047, 2048, 2049, 4096, 8191, 8192, 8193, 20_000, 65_472)
ORDINARY, STREAMING = 0, 1 << 40  # the word in which a sender keeps which way is the faster one
MANY = 10  # often enough for the two to be compared


def stream():
    memory = memoryview(bytearray(8 * WORDS + RING_BYTES))
    return core.Stream(memory, (8 * WORDS, RING_BYTES), (HEAD, TAIL, PACE)), memory.cast("Q")


@pytest.mark.parametrize("way", [ORDINARY, STREAMING])
@pytest.mark.parametrize("size", SIZES)
def test_a_message_through_a_ring_is_the_same(way, size):
    ring, words = stream()
    words[PACE] = way
    for number in range(MANY):
        data = np.random.default_rng(number).integers(0, 256, size + 3, np.uint8)[3:]  # not aligned
        taken = np.zeros(size + 5, np.uint8)[5:]
        assert ring.fill(data, 0, 0, False) == size
        assert ring.drain(taken, 0, False) == size
        assert np.array_equal(taken, data)


@pytest.mark.parametrize("offset", [0, 1, 8, 63])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_into_a_slot_is_the_same_and_nothing_else_is_written(size, offset):
    barrier = core.Barrier()
    slot = np.zeros(offset + size + 64, np.uint8)
    for number in range(MANY):
        data = np.random.default_rng(number).integers(1, 256, size, np.uint8)
        barrier.put(slot[offset : offset + size], data)
        assert np.array_equal(slot[offset : offset + size], data)
        assert not slot[:offset].any()
        assert not slot[offset + size :].any()


def test_only_contiguous_arrays_of_equal_size_are_put():
    barrier = core.Barrier()
    for place, data in ((np.zeros(3), np.zeros(4)), (np.zeros(8)[::2], np.zeros(4)), (np.zeros(4), [0, 0, 0, 0])):
        with pytest.raises(TypeError, match="put"):
            barrier.put(place, data)


@pytest.mark.parametrize("offset", [0, 1, 8, 63])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_copied_around_the_caches_is_the_same_and_nothing_else_is_written(size, offset):
    whole = np.zeros(offset + size + 64, np.uint8)
    data = np.random.default_rng(size).integers(1, 256, size, np.uint8)
    core.module.copy_around_caches(whole[offset : offset + size], data)
    assert np.array_equal(whole[offset : offset + size], data)
    assert not whole[:offset].any()
    assert not whole[offset + size :].any()


@pytest.mark.parametrize("distance", [0, 1, 64, -1, -64])
def test_copies_around_the_caches_may_overlap(distance):
    whole = np.arange(40_000, dtype=np.uint16)
    wanted = whole[1000:31_000].copy()
    core.module.copy_around_caches(whole[1000 + distance : 31_000 + distance], whole[1000:31_000])
    assert np.array_equal(whole[1000 + distance : 31_000 + distance], wanted)


def test_only_contiguous_arrays_of_equal_size_are_copied_around_the_caches():
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    for to, given in ((np.zeros(3), np.zeros(4)), (np.zeros(8)[::2], np.zeros(4)), (np.zeros(4), 0), (fixed, fixed)):
        with pytest.raises(TypeError, match=r"copy_around_caches\(to, from\): two contiguous arrays of equal size"):
            core.module.copy_around_caches(to, given)


# ---- Arrays that lie a little further in their pages than what is copied into them

PAGE = 4096
LONGEST = 700_000
DISTANCES = [*range(-33, 34), 64]


def in_page(place, size):
    """Return so many bytes of zeros from this place in a page on, with as many pages before them and behind."""
    whole = np.zeros(size + 4 * PAGE, np.uint8)
    begin = -address_of(whole) % PAGE + PAGE + place
    return whole, whole[begin : begin + size]


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 5000, 1 << 18, (1 << 18) + 1, LONGEST])
@pytest.mark.parametrize("copies", ["read", "written"])
def test_memory_is_copied_wherever_it_lies(size, copies):
    given = np.random.default_rng(size).integers(1, 256, size, np.uint8)
    for distance in DISTANCES:
        (_, source), (whole, target) = in_page(100, size), in_page(100 + distance, size)
        source[:] = given
        if copies == "read":
            error = core.module.read_memory(os.getpid(), address_of(source), address_of(target), size)
        else:
            error = core.module.write_memory(os.getpid(), address_of(target), address_of(source), size)
        assert error == 0
        assert np.array_equal(target, given)
        assert np.count_nonzero(whole) == size, "nothing else is written"


def test_memory_that_cannot_be_copied_is_told_and_leaves_the_way_free():
    (_, source), (_, target) = in_page(0, LONGEST), in_page(16, LONGEST)
    for copy in (core.module.read_memory, core.module.write_memory):
        assert copy(os.getpid(), PAGE, address_of(target), LONGEST) == errno.EFAULT
        source[:], target[:] = 3, 0
        assert core.module.read_memory(os.getpid(), address_of(source), address_of(target), LONGEST) == 0
        assert (target == 3).all()


def test_several_threads_copy_memory_at_once():
    def copied(number):
        (_, source), (_, target) = in_page(0, LONGEST), in_page(16, LONGEST)
        source[:] = number
        for _ in range(30):
            target[:] = 0
            assert core.module.read_memory(os.getpid(), address_of(source), address_of(target), LONGEST) == 0
            assert (target == number).all()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(copied, range(1, 5)))


def calls_of_arrays_in_pages():
    """Return which calls gave a wrong result, of arrays that lie at several distances in their pages."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), []
    for count in (3000, 1 << 16, 300_000):
        for distance in (-16, 0, 4, 16, 28, 32):
            give, take = (in_page(place, count * size)[1].view(np.float32) for place in (0, distance % PAGE))
            give[:] = np.arange(give.size) % 1000 + 1000 * rank
            due = [np.arange(give.size) % 1000 + 1000 * peer for peer in range(size)]
            part = slice(rank * (count // 4), (rank + 1) * (count // 4))
            dist.sendrecv(give, take, (rank + 1) % size, (rank - 1) % size)
            results = {"sendrecv": (take.copy(), due[rank - 1])}
            dist.all_to_all_single(take, give)
            results["all_to_all_single"] = take.copy(), np.concatenate([array[part] for array in due])
            dist.all_to_all(np.split(take, size), np.split(give, size))
            results["all_to_all"] = take.copy(), np.concatenate([array[part] for array in due])
            dist.all_gather_into_tensor(take, give[: count // 4])
            results["all_gather_into_tensor"] = take.copy(), np.concatenate([array[: count // 4] for array in due])
            dist.broadcast(give if rank == 0 else take, 0)
            results["broadcast"] = (give if rank == 0 else take).copy(), due[0]
            wrong += [(name, count, distance) for name, both in results.items() if not np.array_equal(*both)]
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_calls_copy_arrays_wherever_they_lie(worlds, size):
    assert worlds.world("gloo", size).run(calls_of_arrays_in_pages) == [[]] * size
