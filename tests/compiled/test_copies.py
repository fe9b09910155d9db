"""What the compiled core copies into shared memory arrives whole, in whichever way it copies."""

import numpy as np
import pytest

from meshdist import core

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
