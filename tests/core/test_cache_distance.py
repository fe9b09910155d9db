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
    return is_far, distance.calls_left


def test_ranks_are_far_apart_once_one_has_seen_that_several_times(distances):
    distance = distances[0]
    often = told(distance, False)[1]
    assert told(distance, True) == (False, 1), "they look again after the next call"
    assert told(distance, *[True] * 6) == (False, 1)
    assert told(distance, True) == (True, often)
    assert told(distance, False) == (True, 1)
    assert told(distance, True) == (True, often)
    assert told(distance, *[False] * 8) == (False, often)
