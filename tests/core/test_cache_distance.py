"""How far the processors of ranks are apart, as the ranks find out together."""

import os

import pytest

from meshdist import core
from meshdist.backends.gloo.shm.cache_distance import CacheDistance
from meshdist.backends.gloo.shm.segment import create
from meshdist.backends.gloo.shm.shared_region import LINES_BYTES, SharedRegion

pytestmark = [
    pytest.mark.timeout(30),
    pytest.mark.skipif(core.module is None, reason="without the core, the distance is not measured"),
]


@pytest.fixture
def distances():
    segment = create(SharedRegion.num_bytes(3), [os.getpid()])
    yield [CacheDistance(SharedRegion(segment, 3), rank, 3) for rank in range(3)]
    segment.seal()


def test_lines_that_were_just_written_are_near(distances):
    assert core.module.LINES_BYTES == LINES_BYTES
    for distance in distances:
        assert distance.write() is False
    for distance in distances:  # all on this processor
        assert distance.read([False] * 3) is False
        assert distance.write() is False


def told(distance, *answers):
    for answer in answers:
        is_far = distance.read([False, answer, False])
    return is_far, distance.is_due(1 << 20)


def test_ranks_are_far_apart_once_one_has_seen_that_several_times(distances):
    distance = distances[0]
    assert told(distance, False) == (False, False)
    assert told(distance, True) == (False, True), "they look again after the next call"
    assert told(distance, *[True] * 6) == (False, True)
    assert told(distance, True) == (True, False)
    assert told(distance, False) == (True, True)
    assert told(distance, True) == (True, False)
    assert told(distance, *[False] * 8) == (False, False)


def test_they_look_again_after_so_many_bytes(distances):
    few, many = distances[:2]
    num_calls = [next(k for k in range(1, 10**6) if each.is_due(size)) for each, size in ((few, 64), (many, 16 << 20))]
    assert num_calls[0] > 1000
    assert num_calls[1] < 10
